"""Clipping, and hooks that read or change gradients, act on what the optimizer uses."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch.optim import Optimizer

from tests.support.models import ADAM, SGD, Regression, mlp, regression_loader
from tests.support.runs import STAGES, Case, check_parity

LOUD = partial(Regression, partial(mlp, 7, 13, 11, 5), SGD, 100.0)
SIX_BATCHES = partial(regression_loader, 6)


class CustomClipping(Regression):
    """Clips by a limit of its own choice, through Lightning's helper."""

    def __init__(self, algorithm: str) -> None:
        super().__init__(loss_scale=100.0)
        self.algorithm = algorithm

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        limit = 0.1 if self.global_step % 2 else 0.5
        self.clip_gradients(
            optimizer, gradient_clip_val=limit, gradient_clip_algorithm=self.algorithm
        )


class OwnClipping(Regression):
    """Clips by hand, with torch's function on the module's parameters."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        total = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)
        self.note("total_norm", total)


class ManualClipping(Regression):
    """Clips under manual optimization."""

    def __init__(self, algorithm: str) -> None:
        super().__init__(loss_scale=100.0)
        self.automatic_optimization = False
        self.algorithm = algorithm

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(
            optimizer, gradient_clip_val=0.3, gradient_clip_algorithm=self.algorithm
        )
        optimizer.step()
        return loss


def clipped(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"gradient_clip_val": 0.5, "gradient_clip_algorithm": algorithm, **more}


# The norm adds over shards, in another order than over tensors: to rounding. A clamp is exact.
CLIPPING_CASES = {
    "norm": Case(LOUD, SIX_BATCHES, trainer=clipped("norm"), is_exact=False),
    "norm_adam": Case(
        partial(Regression, mlp, ADAM, 100.0),
        SIX_BATCHES,
        trainer=clipped("norm"),
        is_exact=False,
    ),
    "norm_never_reached": Case(
        Regression, SIX_BATCHES, trainer={"gradient_clip_val": 1e6}, is_exact=False
    ),
    "norm_accumulated": Case(
        LOUD,
        partial(regression_loader, 8),
        trainer=clipped("norm", accumulate_grad_batches=3),
        is_exact=False,
    ),
    "value": Case(LOUD, SIX_BATCHES, trainer=clipped("value")),
    "value_accumulated": Case(
        LOUD, partial(regression_loader, 8), trainer=clipped("value", accumulate_grad_batches=3)
    ),
    "custom_norm": Case(partial(CustomClipping, "norm"), SIX_BATCHES, is_exact=False),
    "custom_value": Case(partial(CustomClipping, "value"), SIX_BATCHES),
    "torch_function": Case(partial(OwnClipping, loss_scale=100.0), SIX_BATCHES, is_exact=False),
    "manual_norm": Case(partial(ManualClipping, "norm"), SIX_BATCHES, is_exact=False),
    "manual_value": Case(partial(ManualClipping, "value"), SIX_BATCHES),
}


class NotesNorms(Regression):
    """Reads the norms where Lightning's documentation says to."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        for name, value in grad_norm(self, 2).items():
            self.note(name, float(value))


class NotesGradients(Regression):
    """Keeps every gradient that the step is about to use."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        for name, p in self.named_parameters():
            self.note(name, None if p.grad is None else p.grad)


class ScalesGradients(Regression):
    """Changes gradients in place."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        for index, p in enumerate(self.parameters()):
            assert p.grad is not None
            p.grad.mul_(0.1 * (index + 1))
            if p.grad.ndim == 2:
                p.grad[0, 0] = 3.0


class ReplacesGradients(Regression):
    """Gives parameters other gradients by assignment; one loses its gradient."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        for index, p in enumerate(self.parameters()):
            assert p.grad is not None
            p.grad = None if index == 1 else p.grad.sign()


class ReplacesOneGradient(Regression):
    """Touches a single gradient; the others have to stay what they are."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        weight = self.net[2].weight
        weight.grad = torch.full_like(weight, 0.25)


