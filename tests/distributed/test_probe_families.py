"""Optimizers that are hard to try, and that the trial accepts, give DDP's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.models import Regression, regression_loader
from tests.support.runs import STAGES, Case, check_parity


class ScheduleFree(torch.optim.Optimizer):
    """Two sequences of weights: `train()` and `eval()` move between them, and count for a step.

    Its weights do not move in the first two steps, its groups have no counter before the first, and
    its state has an entry that belongs to no parameter.
    """

    def __init__(self, params: Any, lr: float = 0.05, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "trains": False})

    @torch.no_grad()
    def _move(self, weight: float, *, trains: bool) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["trains"] != trains else ():
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight)
            group["trains"] = trains

    def train(self) -> None:
        self._move(1 - 0.9, trains=True)

    def eval(self) -> None:
        self._move(1 - 1 / 0.9, trains=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.state["total"] = self.state.get("total", 0) + 1
        for group in self.param_groups:
            if not group["trains"]:
                raise RuntimeError("call train() first")
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                if group["k"] > 2:
                    z.sub_(p.grad, alpha=group["lr"])
                    p.lerp_(z, 1 / self.state["total"])
        return loss


class TwoSequences(Regression):
    """Trains on one sequence and validates on the other."""

    def configure_optimizers(self) -> Any:
        params = list(self.parameters())
        return ScheduleFree([{"params": params[:1], "lr": 0.02}, {"params": params[1:]}])

    def _sequence(self) -> Any:
        return self.optimizers(use_pl_optimizer=False)

    def on_train_epoch_start(self) -> None:
        self._sequence().train()

    def on_validation_start(self) -> None:
        self._sequence().eval()

    def on_validation_end(self) -> None:
        self._sequence().train()

    def validation_step(self, batch: Tensor, batch_index: int) -> None:
        self.log("val", self.training_step(batch, batch_index), sync_dist=True)


SCHEDULE_FREE = Case(
    module=TwoSequences, validation_data=regression_loader, trainer={"max_epochs": 3}
)


@pytest.mark.parametrize("stage", STAGES)
def test_a_schedule_free_optimizer_trains_as_under_ddp(stage: str) -> None:
    check_parity(SCHEDULE_FREE, stage)
