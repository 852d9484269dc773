"""Nothing is used before the copy that brings it has been waited for."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.support.compare import assert_same
from tests.support.distributed import run_on_ranks
from tests.support.models import Regression
from tests.support.runs import Case, RunRecord, train
from tests.support.transfers import LateTransfers, make_strategy

CASE = Case(
    partial(Regression, optimizer=torch.optim.AdamW),
    trainer={"max_epochs": 2, "gradient_clip_val": 0.05, "accumulate_grad_batches": 2},
)


def train_late(case: Case, stage: int, options: dict[str, Any]) -> RunRecord:
    """Train with copies that happen at the last moment."""
    import lightning_zero.offload_devices as devices

    ordinary = devices.Transfers
    devices.Transfers = LateTransfers  # type: ignore[misc]
    try:
        return train(case, partial(make_strategy, stage, **options))
    finally:
        devices.Transfers = ordinary  # type: ignore[misc]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (1, {"optimizer": "cpu"}),
        (2, {"optimizer": "cpu"}),
        (2, {"optimizer": "cpu", "delayed_update": True}),
        (3, {"optimizer": "cpu"}),
        (3, {"optimizer": "cpu", "params": "cpu"}),
    ],
    ids=["1", "2", "2-delayed", "3", "3-params"],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_copy_is_waited_for(
    stage: int, options: dict[str, Any], precision: str, world_size: int
) -> None:
    case = Case(CASE.module, trainer=CASE.trainer, precision={"precision": precision})
    options = {**options, "force": True}
    ordinary = run_on_ranks(train, world_size, case, partial(make_strategy, stage, **options))
    late = run_on_ranks(train_late, world_size, case, stage, options)
    for rank in range(world_size):
        assert_same(vars(late[rank]), vars(ordinary[rank]), exact=True, label=f"rank {rank}")
