"""Every buffer is read only after the wait that orders its write, and freed only after that."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lightning_zero import ZeroPrecision, ZeroStrategy
from tests.support import models
from tests.support.collectives import DeferredZeroStrategy
from tests.support.distributed import run_on_ranks
from tests.support.measure import Blocks
from tests.support.runs import make_trainer


def final_weights(
    strategy_class: type[ZeroStrategy], stage: int, accumulate: int, precision: str
) -> torch.Tensor:
    torch.manual_seed(0)
    module = Blocks(layers=4, num_tiny=3)
    plugin = ZeroPrecision(precision)
    strategy = partial(strategy_class, stage=stage, bucket_bytes=1000, precision_plugin=plugin)
    trainer = make_trainer(
        strategy, accumulate_grad_batches=accumulate, gradient_clip_val=0.5, max_epochs=2
    )
    trainer.fit(module, models.regression_loader(), models.regression_loader())
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("accumulate", "precision"), [(1, "16-mixed"), (2, "32-true")])
def test_nothing_is_used_before_it_has_arrived(stage: int, accumulate: int, precision: str) -> None:
    deferred = run_on_ranks(final_weights, 2, DeferredZeroStrategy, stage, accumulate, precision)
    plain = run_on_ranks(final_weights, 2, ZeroStrategy, stage, accumulate, precision)
    for left, right in zip(deferred, plain, strict=True):
        assert torch.isfinite(left).all()
        assert torch.equal(left, right)
