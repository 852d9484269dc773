"""What hooks see of a checkpoint that is about to be saved can be used by rank 0 alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

import lightning_zero
from tests.support.distributed import run_on_ranks
from tests.support.models import Regression, regression_loader
from tests.support.runs import make_trainer

Hook = Callable[[pl.Trainer, dict[str, Any]], None]


def _net() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 5))
    net[3].weight = net[2].weight
    return net


def writes_on_rank_0(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
    """As libraries write a model: contiguous tensors, on the first rank only."""
    if trainer.is_global_zero:
        found = {key: value.contiguous() for key, value in checkpoint["state_dict"].items()}
        torch.save({k: v.detach().clone() for k, v in found.items()}, _beside(trainer))
    trainer.strategy.barrier()


def writes_some_on_rank_0(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
    if trainer.is_global_zero:
        value = checkpoint["state_dict"]["net.2.weight"]
        torch.save({"net.2.weight": value.cpu().detach()}, _beside(trainer))


def looks_everywhere(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
    found = {k: v.detach().cpu().clone() for k, v in checkpoint["state_dict"].items()}
    if trainer.is_global_zero:
        torch.save(found, _beside(trainer))


def edits_everywhere(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
    looks_everywhere(trainer, checkpoint)
    state = checkpoint["state_dict"]
    state["net.0.bias"] = state["net.0.bias"] * 2
    del state["net.0.weight"]


def edits_on_rank_0(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
    if trainer.is_global_zero:
        edits_everywhere(trainer, checkpoint)


def looks_on_rank_1(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
    if trainer.global_rank == 1:
        checkpoint["state_dict"]["net.0.bias"].cpu()


def asks_for_an_address(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"]["net.0.bias"].data_ptr()


def _beside(trainer: pl.Trainer) -> Path:
    return Path(trainer.default_root_dir) / "beside.pt"


class Hooked(pl.Callback):
    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.hook(trainer, checkpoint)


class HookedModule(Regression):
    def __init__(self, hook: Hook) -> None:
        super().__init__(_net)
        self.hook = hook

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.hook(self.trainer, checkpoint)


def _save(stage: int, save_format: str, hook: Hook, in_module: bool, path: Path) -> Any:
    module: Regression = HookedModule(hook) if in_module else Regression(_net)
    trainer = make_trainer(
        partial(lightning_zero.ZeroStrategy, stage, save_format=save_format),
        callbacks=[*([] if in_module else [Hooked(hook)]), Saves(path)],
        default_root_dir=path.parent,
    )
    try:
        trainer.fit(module, regression_loader())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return {key: value.detach().clone() for key, value in module.state_dict().items()}


class Saves(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


def _saved(path: Path) -> dict[str, Any]:
    if path.is_dir():
        lightning_zero.consolidate(path, path.with_suffix(".one.ckpt"))
        path = path.with_suffix(".one.ckpt")
    found: dict[str, Any] = torch.load(path, weights_only=True)["state_dict"]
    return found


@pytest.mark.parametrize("save_format", ["full", "sharded"])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("hook", [writes_on_rank_0, writes_some_on_rank_0, looks_everywhere])
def test_rank_0_may_look_alone(hook: Hook, stage: int, save_format: str, tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    weights = run_on_ranks(_save, 2, stage, save_format, hook, stage == 1, path)[0]
    for found in (torch.load(tmp_path / "beside.pt", weights_only=True), _saved(path)):
        for key, value in found.items():
            assert torch.equal(value, weights[key])
    assert _saved(path).keys() == weights.keys()


@pytest.mark.parametrize(
    ("hook", "save_format"),
    [(edits_everywhere, "full"), (edits_everywhere, "sharded"), (edits_on_rank_0, "full")],
)
def test_edits_count(hook: Hook, save_format: str, tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    weights = run_on_ranks(_save, 2, 3, save_format, hook, True, path)[0]
    found = _saved(path)
    assert weights.keys() - found.keys() == {"net.0.weight"}
    assert torch.equal(found["net.0.bias"], weights["net.0.bias"] * 2)


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (looks_on_rank_1, r"Rank 1 looks at parameter 'net\.0\.bias'"),
        (asks_for_an_address, r"'net\.0\.bias' is sharded, and has no address"),
    ],
)
def test_what_can_not_be_seen_is_said(hook: Hook, words: str, tmp_path: Path) -> None:
    texts = run_on_ranks(_save, 2, 3, "full", hook, True, tmp_path / "run.ckpt")
    assert all(re.search(words, text) for text in texts), texts
