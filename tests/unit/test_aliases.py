"""Tensors of a module that share memory, and tensors without memory, are found before sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.engine.checks import check_aliases, check_materialized

CPU = torch.device("cpu")


class Two(nn.Module):
    """Two layers of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)


def same_data(m: Any) -> None:
    m.head.weight.data = m.emb.weight.data


def wrapped(m: Any) -> None:
    m.head.weight = nn.Parameter(m.emb.weight)


def transposed(m: Any) -> None:
    m.head.weight = nn.Parameter(m.emb.weight.detach().t())


def overlapping(m: Any) -> None:
    memory = torch.randn(40)
    m.emb.weight = nn.Parameter(memory[:24].view(6, 4))
    m.head.weight = nn.Parameter(memory[16:].view(6, 4))


def inside(m: Any) -> None:
    m.row = nn.Parameter(m.emb.weight.detach()[2])


def behind_a_long_one(m: Any) -> None:
    memory = torch.randn(100)
    m.long = nn.Parameter(memory)
    m.short = nn.Parameter(memory[2:4])
    m.late = nn.Parameter(memory[90:])


def other_dtype(m: Any) -> None:
    m.bits = nn.Parameter(m.emb.weight.detach().view(torch.int32), requires_grad=False)


def frozen(m: Any) -> None:
    same_data(m)
    m.requires_grad_(False)


def buffer_of_weight(m: Any) -> None:
    m.register_buffer("copy", m.emb.weight.detach())


def view_in_graph(m: Any) -> None:
    m.register_buffer("copy", m.emb.weight.t(), persistent=False)


def weight_of_buffer(m: Any) -> None:
    m.register_buffer("whole", torch.randn(10, 4))
    m.emb.weight = nn.Parameter(m.whole[4:])


def attribute(m: Any) -> None:
    m.head.cached = m.emb.weight.data


def attribute_in_a_list(m: Any) -> None:
    m.head.cached = [torch.zeros(2), m.emb.weight[0]]


def other_columns(m: Any) -> None:
    memory = torch.randn(6, 8)
    m.emb.weight, m.head.weight = nn.Parameter(memory[:, :4]), nn.Parameter(memory[:, 3:7])


@pytest.mark.parametrize(
    ("alias", "names"),
    [
        (same_data, ("emb.weight", "head.weight")),
        (wrapped, ("emb.weight", "head.weight")),
        (transposed, ("emb.weight", "head.weight")),
        (overlapping, ("emb.weight", "head.weight")),
        (inside, ("emb.weight", "row")),
        (behind_a_long_one, ("long", "short")),
        (other_dtype, ("emb.weight", "bits")),
        (frozen, ("emb.weight", "head.weight")),
        (buffer_of_weight, ("emb.weight", "copy")),
        (view_in_graph, ("emb.weight", "copy")),
        (weight_of_buffer, ("emb.weight", "whole")),
        (attribute, ("emb.weight", "head.cached")),
        (attribute_in_a_list, ("emb.weight", "head.cached")),
        (other_columns, ("emb.weight", "head.weight")),
    ],
)
def test_a_parameter_that_shares_memory_is_refused_with_both_names(
    alias: Callable[[Any], None], names: tuple[str, str]
) -> None:
    module = Two()
    alias(module)
    with pytest.raises(NotImplementedError, match="share") as error:
        check_aliases(module, CPU)
    assert all(f"'{name}'" in str(error.value) for name in names)
    assert "clone()" in str(error.value)


def test_the_way_out_ties_the_parameters() -> None:
    module = Two()
    same_data(module)
    with pytest.raises(NotImplementedError, match="share the same memory") as error:
        check_aliases(module, CPU)
    assert "`module.head.weight = module.emb.weight`" in str(error.value)
    exec("module.head.weight = module.emb.weight", {"module": module})
    check_aliases(module, CPU)


def neighbours(m: Any) -> None:
    memory = torch.randn(48)
    m.emb.weight = nn.Parameter(memory[:24].view(6, 4))
    m.head.weight = nn.Parameter(memory[24:].view(6, 4))


def columns(m: Any) -> None:
    memory = torch.randn(6, 8)
    m.emb.weight, m.head.weight = nn.Parameter(memory[:, :4]), nn.Parameter(memory[:, 4:])


def tied(m: Any) -> None:
    m.head.weight = m.emb.weight


def recurrent(m: Any) -> None:
    m.rnn = nn.LSTM(4, 4, num_layers=2, bidirectional=True)


def normalized(m: Any) -> None:
    nn.utils.spectral_norm(m.head)


def parametrized(m: Any) -> None:
    nn.utils.parametrizations.weight_norm(m.head)


def empty(m: Any) -> None:
    m.a, m.b = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0, 3))


def buffers_among_themselves(m: Any) -> None:
    m.register_buffer("a", torch.randn(4))
    m.register_buffer("b", m.a[1:])


def frozen_and_expanded(m: Any) -> None:
    m.scale = nn.Parameter(torch.ones(1).expand(5), requires_grad=False)


@pytest.mark.parametrize(
    "make",
    [
        neighbours,
        columns,
        tied,
        recurrent,
        normalized,
        parametrized,
        empty,
        buffers_among_themselves,
        frozen_and_expanded,
    ],
)
def test_a_module_whose_parameters_lie_apart_is_accepted(make: Callable[[Any], None]) -> None:
    module = Two()
    make(module)
    check_aliases(module, CPU)


def test_an_expanded_parameter_that_is_trained_is_refused() -> None:
    module = Two()
    module.scale = nn.Parameter(torch.ones(1).expand(5))
    with pytest.raises(NotImplementedError, match=r"'scale' of shape \(5,\) and stride \(0,\)"):
        check_aliases(module, CPU)


def test_what_the_move_to_the_device_separates_is_no_alias() -> None:
    module = Two()
    same_data(module)
    check_aliases(module, torch.device("cuda"))


def test_tensors_on_meta_are_named_with_the_way_out() -> None:
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)), nn.BatchNorm1d(2))
    module[0] = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"'1.weight', .* and 6 more are on the meta.*to_empty"):
        check_materialized(module)
    check_materialized(Two())
