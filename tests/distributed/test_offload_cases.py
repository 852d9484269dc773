"""Offloading on other numbers of ranks, in other precisions, and where a parameter's use varies."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from tests.distributed.test_offload_parity import ADAMW, CASES, DEEP, HALVES
from tests.distributed.test_parity_branches import ALIKE
from tests.distributed.test_parity_frozen import CASES as FROZEN
from tests.distributed.test_parity_gradients import CLIPPING_CASES as CLIPPING
from tests.distributed.test_parity_gradients import HOOK_CASES as HOOKS
from tests.distributed.test_parity_parameters import CASES as PARAMETERS
from tests.support.models import Regression, regression_loader
from tests.support.offload import check_offloaded
from tests.support.runs import Case

OTHERS = {
    "even_steps": ALIKE["even_steps"],
    "layer_drop": ALIKE["layer_drop"],
    "tied": PARAMETERS["tied_language_model"],
    "clamped": PARAMETERS["clamped"],
    "two_dtypes": PARAMETERS["two_float_dtypes"],
    "switched": FROZEN["switched"],
    "int8": FROZEN["low_rank_int8"],
    "custom_norm": CLIPPING["custom_norm"],
    "hook_reads": HOOKS["reads_accumulated"],
}


@pytest.mark.parametrize("name", OTHERS)
def test_cases_of_other_tests(name: str, tmp_path: Path) -> None:
    check_offloaded(OTHERS[name], 2, tmp_path, HALVES[list(OTHERS).index(name) % 2])


@pytest.mark.parametrize("name", ["odd_sizes", "accumulated_and_clipped", "gan"])
def test_three_ranks(name: str, tmp_path: Path) -> None:
    check_offloaded(CASES[name], 3, tmp_path, ("1 cpu", "2 nvme", "3 cpu nvme", "3 nvme nvme"))


@pytest.mark.parametrize(
    "name", ["odd_sizes", "momentum_accumulated", "fused_clipped", "gan_toggled"]
)
def test_one_rank_trains_as_without_the_package(name: str, tmp_path: Path) -> None:
    check_offloaded(CASES[name], 1, tmp_path, ("1 cpu", "2 nvme", "3 nvme nvme", "3 - nvme"))


# The first scale overflows, so that steps are skipped.
OVERFLOWS = {"precision": "16-mixed", "initial_scale_power": 21, "loss_scale_window": 3}


class SkipsSome(pl.Callback):
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        plugin: Any = trainer.precision_plugin
        assert 0 < plugin.skipped_steps < 6


def skips_some() -> list[pl.Callback]:
    return [SkipsSome()]


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
def test_precisions(precision: str, tmp_path: Path) -> None:
    options = OVERFLOWS if precision == "16-mixed" else {"precision": precision}
    case = Case(
        partial(Regression, DEEP, ADAMW),
        partial(regression_loader, 6),
        precision=options,
        callbacks=skips_some if precision == "16-mixed" else None,
        trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "max_epochs": 2},
    )
    check_offloaded(case, 2, tmp_path)
