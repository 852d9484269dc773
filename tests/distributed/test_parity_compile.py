"""Compiled modules train as under DDP."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.support.models import Regression, mlp, regression_loader
from tests.support.runs import STAGES, Case, check_parity

BACKEND = "aot_eager"


class CompilesAPart(Regression):
    """A sub-module is compiled in place when the module is configured."""

    def configure_model(self) -> None:
        self.net.compile(backend=BACKEND)


def fits_compiled(trainer: pl.Trainer, module: pl.LightningModule, case: Case) -> Any:
    trainer.fit(torch.compile(module, backend=BACKEND), case.data())  # type: ignore[arg-type]


THREE_BATCHES = partial(regression_loader, 3)
CASES = {
    "whole": Case(partial(Regression, mlp), THREE_BATCHES, drive=fits_compiled),
    "part": Case(CompilesAPart, THREE_BATCHES),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CASES)
def test_a_compiled_module_gives_ddps_numbers(name: str, stage: str) -> None:
    check_parity(CASES[name], stage)
