"""Schedulers move the lr, and accumulation steps when and by what DDP does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from tests.support.models import ADAM, SGD, Regression, mlp, regression_loader
from tests.support.runs import STAGES, Case, check_parity, parity_run


class Scheduled(Regression):
    """Regression with a scheduler made by `make`."""

    def __init__(self, make: Callable[[Any, Optimizer], Any]) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": self.make(self, optimizer)}


def one_cycle(module: Regression, optimizer: Optimizer) -> Any:
    steps = int(module.trainer.estimated_stepping_batches)
    module.note("estimated_steps", steps)
    return {"scheduler": OneCycleLR(optimizer, 0.1, total_steps=steps), "interval": "step"}


def plateau(module: Regression, optimizer: Optimizer) -> Any:
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
    return {"scheduler": scheduler, "monitor": "val_loss"}


def by_epoch(module: Regression, optimizer: Optimizer) -> Any:
    return LambdaLR(optimizer, _one_over_epoch)


def _one_over_epoch(epoch: int) -> float:
    return 1.0 / (epoch + 1)


class NoSchedulerStep(Scheduled):
    """Steps its scheduler in the hook that Lightning gives for it."""

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.note("scheduler_step", self.global_step)
        scheduler.step()


TWO_EPOCHS = {"max_epochs": 2}
THREE_EPOCHS = {"max_epochs": 3}
SCHEDULER_CASES = {
    "one_cycle": Case(partial(Scheduled, one_cycle), trainer=TWO_EPOCHS),
    "one_cycle_accumulated": Case(
        partial(Scheduled, one_cycle), trainer={**TWO_EPOCHS, "accumulate_grad_batches": 2}
    ),
    "plateau": Case(
        partial(Scheduled, plateau), validation_data=regression_loader, trainer=THREE_EPOCHS
    ),
    "by_epoch": Case(partial(Scheduled, by_epoch), trainer=THREE_EPOCHS),
    "own_step": Case(partial(NoSchedulerStep, by_epoch), trainer=THREE_EPOCHS),
}


def scheduled_accumulation() -> list[pl.Callback]:
    return [GradientAccumulationScheduler({0: 1, 1: 3, 2: 4})]


TEN_BATCHES = partial(regression_loader, 10)
ACCUMULATION_CASES = {
    f"{name}_{count}": Case(
        partial(Regression, partial(mlp, *sizes), optimizer),
        TEN_BATCHES,
        trainer={"accumulate_grad_batches": count, "max_epochs": 2},
    )
    for count in (3, 4, 20)
    for name, optimizer, sizes in [("sgd", SGD, (7, 13, 5)), ("adam", ADAM, (7, 13, 11, 5))]
}
ACCUMULATION_CASES["scheduled"] = Case(
    data=TEN_BATCHES,
    callbacks=scheduled_accumulation,
    trainer={"max_epochs": 3},
    accumulates=True,
)


class SkipsEveryOtherStep(Regression):
    """Overrides the hook around the optimizer's step, as warm-up recipes do."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (batch_idx + 1)
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class Stops(Regression):
    """Ends the run in the middle of a window."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            self.trainer.should_stop = True


HOOK_CASES = {
    "skips_steps": Case(SkipsEveryOtherStep, partial(regression_loader, 6)),
    "stops": Case(
        Stops,
        TEN_BATCHES,
        trainer={"accumulate_grad_batches": 3, "max_epochs": 2, "min_steps": 1},
    ),
    "max_steps": Case(
        Regression,
        TEN_BATCHES,
        trainer={"accumulate_grad_batches": 4, "max_steps": 5, "max_epochs": -1},
    ),
    "few_batches": Case(
        Regression,
        TEN_BATCHES,
        trainer={"accumulate_grad_batches": 4, "limit_train_batches": 6, "max_epochs": 2},
    ),
    "anomaly_detection": Case(
        Regression, TEN_BATCHES, trainer={"detect_anomaly": True, "deterministic": True}
    ),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", SCHEDULER_CASES)
def test_a_scheduler_gives_ddps_rates_and_numbers(name: str, stage: str) -> None:
    check_parity(SCHEDULER_CASES[name], stage)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ACCUMULATION_CASES)
def test_accumulation_steps_as_ddp_does(name: str, stage: str, world_size: int) -> None:
    check_parity(ACCUMULATION_CASES[name], stage, world_size)


@pytest.mark.parametrize("stage", STAGES)
def test_a_window_ends_with_the_epoch(stage: str) -> None:
    """10 batches, 4 to a window: steps come after batches 4, 8 and 10."""
    run = parity_run(ACCUMULATION_CASES["sgd_4"], 2)
    for name in run.sizes(stage):
        assert run.records(name)[0].steps[:10] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", HOOK_CASES)
def test_a_run_that_is_cut_short_or_steered_gives_ddps_numbers(name: str, stage: str) -> None:
    check_parity(HOOK_CASES[name], stage)
