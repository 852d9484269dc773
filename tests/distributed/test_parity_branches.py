"""Control flow that differs from step to step and from rank to rank.

Stages 1 and 2 reduce in one fixed order, so nothing that a rank leaves out can hold up the others:
they give what DDP with `find_unused_parameters=True` gives. Stage 3 gathers a layer when it is
used, which takes all ranks: it gives the same, or every rank ends with an error that names what
was used on some ranks only.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import models
from tests.support.models import ADAM, SGD, Regression, regression_loader
from tests.support.runs import DDP_UNUSED, STAGES, Case, check_parity, whole

NAMES_THE_LAYER = r"experts\.\d|optional|layers\.\d"
SIX_BATCHES = partial(regression_loader, 6)


class OptionalLayer(Regression):
    """A layer that is used in some steps; `when` says in which, for this rank."""

    def __init__(self, when: str, optimizer: Any = ADAM) -> None:
        super().__init__(optimizer=optimizer)
        self.optional = nn.Linear(7, 7)
        self.when = when

    def is_used(self, batch_idx: int) -> bool:
        if self.when == "even_steps":
            return batch_idx % 2 == 0
        if self.when == "alternating_ranks":
            return batch_idx % 2 == models.rank()
        if self.when == "rank_0":
            return models.rank() == 0
        return batch_idx == 1 and models.rank() == 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if self.is_used(batch_idx):
            x = x + self.optional(x)
        return self.loss((x, y))


class Experts(nn.Module):
    """Each row goes to the expert that a router picks, so that ranks use different ones."""

    def __init__(self, picks_by_rank: bool) -> None:
        super().__init__()
        self.picks_by_rank = picks_by_rank
        self.router = nn.Linear(7, 4)
        self.experts = nn.ModuleList(nn.Linear(7, 5) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        choice = scores.argmax(-1)
        if self.picks_by_rank:
            choice = torch.full_like(choice, models.rank())
        out = x.new_zeros(len(x), 5)
        for index in choice.unique().tolist():
            rows = choice == index
            out[rows] = self.experts[index](x[rows]) * scores[rows, index].unsqueeze(1)
        return out


class LayerDrop(nn.Module):
    """Layers are dropped at random: the same ones on all ranks, or each rank its own."""

    def __init__(self, same_on_all_ranks: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))
        self.out = nn.Linear(7, 5)
        self.generator = torch.Generator().manual_seed(5 if same_on_all_ranks else models.rank())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand((), generator=self.generator) < 0.5:
                x = x + torch.tanh(layer(x))
        return self.out(x)


class ChangesOrderByRank(nn.Module):
    """All ranks use all layers, in another order each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.out = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self.layers)
        for layer in layers if models.rank() == 0 else reversed(layers):
            x = x + torch.tanh(layer(x))
        return self.out(x)


class GeneratesUnequally(Regression):
    """Validation calls the net more often on one rank than on the other, as generation does."""

    def __init__(self, in_full_params: bool) -> None:
        super().__init__(partial(models.mlp, 7, 13, 7))
        self.in_full_params = in_full_params
        self.out = nn.Linear(7, 5)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.out(self.net(batch[0])), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scope = whole(self.net, self.trainer) if self.in_full_params else nullcontext()
        x = batch[0]
        with scope:
            for _ in range(3 + 2 * models.rank()):
                x = self.net(x)
        self.note("generated", x)


def _case(module: Any, **more: Any) -> Case:
    return Case(module, SIX_BATCHES, reference=DDP_UNUSED, **more)


# The same on all ranks: no stage has an excuse.
ALIKE = {
    "even_steps": _case(partial(OptionalLayer, "even_steps")),
    "even_steps_sgd": _case(partial(OptionalLayer, "even_steps", SGD)),
    "even_steps_accumulated": _case(
        partial(OptionalLayer, "even_steps"), trainer={"accumulate_grad_batches": 3}
    ),
    "layer_drop": _case(partial(Regression, partial(LayerDrop, True))),
}
UNLIKE_MODULES = {
    "alternating_ranks": partial(OptionalLayer, "alternating_ranks"),
    "alternating_ranks_sgd": partial(OptionalLayer, "alternating_ranks", SGD),
    "rank_0_only": partial(OptionalLayer, "rank_0"),
    "once_on_rank_1": partial(OptionalLayer, "once"),
    "experts_by_rank": partial(Regression, partial(Experts, True)),
    "experts_by_router": partial(Regression, partial(Experts, False)),
    "layer_drop": partial(Regression, partial(LayerDrop, False)),
    "order_by_rank": partial(Regression, ChangesOrderByRank),
}
UNLIKE = {
    name: _case(module, stage_3_refusal=NAMES_THE_LAYER) for name, module in UNLIKE_MODULES.items()
}
UNLIKE["alternating_accumulated"] = _case(
    partial(OptionalLayer, "alternating_ranks"),
    trainer={"accumulate_grad_batches": 3},
    stage_3_refusal=NAMES_THE_LAYER,
)


GENERATION = {
    "in_full_params": Case(
        partial(GeneratesUnequally, True), validation_data=partial(regression_loader, 2)
    ),
    "unprepared": Case(
        partial(GeneratesUnequally, False),
        validation_data=partial(regression_loader, 2),
        stage_3_refusal=r"net\.\d",
    ),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ALIKE)
def test_layers_left_out_by_all_ranks_give_ddps_numbers(name: str, stage: str) -> None:
    check_parity(ALIKE[name], stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", UNLIKE)
def test_layers_used_by_some_ranks_give_ddps_numbers_or_an_error(name: str, stage: str) -> None:
    check_parity(UNLIKE[name], stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", GENERATION)
def test_generation_of_unequal_length_finishes_or_is_an_error(name: str, stage: str) -> None:
    check_parity(GENERATION[name], stage)


@pytest.mark.parametrize("stage", STAGES[:2])
@pytest.mark.parametrize("name", ["alternating_ranks", "experts_by_rank"])
def test_branches_on_three_ranks(name: str, stage: str) -> None:
    check_parity(UNLIKE[name], stage, world_size=3)