class NotesLate(Regression):
    """Reads gradients after the step, where they stay until they are zeroed."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook

    def _note(self, hook: str) -> None:
        if hook == self.hook:
            for name, p in self.named_parameters():
                self.note(name, None if p.grad is None else p.grad)

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        self._note("before_zero_grad")

    def on_train_batch_end(self, *_: Any) -> None:
        self._note("batch_end")


class GathersFeatures(Regression):
    """A contrastive loss over the rows of all ranks, with gradients through the gather."""

    def __init__(self) -> None:
        super().__init__(optimizer=SGD)
        self.temperature = torch.nn.Parameter(torch.tensor(0.5))

    def loss(self, batch: Any) -> torch.Tensor:
        features = self.net(batch[0])
        everyone = self.all_gather(features, sync_grads=True).flatten(0, -2)
        logits = features @ everyone.T * self.temperature.exp()
        own = torch.arange(len(features)) + self.global_rank * len(features)
        return torch.nn.functional.cross_entropy(logits, own)


class ScalesInACallback(pl.Callback):
    """The same from a callback, which Lightning calls before the module's hook."""

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        for p in pl_module.parameters():
            if p.grad is not None:
                p.grad.clamp_(-0.01, 0.01)


class ScalesAfterBackward(Regression):
    """Changes gradients between backward and the step, where accumulated sums are visible."""

    def __init__(self) -> None:
        super().__init__(optimizer=SGD)  # Adam would hide a factor

    def on_after_backward(self) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)


class TensorHooks(Regression):
    """Registers its own hook on a parameter, which halves the gradient before it is reduced."""

    def on_fit_start(self) -> None:
        self.net[0].weight.register_hook(_half)


def _half(grad: torch.Tensor) -> torch.Tensor:
    return grad * 0.5


def scaling_callback() -> list[pl.Callback]:
    return [ScalesInACallback()]


HOOK_CASES = {
    "reads": Case(NotesGradients, SIX_BATCHES),
    "reads_accumulated": Case(NotesGradients, SIX_BATCHES, trainer={"accumulate_grad_batches": 2}),
    "reads_norms": Case(NotesNorms, SIX_BATCHES, is_exact=False),
    "reads_before_zero_grad": Case(partial(NotesLate, "before_zero_grad"), SIX_BATCHES),
    "reads_at_batch_end": Case(partial(NotesLate, "batch_end"), SIX_BATCHES),
    "gathers_features": Case(GathersFeatures, SIX_BATCHES),
    "in_place": Case(ScalesGradients, SIX_BATCHES),
    "in_place_accumulated": Case(
        ScalesGradients, SIX_BATCHES, trainer={"accumulate_grad_batches": 3}
    ),
    "assigned": Case(ReplacesGradients, SIX_BATCHES),
    "assigned_sgd": Case(partial(ReplacesGradients, optimizer=SGD), SIX_BATCHES),
    "one_assigned": Case(ReplacesOneGradient, SIX_BATCHES),
    "callback": Case(Regression, SIX_BATCHES, callbacks=scaling_callback),
    "callback_then_clip": Case(
        LOUD, SIX_BATCHES, callbacks=scaling_callback, trainer=clipped("norm"), is_exact=False
    ),
    "after_backward": Case(ScalesAfterBackward, SIX_BATCHES),
    "after_backward_accumulated": Case(
        ScalesAfterBackward, SIX_BATCHES, trainer={"accumulate_grad_batches": 2}
    ),
    "tensor_hook": Case(TensorHooks, SIX_BATCHES),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CLIPPING_CASES)
def test_clipping_gives_ddps_numbers(name: str, stage: str) -> None:
    check_parity(CLIPPING_CASES[name], stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["norm", "norm_accumulated", "value", "torch_function"])
def test_clipping_gives_ddps_numbers_on_three_ranks(name: str, stage: str) -> None:
    check_parity(CLIPPING_CASES[name], stage, world_size=3)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", HOOK_CASES)
def test_hooks_see_and_change_the_gradients_that_are_used(name: str, stage: str) -> None:
    check_parity(HOOK_CASES[name], stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["reads", "in_place", "assigned"])
def test_hooks_on_three_ranks(name: str, stage: str) -> None:
    check_parity(HOOK_CASES[name], stage, world_size=3)
