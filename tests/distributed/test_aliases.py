"""Tensors that share memory, and tensors without memory, are refused on every rank."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from tests.support.distributed import run_on_ranks
from tests.support.models import Regression, mlp, regression_loader
from tests.support.runs import STAGES, Case, train


class MadeIn(Regression):
    """Makes its middle layers share memory in the hook that is named."""

    def __init__(self, hook: str, shares: str) -> None:
        super().__init__(partial(mlp, 8, 8, 8, 1))
        self.hook, self.shares = hook, shares
        self._make("__init__")

    def _make(self, hook: str) -> None:
        if hook != self.hook:
            return
        first, second = (m for m in self.net.modules() if getattr(m, "out_features", 0) == 8)
        if self.shares == "parameters":
            second.weight.data = first.weight.data
        elif self.shares == "buffer":
            self.register_buffer("view", first.weight.detach())
        else:
            with torch.device("meta"):
                self.net.append(nn.Linear(1, 1))

    def configure_model(self) -> None:
        self._make("configure_model")

    def setup(self, stage: str) -> None:
        self._make("setup")


def refusals(stage: str, hook: str) -> list[str]:
    """What each kind of tensor ends with on this rank. Collective."""
    found = []
    for shares in ("parameters", "buffer", "meta"):
        try:
            train(Case(module=lambda s=shares: MadeIn(hook, s), data=regression_loader), stage)
            found.append("trained")
        except (NotImplementedError, ValueError) as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("hook", ["__init__", "configure_model", "setup"])
@pytest.mark.parametrize("stage", STAGES)
def test_every_rank_refuses_tensors_that_share_memory_or_have_none(stage: str, hook: str) -> None:
    for parameters, buffer, meta in run_on_ranks(refusals, 2, stage, hook):
        assert "share the same memory" in parameters
        assert "use one Parameter object" in parameters
        assert "'view' share the same memory" in buffer
        assert "on the meta device" in meta
