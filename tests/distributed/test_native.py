"""The CUDA form of the collectives, tried on CPU: gloo has the same operations, only slower."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero import ZeroPrecision, ZeroStrategy
from lightning_zero.comm.collectives import NativeCollectives
from lightning_zero.comm.gloo import GlooExchange
from lightning_zero.comm.watch import StallWatch
from tests.support import models
from tests.support.distributed import run_on_ranks
from tests.support.measure import Blocks
from tests.support.runs import make_trainer


class NativeZeroStrategy(ZeroStrategy):
    """Uses the backend's own collectives on two groups, as on CUDA."""

    def setup_environment(self) -> None:
        super().setup_environment()
        watch = self._collectives.watch
        assert watch is not None
        self._collectives = NativeCollectives(dist.new_group(), dist.new_group(), watch)


class Diverging(Blocks):
    """Uses blocks of the same size in a different order on each rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if models.rank() == 1 and batch_idx == 2:
            self.blocks[3], self.blocks[4] = self.blocks[4], self.blocks[3]
        return super().training_step(batch, batch_idx)


def final_weights(
    strategy_class: type[ZeroStrategy], stage: int, precision: str = "32-true"
) -> Tensor:
    torch.manual_seed(0)
    module = Blocks(layers=4, num_tiny=3)
    plugin = ZeroPrecision(precision)
    strategy = partial(strategy_class, stage=stage, bucket_bytes=1000, precision_plugin=plugin)
    make_trainer(strategy, gradient_clip_val=0.5).fit(module, models.regression_loader())
    module.tiny[0].sum()
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def sums_of_halves(rank: int) -> tuple[Tensor, Tensor]:
    """Numbers in bf16 whose sums bf16 holds, too, and this rank's slice of the sums."""
    numbers = torch.arange(4 * models.world_size(), dtype=torch.float32)
    mine = (numbers + 4 * models.rank()).bfloat16()
    sums = sum(numbers + 4 * other for other in range(models.world_size()))
    assert isinstance(sums, Tensor)
    return mine, sums[4 * rank : 4 * rank + 4]


def reduce_wide() -> None:
    groups = dist.new_group(), dist.new_group()
    watch = StallWatch(models.rank(), models.world_size(), timedelta(seconds=20), {})
    for collectives in (NativeCollectives(*groups, watch), GlooExchange(groups[0], watch)):
        mine, want = sums_of_halves(models.rank())
        out = torch.full((4,), torch.nan)
        collectives.start_reduce_scatter(mine, out, "numbers", 0).wait()
        assert torch.equal(out, want)
        assert collectives.counters.sent_bytes == 2 * 4 * (models.world_size() - 1)


@pytest.mark.parametrize("world_size", [2, 3])
def test_halves_are_summed_into_fp32(world_size: int) -> None:
    run_on_ranks(reduce_wide, world_size, init_group=True)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_native_form_trains_in_mixed_precision(stage: int) -> None:
    """It adds up in bf16, as NCCL does, so gradients may differ by a rounding."""
    native = run_on_ranks(final_weights, 2, NativeZeroStrategy, stage, "bf16-mixed")
    exchange = run_on_ranks(final_weights, 2, ZeroStrategy, stage, "bf16-mixed")
    for left, right in zip(native, exchange, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-4)
        assert not torch.equal(left, left.bfloat16().float())


def diverge() -> None:
    module = Diverging()
    strategy = partial(NativeZeroStrategy, stage=3, bucket_bytes=1000)
    make_trainer(strategy).fit(module, models.regression_loader())


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_native_form_gives_the_numbers_of_the_exchange(stage: int, world_size: int) -> None:
    native = run_on_ranks(final_weights, world_size, NativeZeroStrategy, stage)
    exchange = run_on_ranks(final_weights, world_size, ZeroStrategy, stage)
    for left, right in zip(native, exchange, strict=True):
        if world_size == 2:
            assert torch.equal(left, right)
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def test_ranks_that_mix_up_units_stop_before_the_step() -> None:
    outcomes = run_on_ranks(diverge, 2, expect_failure=True)
    assert all("different units" in outcome.message for outcome in outcomes), outcomes
