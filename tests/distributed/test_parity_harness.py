"""The comparison must notice what it is there to notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from tests.support import models
from tests.support.runs import DDP, Case, ParityRun, compare_stage, run_under_each


class LosesTheLastStep(DDPStrategy):
    """Trains well but for the very last update."""

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *a: Any, **k: Any) -> Any:
        if self.lightning_module is not None and self.lightning_module.global_step == 4:
            return closure()
        return super().optimizer_step(optimizer, closure, *a, **k)


class NeverReduces(DDPStrategy):
    """Each rank trains alone."""

    def configure_ddp(self) -> None:
        pass


class OffByOneUlp(DDPStrategy):
    """One element of the result has another last bit, on one rank."""

    def teardown(self) -> None:
        super().teardown()
        if models.rank() == 1:
            with torch.no_grad():
                weight = next(iter(self.lightning_module.parameters())).view(-1)  # type: ignore[union-attr]
                weight[0] = torch.nextafter(weight[0], torch.tensor(torch.inf))


class Raises(DDPStrategy):
    """Fails on one rank, in the middle of the run."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        if models.rank() == 1:
            raise LookupError("the planned mishap")
        return super().optimizer_step(*args, **kwargs)


CASE = Case()


def _compare(candidate: Any) -> None:
    results = run_under_each(CASE, {DDP: DDP, "zero1": candidate}, 2)
    compare_stage(ParityRun(CASE, results), "zero1", 2)


def test_ddp_equals_ddp() -> None:
    _compare(DDPStrategy)


@pytest.mark.parametrize("candidate", [LosesTheLastStep, NeverReduces, OffByOneUlp])
def test_a_wrong_strategy_is_found_out(candidate: type[DDPStrategy]) -> None:
    with pytest.raises(AssertionError, match="not equal bitwise"):
        _compare(candidate)


def test_a_strategy_that_raises_is_shown_with_its_traceback() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1 under zero1.*planned mishap"):
        _compare(Raises)
