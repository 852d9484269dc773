"""A saved run goes on at any stage and on any number of ranks as if nothing had happened."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_zero import ZeroPrecision, ZeroStrategy
from tests.support.checkpoints import (
    GLOBAL_BATCH,
    MODULES,
    DealtRows,
    StatefulLoader,
    dataset,
)
from tests.support.compare import assert_same
from tests.support.distributed import run_on_ranks
from tests.support.models import rank, world_size
from tests.support.runs import make_trainer

EPOCHS = 3


class Saves(pl.Callback):
    """Saves once, after an epoch or after a batch."""

    def __init__(self, path: Path, epoch: int | None = None, batch: int | None = None) -> None:
        self.path, self.epoch, self.batch = path, epoch, batch

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.batch:
            trainer.save_checkpoint(self.path)


def run(
    strategy: Any,
    module_name: str,
    *,
    save: dict[str, Any] | None = None,
    resume: Path | None = None,
    is_stateful: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train for some epochs. Returns what there is to compare."""
    module = MODULES[module_name]()
    callbacks = [Saves(**save)] if save else []
    defaults = {"max_epochs": EPOCHS, "use_distributed_sampler": False}
    if strategy == "auto":
        options["devices"] = 1
    trainer = make_trainer(strategy, callbacks=callbacks, **{**defaults, **options})
    torch.manual_seed(50 + rank())
    sampler = DealtRows(len(dataset()), rank(), world_size())
    make = StatefulLoader if is_stateful else DataLoader
    data = make(dataset(), batch_size=GLOBAL_BATCH // world_size(), sampler=sampler)
    trainer.fit(module, data, ckpt_path=resume)
    state = {k: v.detach().clone() for k, v in module.state_dict().items()}
    optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
    return {"losses": module.notes["loss"], "state": state, "optimizers": optimizers}


def zero(stage: int, save_format: str = "sharded", **precision: Any) -> Any:
    plugin = ZeroPrecision(**precision)
    return partial(
        ZeroStrategy, stage, bucket_bytes=1, save_format=save_format, precision_plugin=plugin
    )


PAIRS = [  # saved by, resumed by: (stage, ranks)
    ((1, 2), (3, 3)),
    ((1, 3), (2, 1)),
    ((1, 4), (1, 2)),
    ((2, 2), (1, 3)),
    ((2, 1), (3, 2)),
    ((2, 4), (2, 3)),
    ((3, 2), (3, 4)),
    ((3, 3), (3, 2)),
    ((3, 4), (1, 1)),
    ((3, 2), (2, 2)),
    ((3, 1), (3, 3)),
]


@pytest.mark.parametrize("save_format", ["sharded", "full"])
@pytest.mark.parametrize("name", ["rich", "two_optimizers"])
def test_any_run_resumes_any_other(name: str, save_format: str, tmp_path: Path) -> None:
    (want,) = run_on_ranks(run, 1, zero(1), name, max_epochs=2)
    pairs = PAIRS if (name, save_format) == ("rich", "sharded") else PAIRS[1::3]
    for number, ((stage, ranks), (other_stage, other_ranks)) in enumerate(pairs):
        path = tmp_path / f"{number}.ckpt"
        save = {"path": path, "epoch": 0}
        run_on_ranks(run, ranks, zero(stage, save_format), name, save=save, max_epochs=1)
        assert path.is_dir() == (save_format == "sharded")
        label = f"stage {stage} on {ranks} -> stage {other_stage} on {other_ranks}"
        for got in run_on_ranks(
            run, other_ranks, zero(other_stage), name, resume=path, max_epochs=2
        ):
            assert len(got["losses"]) < len(want["losses"])
            assert_same(got["state"], want["state"], exact=False, label=label)


PRECISIONS: dict[str, dict[str, Any]] = {
    "32-true": {"precision": "32-true"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "16-mixed": {"precision": "16-mixed", "loss_scale_window": 3, "hysteresis": 2},
    "bf16-true": {"precision": "bf16-true"},
    "64-true": {"precision": "64-true"},
}


def compare_resumed(
    make: Any, name: str, folder: Path, save: dict[str, Any], **options: Any
) -> None:
    """On each rank: a run in two parts is bitwise the run in one."""
    path = folder / "saved.ckpt"
    want = run(make, name, save={"path": path, **save}, **options)
    got = run(make, name, resume=path, **options)
    num_resumed = len(got["losses"])
    assert 0 < num_resumed < len(want["losses"])
    assert_same(got["losses"], want["losses"][-num_resumed:], exact=True, label="losses")
    assert_same(got["state"], want["state"], exact=True, label="weights")
    assert_same(got["optimizers"], want["optimizers"], exact=True, label="optimizers")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_same_ranks_go_on_bitwise(precision: str, tmp_path: Path) -> None:
    for number, (stage, save_format) in enumerate(((1, "sharded"), (2, "full"), (3, "sharded"))):
        make = zero(stage, save_format, **PRECISIONS[precision])
        for name in ("rich", "dropping"):
            if precision != "32-true" and name == "dropping":
                continue
            folder = tmp_path / f"{number}{name}"
            run_on_ranks(compare_resumed, 2, make, name, folder, {"epoch": 0})


@pytest.mark.parametrize("save_format", ["sharded", "full"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_goes_on_within_an_accumulation_window(
    world_size: int, save_format: str, tmp_path: Path
) -> None:
    """After the second of three micro-batches, in the middle of an epoch."""
    for stage in (1, 2, 3):
        if stage == 1 and save_format == "full" and world_size > 1:
            continue  # one file has sums over the ranks: equal, but not bitwise
        run_on_ranks(
            compare_resumed,
            world_size,
            zero(stage, save_format),
            "dropping",
            tmp_path / str(stage),
            {"batch": 5},
            is_stateful=True,
            accumulate_grad_batches=3,
        )


def test_a_window_goes_on_elsewhere(tmp_path: Path) -> None:
    options = {"is_stateful": True, "accumulate_grad_batches": 3}
    (want,) = run_on_ranks(run, 1, zero(1), "rich", **options)
    for number, (stage, ranks, save_format, other, other_ranks) in enumerate(
        (
            (1, 2, "sharded", 3, 3),
            (1, 2, "full", 2, 2),
            (3, 3, "sharded", 1, 1),
            (1, 1, "full", 1, 2),
        )
    ):
        save = {"path": tmp_path / f"{number}.ckpt", "batch": 5}
        run_on_ranks(run, ranks, zero(stage, save_format), "rich", save=save, **options)
        for got in run_on_ranks(
            run, other_ranks, zero(other), "rich", resume=save["path"], **options
        ):
            label = f"stage {stage} on {ranks} -> stage {other} on {other_ranks}"
            assert_same(got["state"], want["state"], exact=False, label=label)


def test_masters_go_on_in_another_precision(tmp_path: Path) -> None:
    path = tmp_path / "mixed.ckpt"
    save = {"path": path, "epoch": 0}
    run_on_ranks(run, 2, zero(3, precision="bf16-mixed"), "rich", save=save)
    saved = torch.load(path / "meta.pt", weights_only=True)
    assert saved["global_step"] == 4
    for precision in ("32-true", "16-mixed", "bf16-true"):
        for got in run_on_ranks(run, 3, zero(2, precision=precision), "rich", resume=path):
            dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
            assert got["state"]["first.weight"].dtype == dtype
