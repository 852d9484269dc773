"""Memory falls as the paper says, the forecast is right, and everything is given back."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_zero import ZeroPrecision, ZeroStrategy
from tests.support import models
from tests.support.distributed import distributed, run_on_ranks
from tests.support.measure import Blocks, live_bytes, train
from tests.support.runs import make_trainer

LAYER = 64 * 65 * 4  # bytes of one block: the unit, the bucket and half of the gather window


def measure(stage: int, **precision: Any) -> dict[str, Any]:
    before = live_bytes()
    module = Blocks()
    report: list[Any] = []
    plugin = ZeroPrecision(**precision)
    strategy = partial(ZeroStrategy, stage=stage, bucket_bytes=1000, precision_plugin=plugin)
    train(strategy, module, lambda trainer: report.extend(trainer.strategy.memory_report()))
    return {
        "weights": module.num_bytes,
        "at_rest": module.at_rest[-1] - before,
        "in_forward": max(module.in_forward),
        "report": report,
    }


@functools.cache
def measured_by_rank(
    world_size: int, stage: int, precision: str = "32-true"
) -> list[dict[str, Any]]:
    """What each rank measured; a run is looked at by several tests."""
    return run_on_ranks(measure, world_size, stage, precision=precision)


@pytest.mark.parametrize("world_size", [2, 3])
def test_resting_bytes_are_those_of_the_paper(world_size: int) -> None:
    for stage, expected in {
        1: lambda psi, n: psi + psi / n + 2 * psi / n,  # unreduced gradients are gone at rest
        2: lambda psi, n: psi + psi / n + 2 * psi / n,
        3: lambda psi, n: psi / n + psi / n + 2 * psi / n,
    }.items():
        for result in measured_by_rank(world_size, stage):
            bound = expected(result["weights"], world_size)
            assert abs(result["at_rest"] - bound) <= LAYER + 0.02 * bound, (stage, result)


@pytest.mark.parametrize("world_size", [2, 3])
def test_resting_bytes_of_mixed_precision(world_size: int) -> None:
    """Model weights in half, gradients added up in fp32: masters, gradients and Adam are 16 bytes
    per parameter, of which each rank has its part; stage 3 holds nothing else.
    """
    for stage, replicated in {1: 2, 2: 2, 3: 0}.items():
        for result in measured_by_rank(world_size, stage, "bf16-mixed"):
            num_params = result["weights"] // 4
            bound = replicated * num_params + 16 * num_params / world_size
            assert abs(result["at_rest"] - bound) <= LAYER + 0.02 * bound, (stage, result)


def test_stage_3_gathers_half_the_bytes_of_its_window_in_mixed_precision() -> None:
    for result in measured_by_rank(2, 3, "bf16-mixed"):
        assert 0 < result["in_forward"] <= LAYER + 4096


def test_stage_3_gathers_no_more_than_its_window() -> None:
    for result in measured_by_rank(2, 3):
        assert 0 < result["in_forward"] <= 2 * LAYER + 4096


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_forecast_agrees_with_what_is_measured(stage: int, precision: str) -> None:
    for result in measured_by_rank(2, stage, precision):
        rows = {row.kind: row for row in result["report"]}
        has_masters = precision == "bf16-mixed"
        assert (rows["master weights"].measured_bytes > 0) == has_masters
        absent = set() if has_masters else {"master weights"}
        absent |= {"model weights"} if has_masters and stage == 3 else set()
        kinds = {"model weights", "gradients", "optimizer state", "master weights"}
        for kind in kinds - absent:
            forecast, measured = rows[kind].forecast_bytes, rows[kind].measured_bytes
            assert measured > 0
            assert abs(forecast - measured) <= 0.05 * measured, rows[kind]
        for kind in ("gather window", "gradient buckets"):
            assert rows[kind].measured_bytes <= rows[kind].forecast_bytes
        assert (rows["gather window"].measured_bytes > 0) == (stage == 3)


class Watched(Blocks):
    """Keeps weak references to what a run creates."""

    def on_train_end(self) -> None:
        engine = self.trainer.strategy.engine  # type: ignore[attr-defined]
        self.engine = weakref.ref(engine)
        self.storages = [b.full.untyped_storage() for b in engine.buffers if b.owns_shard]


@distributed(world_size=2)
def test_a_run_leaves_nothing_behind() -> None:
    for stage in (1, 2, 3):
        before = live_bytes()
        module = Watched()
        weights = module.num_bytes
        for _ in range(2):
            trainer = make_trainer(partial(ZeroStrategy, stage=stage, bucket_bytes=1000))
            trainer.fit(module, models.regression_loader())
            assert all(storage.nbytes() == 0 for storage in module.storages)
            assert not any(m._forward_pre_hooks or m._forward_hooks for m in module.modules())
            assert all(type(p) is torch.nn.Parameter for p in module.parameters())
            assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
            assert not [t for t in threading.enumerate() if "lightning_zero" in t.name]
        del trainer
        module._trainer = None
        gc.collect()
        assert module.engine() is None
        assert live_bytes() - before <= weights + 65536


class RestsGathered(pl.Callback):
    """Records full weights that are there after a step, of training and of validation."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def _look(self, trainer: pl.Trainer, *_: Any) -> None:
        engine = trainer.strategy.engine  # type: ignore[attr-defined]
        self.seen.append(sum(b.full.untyped_storage().nbytes() for b in engine.buffers))

    on_train_batch_end = on_validation_batch_end = on_test_batch_end = _look


class WithEvaluation(Blocks):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.last(torch.tanh(self.blocks[0](self.first(batch[0]))))

    test_step = validation_step


@distributed(world_size=2)
def test_nothing_stays_gathered_after_any_kind_of_step() -> None:
    look, module = RestsGathered(), WithEvaluation()
    trainer = make_trainer(
        partial(ZeroStrategy, stage=3, bucket_bytes=1000), callbacks=[look], num_sanity_val_steps=2
    )
    trainer.fit(module, models.regression_loader(), models.regression_loader())
    trainer.test(module, models.regression_loader())
    assert len(look.seen) >= 15
    assert set(look.seen) == {0}
