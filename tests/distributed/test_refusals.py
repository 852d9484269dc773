"""What can't be trained with the same numbers is refused on every rank, before the first step."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.distributed import run_on_ranks
from tests.support.models import Language, Regression, token_loader
from tests.support.runs import STAGES, Case, train


class Lamb(torch.optim.Optimizer):
    """Scales the update of each tensor by norms over the whole tensor."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    ratio = p.norm() / p.grad.norm().clamp_min(1e-8)
                    p.add_(p.grad, alpha=-group["lr"] * float(ratio))
        return loss


class Orthogonalises(Lamb):
    """Needs matrices: decomposes each gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.ndim == 2:
                    u, _, v = torch.linalg.svd(p.grad, full_matrices=False)
                    p.add_(u @ v, alpha=-group["lr"])
                elif p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])
        return loss


def sparse_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 8, sparse=True), nn.Linear(8, 11))


class SparseLanguage(Language):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class NothingToTrain(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch).requires_grad_()


# (case, what the message has to name)
OPTIMIZER_REFUSALS: dict[str, tuple[Case, str]] = {
    "lbfgs": (Case(partial(Regression, optimizer=torch.optim.LBFGS)), "LBFGS"),
    "lamb": (Case(partial(Regression, optimizer=Lamb)), "Lamb"),
    "svd": (Case(partial(Regression, optimizer=Orthogonalises)), "Orthogonalises"),
    "sparse_adam": (Case(partial(Regression, optimizer=torch.optim.SparseAdam)), "SparseAdam"),
    "adafactor": (Case(partial(Regression, optimizer=torch.optim.Adafactor)), "Adafactor"),
}


def _refused(case: Case, strategy: Any, world_size: int = 2) -> list[Any]:
    outcomes = run_on_ranks(train, world_size, case, strategy, expect_failure=True, timeout=60)
    for outcome in outcomes:
        assert outcome.error_type in {"ValueError", "NotImplementedError"}, outcome.traceback
        assert "training_step" not in outcome.traceback
    return outcomes


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", OPTIMIZER_REFUSALS)
def test_an_optimizer_that_needs_whole_tensors_is_refused(name: str, stage: str) -> None:
    case, word = OPTIMIZER_REFUSALS[name]
    outcomes = _refused(case, stage)
    for outcome in outcomes:
        assert word in outcome.message
    assert len({outcome.message for outcome in outcomes}) == 1


@pytest.mark.parametrize("stage", STAGES)
def test_sparse_gradients_are_refused_by_name(stage: str) -> None:
    case = Case(partial(SparseLanguage, sparse_model), token_loader)
    for outcome in _refused(case, stage):
        assert "net.0" in outcome.message
        assert "sparse" in outcome.message


class Scripted(Regression):
    """Holds a part that TorchScript runs."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.scripted = torch.jit.script(nn.Linear(3, 3))


@pytest.mark.parametrize("stage", STAGES)
def test_torchscript_is_refused_by_name(stage: str) -> None:
    for outcome in _refused(Case(Scripted), stage):
        assert "Module 'scripted' is a TorchScript module" in outcome.message


def test_an_optimizer_is_fine_on_one_rank_where_nothing_is_sharded() -> None:
    """Or is refused as well, but never trains to something else."""
    case = Case(partial(Regression, optimizer=Lamb))
    outcomes = run_on_ranks(train, 1, case, "zero1", expect_failure=True)
    if outcomes[0].is_failure:
        assert outcomes[0].error_type in {"ValueError", "NotImplementedError"}
    else:
        (reference,) = run_on_ranks(train, 1, case, "ddp")
        for name, value in reference.state.items():
            assert torch.equal(outcomes[0].value.state[name], value)


def unknown_option() -> Any:
    import lightning_zero

    return lightning_zero.ZeroStrategy(stage=2, bucket_size=16)  # type: ignore[call-arg]


def unknown_stage() -> Any:
    import lightning_zero

    return lightning_zero.ZeroStrategy(stage=4)  # type: ignore[arg-type]


def negative_bucket() -> Any:
    import lightning_zero

    return lightning_zero.ZeroStrategy(stage=2, bucket_bytes=-1)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (unknown_option, "'bucket_size'.*bucket_bytes"),
        (unknown_stage, "4"),
        (negative_bucket, "bucket_bytes"),
    ],
)
def test_a_wrong_option_is_refused_at_construction(make: Any, word: str) -> None:
    with pytest.raises((ValueError, TypeError), match=word):
        make()
