"""Disks that fail end the run on every rank, with the file and the reason, and spoil nothing."""

from __future__ import annotations

import errno
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from lightning_zero import OffloadError, PeerFailedError, RankMismatchError, ZeroError
from tests.support.distributed import run_on_ranks
from tests.support.models import Regression, mlp, rank, regression_loader
from tests.support.offload import TIGHT, strategy
from tests.support.runs import make_trainer

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
SECONDS_TO_END = 15.0


class BadDisk:
    """From the `num_good`-th call on every read or write fails with `code`."""

    def __init__(self, call: str, code: int, num_good: int) -> None:
        self.code, self.num_good, self.num_calls = code, num_good, 0
        self.call, self.plain = call, getattr(os, call)
        setattr(os, call, self)

    def __call__(self, *args: Any) -> Any:
        self.num_calls += 1
        if self.num_calls > self.num_good:
            raise OSError(self.code, os.strerror(self.code))
        return self.plain(*args)

    def repair(self) -> None:
        setattr(os, self.call, self.plain)


class SavesWeights(pl.Callback):
    """Tries to save the weights alone when the run has failed, twice."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.errors: list[str] = []

    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        for name in ("first.ckpt", "second.ckpt"):
            try:
                trainer.save_checkpoint(self.path / name, weights_only=True)
            except ZeroError as error:
                self.errors.append(type(error).__name__)


def fail(
    folder: Path, options: dict[str, Any], fault: tuple[str, int, int], callbacks: list[Any]
) -> dict[str, Any]:
    """Train until the last rank's disk fails. Returns how it ended here."""
    disk = folder / "disk"
    make = partial(strategy, nvme_path=str(disk), **options)
    trainer = make_trainer(
        make, callbacks=callbacks, max_epochs=3, enable_checkpointing=bool(callbacks)
    )
    is_bad = rank() == trainer.world_size - 1
    module = Regression(partial(mlp, 7, 13, 11, 5), ADAMW)
    bad = BadDisk(*fault) if is_bad else None
    start = time.monotonic()
    try:
        trainer.fit(module, regression_loader())
    except Exception as error:
        kind, message = type(error), str(error)
    else:
        kind, message = None, ""
    finally:
        if bad is not None:
            bad.repair()
        # not called by Lightning if a callback fails to handle the failure
        trainer.strategy.teardown()
    seconds = time.monotonic() - start
    mine = [path.name for path in disk.iterdir() if f"rank{rank()}" in path.name]
    return {"kind": kind, "message": message, "seconds": seconds, "is_bad": is_bad, "left": mine}


CASES: dict[str, tuple[dict[str, Any], tuple[str, int, int]]] = {
    "write_1": ({"stage": 1, "optimizer": "nvme"}, ("pwritev", errno.ENOSPC, 20)),
    "read_2": ({"stage": 2, "optimizer": "nvme", "staging_bytes": TIGHT}, ("preadv", errno.EIO, 9)),
    "write_3": (
        {"stage": 3, "optimizer": "nvme", "params": "nvme", "staging_bytes": TIGHT},
        ("pwritev", errno.EIO, 40),
    ),
    "read_3": ({"stage": 3, "params": "nvme", "staging_bytes": TIGHT}, ("preadv", errno.EIO, 30)),
}


@pytest.mark.parametrize("saves", [False, True], ids=["", "saves"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_a_bad_disk_ends_every_rank(
    name: str, world_size: int, saves: bool, tmp_path: Path
) -> None:
    options, fault = CASES[name]
    callbacks = [OnExceptionCheckpoint(tmp_path, "half")] if saves else []
    outcomes = run_on_ranks(
        fail, world_size, tmp_path, options, fault, callbacks, expect_failure=True, timeout=60
    )
    assert not (tmp_path / "half.ckpt").exists()
    for outcome in outcomes:
        end = outcome.value
        assert end is not None, outcome.traceback
        assert end["seconds"] < SECONDS_TO_END
        assert end["left"] == []
        if end["is_bad"]:
            assert end["kind"] is OffloadError, end
            assert errno.errorcode[fault[1]] in end["message"]
            assert "states.bin" in end["message"]
        else:
            assert end["kind"] in (PeerFailedError, RankMismatchError), end
            if end["kind"] is PeerFailedError:
                assert "states.bin" in end["message"]


@pytest.mark.parametrize("name", CASES)
def test_nothing_half_done_is_saved(name: str, tmp_path: Path) -> None:
    options, fault = CASES[name]
    saves = [OnExceptionCheckpoint(tmp_path, "half")]
    (end,) = run_on_ranks(fail, 1, tmp_path, options, fault, saves, timeout=60)
    assert end["kind"] is OffloadError
    assert not (tmp_path / "half.ckpt").exists()
    saves = [SavesWeights(tmp_path)]
    (end,) = run_on_ranks(fail, 1, tmp_path, options, fault, saves, timeout=60)
    assert end["kind"] is OffloadError
    assert list(tmp_path.glob("*.ckpt")) == []
