"""With rounded weights, what is recomputed in backward is what the forward has computed."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.compare import assert_same
from tests.support.distributed import run_on_ranks
from tests.support.models import SGD, Regression
from tests.support.runs import STAGES, Case, RunRecord, train


class RecomputesItself(nn.Module):
    """Recomputes a function of its own that uses its parameters, as vision transformers do."""

    def __init__(self, mode: bool | None, is_frozen: bool) -> None:
        super().__init__()
        self.norm, self.inner, self.out = nn.LayerNorm(7), nn.Linear(7, 7), nn.Linear(7, 5)
        self.gamma = nn.Parameter(torch.rand(7) + 0.5, requires_grad=not is_frozen)
        self.mode = mode

    def part(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(self.norm(x)) * self.gamma) * self.gamma

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        if self.mode is None:
            return self.out(self.part(x))  # type: ignore[no-any-return]
        return self.out(checkpoint(self.part, x, use_reentrant=self.mode))  # type: ignore[no-any-return]


def _trained(stage: str, is_frozen: bool) -> list[RunRecord]:
    return [
        train(
            Case(
                partial(Regression, partial(RecomputesItself, mode, is_frozen), SGD),
                precision={"precision": "bf16-mixed"},
            ),
            stage,
        )
        for mode in (None, False, True)
    ]


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_recomputing_changes_nothing_under_rounded_weights(stage: str, is_frozen: bool) -> None:
    for plain, *recomputed in run_on_ranks(_trained, 2, stage, is_frozen):
        for record in recomputed:
            assert_same(record.state, plain.state, exact=True, label=stage)
            assert_same(record.losses, plain.losses, exact=True, label=stage)
