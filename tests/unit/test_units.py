"""Which parameters are gathered together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_zero.engine.units import UnitPhase, ZeroUnit, plan_units


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


class Gpt(nn.Module):
    def __init__(self, width: int = 64, layers: int = 6, vocab: int = 512) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)


def names(module: nn.Module, bucket_bytes: int) -> dict[str, set[str]]:
    return {plan.name: set(plan.params) for plan in plan_units(module, bucket_bytes)}


def test_blocks_and_large_embeddings_become_units_and_the_rest_is_the_root_unit() -> None:
    found = names(Gpt(), 50_000)
    blocks = {f"'blocks.{i}'" for i in range(6)}
    assert set(found) == {"the root unit", "'tok'", "'head'"} | blocks
    assert found["the root unit"] == {"norm.weight", "norm.bias"}


def test_small_neighbours_share_a_unit() -> None:
    found = names(nn.Sequential(*(nn.Linear(10, 10) for _ in range(200))), 10_000)
    assert len(found) <= 1 + 200 * 440 // 10_000
    assert "'0' to '22'" in found


def test_a_small_model_is_one_unit() -> None:
    assert set(names(Gpt(layers=2), 1 << 20)) == {"the root unit"}


def test_a_tied_weight_belongs_to_the_root_unit() -> None:
    model = Gpt()
    model.head.weight = model.tok.weight
    found = names(model, 50_000)
    assert "tok.weight" in found["the root unit"]


def test_a_module_reached_on_two_paths_is_planned_once() -> None:
    shared = Block(32)
    model = nn.ModuleDict({"a": nn.Sequential(shared, Block(32)), "b": nn.Sequential(shared)})
    planned = [name for plan in plan_units(model, 1) for name in plan.params]
    assert sorted(planned) == sorted(name for name, _ in model.named_parameters())


def test_chosen_classes_are_units_whatever_their_size() -> None:
    plans = plan_units(Gpt(), 1 << 20, (Block,))
    assert [plan.name for plan in plans[1:]] == [f"'blocks.{i}'" for i in range(6)]


@given(widths=st.lists(st.integers(1, 40), min_size=1, max_size=12), bucket=st.integers(1, 20_000))
def test_every_parameter_is_in_exactly_one_unit(widths: list[int], bucket: int) -> None:
    layers = [nn.Sequential(nn.Linear(w, w), nn.Linear(w, 3)) for w in widths]
    model = nn.ModuleList([nn.Sequential(*layers[::2]), nn.ModuleList(layers[1::2])])
    plans = plan_units(model, bucket)
    planned = [name for plan in plans for name in plan.params]
    assert sorted(planned) == sorted(name for name, _ in model.named_parameters())
    total = sum(plan.nbytes for plan in plans)
    assert len(plans) <= 2 + total // bucket  # bounded by bytes, not by parameters


def test_an_invalid_phase_change_names_the_unit() -> None:
    unit = ZeroUnit(0, "'blocks.0'", [])
    unit.phase = UnitPhase.BACKWARD
    with pytest.raises(RuntimeError, match=r"BACKWARD -> FORWARD for unit ''blocks.0''"):
        unit.phase = UnitPhase.FORWARD
