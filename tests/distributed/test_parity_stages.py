"""Fit, validate, test and predict, in any order and as often as one likes."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.models import ADAM, SGD, Regression, mlp, regression_loader
from tests.support.runs import STAGES, Case, check_parity, parity_run

EIGHT_BATCHES = partial(regression_loader, 8)
TWO_BATCHES = partial(regression_loader, 2, seed=8)


def two_loaders() -> list[DataLoader[Any]]:
    return [regression_loader(2, seed=8), regression_loader(3, seed=9)]


class ValidatesTwice(Regression):
    """Two validation loaders, a head used in validation only, a part that stays in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.validation_head = nn.Linear(5, 3).requires_grad_(False)
        self.always_eval = nn.Sequential(nn.Linear(7, 7), nn.Dropout(0.5))
        self.always_eval.eval()

    def on_train_epoch_start(self) -> None:
        self.always_eval.eval()

    def on_validation_model_train(self) -> None:
        super().on_validation_model_train()
        self.always_eval.eval()

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.net(self.always_eval(batch[0])), batch[1])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)
        head = self.validation_head(self.net(batch[0])).mean()
        self.log("head", head, sync_dist=True, reduce_fx="max")
        self.note("local", head)


class LogsInTraining(Regression):
    """Logs per step and per epoch, with and without reduction over the ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("reduced", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("local", loss, on_step=True)
        self.log("total", batch[0].sum(), on_epoch=True, sync_dist=True, reduce_fx="sum")
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        for name, value in self.trainer.logged_metrics.items():
            self.note(name, value)
        self.note("gathered", self.all_gather(self.trainer.callback_metrics["local"]))

    def on_train_start(self) -> None:
        loader = self.trainer.train_dataloader
        self.note("sampler", type(loader.sampler).__name__)
        self.note("batches", len(loader))


VALIDATION_CASES = {
    "inside_a_window": Case(
        ValidatesTwice,
        EIGHT_BATCHES,
        two_loaders,
        trainer={"val_check_interval": 2, "accumulate_grad_batches": 4},
    ),
    "every_other_batch": Case(
        ValidatesTwice, EIGHT_BATCHES, two_loaders, trainer={"val_check_interval": 2}
    ),
    "sanity_first": Case(
        ValidatesTwice,
        EIGHT_BATCHES,
        two_loaders,
        trainer={"num_sanity_val_steps": 2, "max_epochs": 2},
    ),
    "inference_mode_off": Case(
        Regression, EIGHT_BATCHES, TWO_BATCHES, trainer={"inference_mode": False}
    ),
    "logs_in_training": Case(LogsInTraining, EIGHT_BATCHES, trainer={"max_epochs": 2}),
}


def fit_then_all_else(trainer: pl.Trainer, module: pl.LightningModule, case: Case) -> Any:
    trainer.fit(module, case.data(), TWO_BATCHES())
    return _evaluate(trainer, module)


def all_else_then_fit(trainer: pl.Trainer, module: pl.LightningModule, case: Case) -> Any:
    results = _evaluate(trainer, module)
    trainer.fit(module, case.data(), TWO_BATCHES())
    return results


def in_turns(trainer: pl.Trainer, module: pl.LightningModule, case: Case) -> Any:
    results = [trainer.predict(module, TWO_BATCHES())]
    trainer.fit(module, case.data())
    results += [_evaluate(trainer, module)]
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, case.data(), TWO_BATCHES())
    return [*results, trainer.predict(module, TWO_BATCHES())]


def only_evaluates(trainer: pl.Trainer, module: pl.LightningModule, case: Case) -> Any:
    return _evaluate(trainer, module)


def fits_twice(trainer: pl.Trainer, module: pl.LightningModule, case: Case) -> Any:
    trainer.fit(module, case.data())
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, case.data())


def plain_forward_after_fit(trainer: pl.Trainer, module: pl.LightningModule, case: Case) -> Any:
    """What is left is an ordinary module: it computes and trains without a Trainer."""
    trainer.fit(module, case.data())
    x, y = next(iter(case.data()))
    module.zero_grad()
    kinds = sorted({type(p).__name__ for p in module.parameters()})
    loss = F.mse_loss(module.net(x), y)
    loss.backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    hooks = sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
        for m in module.modules()
    )
    return [kinds, hooks, loss.detach(), {n: p.grad for n, p in module.named_parameters()}]


def uneven_predictions(trainer: pl.Trainer, module: pl.LightningModule, case: Case) -> Any:
    """5 rows for 2 ranks, row by row: one rank has a batch more than the other."""
    trainer.fit(module, case.data())
    rows = torch.randn(5, 7, generator=torch.Generator().manual_seed(3))
    loader = DataLoader(TensorDataset(rows), batch_size=1)
    return trainer.predict(module, loader)


def uneven_predictions_only(trainer: pl.Trainer, module: pl.LightningModule, case: Case) -> Any:
    rows = torch.randn(5, 7, generator=torch.Generator().manual_seed(3))
    return trainer.predict(module, DataLoader(TensorDataset(rows), batch_size=1))


def _evaluate(trainer: pl.Trainer, module: pl.LightningModule) -> list[Any]:
    return [
        trainer.validate(module, TWO_BATCHES(), verbose=False),
        trainer.test(module, TWO_BATCHES(), verbose=False),
        trainer.predict(module, TWO_BATCHES()),
    ]


BLOCKS = partial(Regression, partial(mlp, 7, 13, 13, 13, 5))
ORDER_CASES = {
    drive.__name__: Case(BLOCKS, drive=drive)
    for drive in (
        fit_then_all_else,
        all_else_then_fit,
        in_turns,
        only_evaluates,
        fits_twice,
        plain_forward_after_fit,
        uneven_predictions,
        uneven_predictions_only,
    )
}
ONE_RANK_CASES = {
    "adam": Case(partial(Regression, optimizer=ADAM), validation_data=TWO_BATCHES),
    "sgd_accumulated": Case(
        partial(Regression, optimizer=SGD), EIGHT_BATCHES, trainer={"accumulate_grad_batches": 3}
    ),
    "in_turns": Case(BLOCKS, drive=in_turns),
}


class ConfiguresLate(Regression):
    """Builds a part of the module in `configure_model`."""

    def __init__(self) -> None:
        super().__init__(partial(mlp, 7, 13, 7))
        self.late: nn.Module | None = None

    def configure_model(self) -> None:
        if self.late is None:
            self.late = mlp(7, 13, 5)

    def loss(self, batch: Any) -> Tensor:
        assert self.late is not None
        return F.mse_loss(self.late(self.net(batch[0])), batch[1])

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.late is not None
        return self.late(self.net(batch[0]))


CONFIGURE_CASES = {
    "fit": Case(ConfiguresLate),
    "in_turns": Case(ConfiguresLate, drive=in_turns),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", VALIDATION_CASES)
def test_validation_amid_training_gives_ddps_numbers(name: str, stage: str) -> None:
    check_parity(VALIDATION_CASES[name], stage)


@pytest.mark.parametrize("stage", STAGES)
def test_each_rank_gets_its_own_rows(stage: str) -> None:
    run = parity_run(VALIDATION_CASES["logs_in_training"], 2)
    for records in map(run.records, run.sizes(stage)):
        assert [record.notes["sampler"] for record in records] == [["DistributedSampler"]] * 2
        assert not torch.equal(records[0].losses[0], records[1].losses[0])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ORDER_CASES)
def test_any_order_of_stages_gives_ddps_results(name: str, stage: str) -> None:
    check_parity(ORDER_CASES[name], stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["in_turns", "uneven_predictions", "plain_forward_after_fit"])
def test_any_order_of_stages_on_three_ranks(name: str, stage: str) -> None:
    check_parity(ORDER_CASES[name], stage, world_size=3)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ONE_RANK_CASES)
def test_a_single_rank_gives_ddps_numbers(name: str, stage: str) -> None:
    check_parity(ONE_RANK_CASES[name], stage, world_size=1)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CONFIGURE_CASES)
def test_a_module_built_in_configure_model_gives_ddps_numbers(name: str, stage: str) -> None:
    check_parity(CONFIGURE_CASES[name], stage)
