"""Pairs of options that have to do with each other: each works as under DDP, or is refused.

A line of the table is a pair. "works" means that the run, its checkpoint and a second run that goes
on from it give DDP's numbers (DDP gets the Trainer's half of the pair); anything else is what the
error says, on every rank and before a step.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import Strategy

from lightning_zero import ZeroStrategy
from tests.support.compare import assert_same
from tests.support.distributed import run_on_ranks
from tests.support.models import Regression, mlp, regression_loader
from tests.support.runs import full_state, make_trainer


class Home(TorchCheckpointIO):
    """A user's own way to write files."""


def averages() -> WeightAveraging:
    return WeightAveraging(use_buffers=True)


SHARDED, FULL = {"save_format": "sharded"}, {"save_format": "full"}
HOST = {"offload_optimizer": "cpu"}


class Pair(NamedTuple):
    strategy: dict[str, Any]
    trainer: dict[str, Any]
    outcome: str = "works"
    callbacks: tuple[Callable[[], Any], ...] = ()


# What writes, and with what.
BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
NEVER = "would never be called"
TABLE: dict[str, Pair] = {
    "full, own io": Pair(FULL, {"plugins": [Home]}),
    "full, async io": Pair(FULL, {"plugins": [AsyncCheckpointIO]}),
    "full, averages": Pair(FULL, {}, callbacks=(averages,)),
    "full, accumulation": Pair(FULL, {"accumulate_grad_batches": 2}),
    "full, double": Pair(FULL, {"precision": "64-true"}),
    "full, on the host": Pair({**FULL, **HOST}, {}),
    "full, clipped": Pair(FULL, BY_VALUE),
    "sharded, own io": Pair(SHARDED, {"plugins": [Home]}, f"Home {NEVER}"),
    "sharded, async io": Pair(
        SHARDED, {"plugins": [AsyncCheckpointIO]}, f"AsyncCheckpointIO {NEVER}"
    ),
    "sharded, a URL": Pair(
        SHARDED, {"default_root_dir": "memory://x"}, "needs a local or mounted folder"
    ),
    "sharded, averages": Pair(SHARDED, {}, callbacks=(averages,)),
    "sharded, accumulation": Pair(SHARDED, {"accumulate_grad_batches": 2}),
    "sharded, double": Pair(SHARDED, {"precision": "64-true"}),
    "sharded, on the host": Pair({**SHARDED, **HOST}, {}),
    "batch norm, on a CPU": Pair(
        FULL, {"sync_batchnorm": True}, "`sync_batchnorm=True` needs GPUs"
    ),
}


def run(strategy: Callable[[], Strategy] | str, pair: Pair, folder: Path) -> Any:
    options = {"default_root_dir": folder, **pair.trainer}
    options["plugins"] = [make() for make in pair.trainer.get("plugins", [])]
    states = []
    path: Any = None
    for max_epochs in (1, 2):
        saver = ModelCheckpoint(folder / str(max_epochs), filename="run", every_n_epochs=1)
        callbacks = [saver, *(make() for make in pair.callbacks)]
        options |= {"callbacks": callbacks, "max_epochs": max_epochs, "enable_checkpointing": True}
        trainer = make_trainer(strategy, **options)
        module = Regression(mlp)
        try:
            trainer.fit(module, regression_loader(), ckpt_path=path)
        except Exception as error:
            return f"{type(error).__name__}: {error}", trainer.global_step
        states.append(full_state(module))
        path = saver.best_model_path or None
        assert path is not None
    return states


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", TABLE)
def test_a_pair_works_as_under_ddp_or_is_refused(name: str, stage: int, tmp_path: Path) -> None:
    pair = TABLE[name]
    made = partial(ZeroStrategy, stage, **pair.strategy)
    ours = run_on_ranks(run, 2, made, pair, tmp_path / "zero")
    if pair.outcome != "works":
        for text, step in ours:
            assert re.search(pair.outcome, text), text
            assert step == 0
        return
    theirs = run_on_ranks(run, 2, "ddp", pair, tmp_path / "ddp")
    adds_as_ddp = stage == 1 or "accumulate_grad_batches" not in pair.trainer
    for states, expected in zip(ours, theirs, strict=True):
        assert isinstance(states, list), states
        for number, (state, other) in enumerate(zip(states, expected, strict=True)):
            # DDP loads doubles into a module of floats, which it widens afterwards
            rounds = number == 1 and pair.trainer.get("precision") == "64-true"
            assert_same(state, other, exact=adds_as_ddp and not rounds, label=name)


def test_storage_options_reach_the_plugin_as_under_ddp(tmp_path: Path) -> None:
    for strategy in ("ddp", partial(ZeroStrategy, 3)):
        seen = run_on_ranks(pass_options, 2, strategy, tmp_path / "x.ckpt")
        assert seen == [[({"key": "value"}, "PosixPath")], []]


class Notes(TorchCheckpointIO):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.seen.append((storage_options, type(path).__name__))


def pass_options(strategy: Any, path: Path) -> list[Any]:
    plugin = Notes()
    trainer = make_trainer(strategy, plugins=[plugin])
    trainer.fit(Regression(mlp), regression_loader())
    trainer.save_checkpoint(path, storage_options={"key": "value"})
    return plugin.seen
