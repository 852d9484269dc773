"""Checkpoints do not show whether anything was offloaded when they were saved."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.distributed.test_checkpoint_memory import LAYER, MB, MODEL, SLACK, Wide, growth
from tests.distributed.test_checkpoint_resume import run
from tests.support.compare import assert_same
from tests.support.distributed import run_on_ranks
from tests.support.models import regression_loader
from tests.support.offload import CPU, TIGHT, strategy
from tests.support.runs import make_trainer

NVME: dict[str, Any] = {"optimizer": "nvme", "staging_bytes": TIGHT}
ALL_NVME: dict[str, Any] = {**NVME, "params": "nvme"}
WINDOW: dict[str, Any] = {"is_stateful": True, "accumulate_grad_batches": 3}

# stage, how it is saved, by what and resumed by what; a batch after which it is saved, mid-window
PAIRS: dict[str, tuple[int, str, dict[str, Any], dict[str, Any], int | None]] = {
    "1_on_off": (1, "sharded", NVME, {}, None),
    "2_off_on": (2, "full", {}, CPU, None),
    "2_on_off_within": (2, "full", NVME, {}, 5),
    "3_on_off": (3, "full", ALL_NVME, {}, None),
    "3_off_on": (3, "sharded", {}, ALL_NVME, None),
    "3_on_other_within": (3, "sharded", ALL_NVME, {**CPU, "params": "cpu"}, 5),
    "1_off_on_within": (1, "sharded", {}, NVME, 5),
}


def resume(
    make: Any, first: dict[str, Any], then: dict[str, Any], folder: Path, batch: int | None
) -> None:
    """On each rank: a run in two parts is bitwise the run in one that offloads nothing."""
    disk, path = str(folder / "disk"), folder / "saved.ckpt"
    options = {} if batch is None else WINDOW
    where = {"epoch": 0} if batch is None else {"batch": batch}

    def made(offload: dict[str, Any]) -> Any:
        uses_disk = "nvme" in (offload.get("optimizer"), offload.get("params"))
        return partial(make, **offload, **({"nvme_path": disk} if uses_disk else {}))

    for name in ("rich",) if batch is not None else ("rich", "two_optimizers"):
        want = run(make, name, **options)
        saving = run(made(first), name, save={"path": path, **where}, **options)
        got = run(made(then), name, resume=path, **options)
        num_resumed = len(got["losses"])
        assert 0 < num_resumed < len(want["losses"])
        assert_same(saving, want, exact=True, label="the run that saves")
        assert_same(got["losses"], want["losses"][-num_resumed:], exact=True, label="losses")
        assert_same(got["state"], want["state"], exact=True, label="weights")
        assert_same(got["optimizers"], want["optimizers"], exact=True, label="optimizers")


@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, "32-true") for name in PAIRS), ("3_on_off", "bf16-mixed"), ("1_on_off", "16-mixed")],
)
def test_offloading_is_switched_at_a_checkpoint(name: str, precision: str, tmp_path: Path) -> None:
    stage, save_format, first, then, batch = PAIRS[name]
    make = partial(strategy, stage, save_format=save_format, precision={"precision": precision})
    run_on_ranks(resume, 2, make, first, then, tmp_path, batch)


@pytest.mark.parametrize("other_ranks", [1, 3])
def test_other_ranks_go_on(other_ranks: int, tmp_path: Path) -> None:
    disk = {"nvme_path": str(tmp_path / "disk")}
    (want,) = run_on_ranks(run, 1, partial(strategy, 1), "rich", **WINDOW)
    save = {"path": tmp_path / "saved.ckpt", "batch": 5}
    first = partial(strategy, 3, save_format="sharded", **ALL_NVME, **disk)
    run_on_ranks(run, 2, first, "rich", save=save, **WINDOW)
    then = partial(strategy, 2, **NVME, **disk)
    for got in run_on_ranks(run, other_ranks, then, "rich", resume=save["path"], **WINDOW):
        assert_same(got["state"], want["state"], exact=False, label=f"on {other_ranks}")


def save_from_files(path: Path, disk: str) -> int:
    found: list[int] = []

    class Saves(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
            with growth(found):
                trainer.save_checkpoint(path)

    make = partial(
        strategy, 3, save_format="sharded", optimizer="nvme", params="nvme", nvme_path=disk
    )
    trainer = make_trainer(make, callbacks=[Saves()])
    trainer.fit(Wide(), regression_loader(2, 3, (1024,)))
    saved = torch.load(path / "meta.pt", weights_only=True)
    assert saved["global_step"] == 2
    return found[0]


def test_saving_what_rests_in_files_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    for saving in run_on_ranks(save_from_files, 2, path, str(tmp_path / "disk")):
        assert saving <= SLACK + 3 * LAYER < MODEL, saving / MB
    assert sum(file.stat().st_size for file in path.rglob("*")) > 3 * MODEL
