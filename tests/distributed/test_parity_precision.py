"""Precisions that need no loss scaling, and evaluation in inference mode, give DDP's numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.support.models import ADAM, SGD, Regression, mlp, regression_loader
from tests.support.runs import STAGES, Case, check_parity

BLOCKS = partial(mlp, 7, 13, 13, 5)


class ValidatesInInferenceMode(Regression):
    """What Lightning does on CUDA; on gloo it uses no_grad instead."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.inference_mode():
            self.note("validated", self.net(batch[0]))


CASES = {
    f"{precision}_{name}": Case(
        partial(Regression, BLOCKS, optimizer),
        trainer={"precision": precision},
    )
    for precision in ("bf16-mixed", "64-true")
    for name, optimizer in (("sgd", SGD), ("adam", ADAM))
}
CASES["inference_mode"] = Case(
    partial(ValidatesInInferenceMode, BLOCKS, ADAM),
    validation_data=partial(regression_loader, 2),
    trainer={"val_check_interval": 2, "num_sanity_val_steps": 1},
)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CASES)
def test_precisions_give_ddps_numbers(name: str, stage: str) -> None:
    check_parity(CASES[name], stage)
