"""Precisions that DDP has too, and evaluation in inference mode, give DDP's numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.models import ADAM, SGD, Regression, mlp, regression_loader
from tests.support.runs import STAGES, Case, check_parity

BLOCKS = partial(mlp, 7, 13, 13, 5)


class ValidatesInInferenceMode(Regression):
    """What Lightning does on CUDA; on gloo it uses no_grad instead."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.inference_mode():
            self.note("validated", self.net(batch[0]))


class Normalises(Regression):
    """Autocast treats its layers in different ways."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.head = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 5), nn.GELU())
        self.gain = nn.Parameter(torch.ones(5))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss((self.head(self.net(x)) * self.gain).float(), y)


# fp32 model weights under autocast are what DDP has
OPTIONS: dict[str, dict[str, Any]] = {
    "bf16-mixed": {"precision": "bf16-mixed", "model_dtype": "fp32"},
    "64-true": {"precision": "64-true"},
    "bf16-true": {"precision": "bf16-true"},
    "16-true": {"precision": "16-true"},
}
CASES = {
    f"{precision}_{name}": Case(
        partial(Normalises if precision == "bf16-mixed" else Regression, BLOCKS, optimizer),
        precision=options,
    )
    for precision, options in OPTIONS.items()
    for name, optimizer in (("sgd", SGD), ("adam", ADAM))
    if (precision, name) != ("16-true", "adam")  # whose eps is 0 in fp16: all weights become NaN
}
CASES["bf16-mixed_accumulation"] = Case(
    partial(Normalises, BLOCKS, SGD),
    precision=OPTIONS["bf16-mixed"],
    trainer={"accumulate_grad_batches": 2},
)
CASES["64-true_clipping"] = Case(
    partial(Regression, BLOCKS, SGD),
    precision=OPTIONS["64-true"],
    trainer={"gradient_clip_val": 0.05},
    is_exact=False,
)
CASES["inference_mode"] = Case(
    partial(ValidatesInInferenceMode, BLOCKS, ADAM),
    validation_data=partial(regression_loader, 2),
    trainer={"val_check_interval": 2, "num_sanity_val_steps": 1},
)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CASES)
def test_precisions_give_ddps_numbers(name: str, stage: str) -> None:
    check_parity(CASES[name], stage)
