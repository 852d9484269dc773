"""Strategies that offload, and the comparison with the same stage that does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_zero import ZeroPrecision, ZeroStrategy
from lightning_zero.config import OffloadConfig
from tests.support.compare import assert_same
from tests.support.runs import DDP_UNUSED, Case, ParityRun, StrategyLike, run_under_each

COARSE = 1 << 20
TIGHT = 4096  # staging memory for a block of the disk, less than any test's parameters take
CPU: dict[str, Any] = {"optimizer": "cpu", "force": True}


def strategy(
    stage: Any,
    bucket_bytes: int = 1,
    precision: Mapping[str, Any] | None = None,
    save_format: Any = "full",
    **offload: Any,
) -> ZeroStrategy:
    """A stage that offloads, or not if nothing is said of it."""
    made = ZeroStrategy(
        stage,
        bucket_bytes=bucket_bytes,
        save_format=save_format,
        stall_timeout=timedelta(seconds=5),
        precision_plugin=None if precision is None else ZeroPrecision(**precision),
    )
    if offload:
        made.configure_offload(OffloadConfig(**offload))
    return made


def variants(disk: Path) -> dict[str, Callable[[], ZeroStrategy]]:
    """Every kind of offloading. A name begins with that of what it has to agree with."""
    nvme = {"nvme_path": str(disk)}
    small = {**nvme, "staging_bytes": TIGHT}
    return {
        "1 cpu": partial(strategy, 1, **CPU),
        "1 nvme": partial(strategy, 1, optimizer="nvme", **nvme),
        "2c cpu": partial(strategy, 2, COARSE, **CPU),
        "2 nvme": partial(strategy, 2, optimizer="nvme", **small),
        "3 cpu": partial(strategy, 3, **CPU),
        "3c nvme": partial(strategy, 3, COARSE, optimizer="nvme", **nvme),
        "3 nvme nvme": partial(strategy, 3, optimizer="nvme", params="nvme", **small),
        "3 cpu nvme": partial(strategy, 3, params="nvme", **CPU, **nvme),
        "3 nvme cpu": partial(strategy, 3, optimizer="nvme", params="cpu", force=True, **nvme),
        "3 - nvme": partial(strategy, 3, params="nvme", **nvme),
        "3 - cpu": partial(strategy, 3, params="cpu", force=True),
    }


PLAIN: dict[str, Callable[[], ZeroStrategy]] = {
    "1": partial(strategy, 1),
    "2": partial(strategy, 2),
    "2c": partial(strategy, 2, COARSE),
    "3": partial(strategy, 3),
    "3c": partial(strategy, 3, COARSE),
}


class ReallyOffloads(pl.Callback):
    """What is compared has to be another thing than the reference."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        made: Any = trainer.strategy
        if isinstance(made, ZeroStrategy) and made.config.offload is not None:
            assert made.engine is not None
            assert made.engine.offload is not None
            counts = made.offload_counts()
            assert counts is not None
            assert counts.busy_seconds > 0


def _callbacks(case: Case) -> list[pl.Callback]:
    return [*(case.callbacks() if case.callbacks else []), ReallyOffloads()]


def check_offloaded(
    case: Case, world_size: int, disk: Path, chosen: tuple[str, ...] | None = None
) -> None:
    """Assert that offloading changes no bit of a case's losses, notes, schedules and weights.

    One rank has no engine without offloading: it is compared with plain training, where the norm
    for clipping is added up in another order.
    """
    offloaded = {k: v for k, v in variants(disk).items() if chosen is None or k in chosen}
    plain = {k: v for k, v in PLAIN.items() if k in {name.split()[0] for name in offloaded}}
    strategies: dict[str, StrategyLike] = {**plain, **offloaded}
    if world_size == 1:
        strategies = {DDP_UNUSED: DDP_UNUSED, **offloaded}
    watched = replace(case, callbacks=partial(_callbacks, case))
    run = ParityRun(case, run_under_each(watched, strategies, world_size, timeout=60.0))
    is_exact = world_size > 1 or "gradient_clip_val" not in case.trainer
    for name in offloaded:
        reference = run.records(DDP_UNUSED if world_size == 1 else name.split()[0])
        for rank, (got, want) in enumerate(zip(run.records(name), reference, strict=True)):
            label = f"{name}, rank {rank} of {world_size}"
            assert_same(vars(got), vars(want), exact=is_exact, label=label)
            assert len(got.losses) > 1, label
