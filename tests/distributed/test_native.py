"""The CUDA form of the collectives, tried on CPU: gloo has the same operations, only slower."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero import ZeroStrategy
from lightning_zero.comm.collectives import NativeCollectives
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


def final_weights(strategy_class: type[ZeroStrategy], stage: int) -> Tensor:
    torch.manual_seed(0)
    module = Blocks(layers=4, num_tiny=3)
    strategy = partial(strategy_class, stage=stage, bucket_bytes=1000)
    make_trainer(strategy, gradient_clip_val=0.5).fit(module, models.regression_loader())
    module.tiny[0].sum()
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


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
