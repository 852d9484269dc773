"""Manual optimization: several optimizers, backwards and closures in any order."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.models import (
    ADAM,
    SGD,
    OptimizerFactory,
    Recording,
    Regression,
    mlp,
    regression_loader,
)
from tests.support.runs import DDP_UNUSED, STAGES, Case, check_parity

SIX_BATCHES = partial(regression_loader, 6)


class Gan(Recording):
    """Two optimizers and two schedulers; the discriminator is stepped twice for each generator."""

    def __init__(self, toggles: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggles = toggles
        self.generator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise, real = batch
        generator_opt, discriminator_opt = self.optimizers()
        for _ in range(2):
            loss = self._step(discriminator_opt, lambda: self._discriminator_loss(noise, real))
            self.note("discriminator_loss", loss)
        loss = self._step(generator_opt, lambda: self._generator_loss(noise))
        for scheduler in self.lr_schedulers():
            scheduler.step()
        return loss

    def _step(self, optimizer: Any, compute: Any) -> Tensor:
        if self.toggles:
            self.toggle_optimizer(optimizer)
        loss = compute()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        if self.toggles:
            self.untoggle_optimizer(optimizer)
        return loss.detach()

    def _discriminator_loss(self, noise: Tensor, real: Tensor) -> Tensor:
        fake = self.discriminator(self.generator(noise).detach())
        true = self.discriminator(real)
        return F.softplus(-true).mean() + F.softplus(fake).mean()

    def _generator_loss(self, noise: Tensor) -> Tensor:
        return F.softplus(-self.discriminator(self.generator(noise))).mean()

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.Adam(self.generator.parameters(), lr=1e-2, betas=(0.5, 0.9)),
            torch.optim.Adam(self.discriminator.parameters(), lr=2e-2),
        ]
        make = torch.optim.lr_scheduler.ExponentialLR
        return optimizers, [make(optimizers[0], 0.9), make(optimizers[1], 0.8)]


class Manual(Regression):
    """Manual optimization with one optimizer; subclasses say what a step is."""

    def __init__(self, optimizer: OptimizerFactory = ADAM) -> None:
        super().__init__(partial(mlp, 7, 13, 11, 5), optimizer)
        self.automatic_optimization = False

    def parts(self, batch: Any) -> list[Any]:
        """The batch row by row."""
        x, y = batch
        return [(x[i : i + 1], y[i : i + 1]) for i in range(len(x))]


class StepsWithAClosure(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        seen: list[Tensor] = []

        def closure() -> Tensor:
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            seen.append(loss.detach())
            return loss

        optimizer.step(closure=closure)
        return seen[-1]


class SeveralBackwards(Manual):
    """Three backwards, each on a row of the batch, before one step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        total = torch.zeros(())
        for part in self.parts(batch):
            loss = self.loss(part) / 3
            self.manual_backward(loss)
            total = total + loss.detach()
        optimizer.step()
        return total


class RetainsTheGraph(Manual):
    """Two losses on one graph, with a backward for each."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        out = self.net(batch[0])
        first, second = F.mse_loss(out, batch[1]), out.abs().mean()
        self.manual_backward(first, retain_graph=True)
        self.manual_backward(second)
        optimizer.step()
        return (first + second).detach()


class AccumulatesByHand(Manual):
    """A step every third batch; the backward of the others is told not to synchronise."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        is_boundary = batch_idx % 3 == 2
        with optimizer.toggle_model(sync_grad=is_boundary):
            loss = self.loss(batch) / 3
            self.manual_backward(loss)
            if is_boundary:
                optimizer.step()
                optimizer.zero_grad()
        return loss.detach()


class NeverZeroes(Manual):
    """Gradients add up over the whole run."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.optimizers().step()
        return loss.detach()


class StepsTwice(Manual):
    """The same gradient is applied twice."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        optimizer.step()
        return loss.detach()


class KeepsZeroGradients(Manual):
    """Zeroed gradients are not absent ones: Adam goes on moving what gets a zero gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad(set_to_none=False)
        x, y = batch
        # The last layer is left out in odd steps.
        out = self.net(x) if batch_idx % 2 == 0 else self.net[:3](x)[:, :5]
        loss = F.mse_loss(out, y)
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()


class ScalesInBackward(Regression):
    """Overrides Lightning's backward."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 2).backward(*args, **kwargs)


class ClipsByHand(Manual):
    """Reads and clips `p.grad` right after the backward, with torch's own function."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.note("norm", nn.utils.clip_grad_norm_(self.parameters(), 0.05))
        self.note("gradient", self.net[2].weight.grad)
        optimizer.step()
        return loss.detach()


class SharpnessAware(Manual):
    """Moves the weights along the gradient, takes the gradient there, and moves back."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        moves = []
        with torch.no_grad():
            for p in self.net.parameters():
                moves.append(p.grad.clone() * 0.1)
                p.add_(moves[-1])
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for p, move in zip(self.net.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        return loss.detach()


class NormalisesBatches(Manual):
    """Batch norm's buffers under manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(13))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()


class StepsRarely(Manual):
    """Two optimizers over one model; the second is stepped every other batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        often, rarely = self.optimizers()
        loss = self.loss(batch)
        often.zero_grad()
        rarely.zero_grad()
        self.manual_backward(loss)
        often.step()
        if batch_idx % 2:
            rarely.step()
        return loss.detach()

    def configure_optimizers(self) -> Any:
        params = list(self.parameters())
        return SGD(params[:3]), torch.optim.AdamW(params[3:], lr=1e-2)


CASES = {
    "gan_toggled": Case(
        partial(Gan, True),
        partial(regression_loader, 6, 3, (8,), (4,)),
        reference=DDP_UNUSED,
    ),
    "gan_not_toggled": Case(
        partial(Gan, False),
        partial(regression_loader, 6, 3, (8,), (4,)),
        reference=DDP_UNUSED,
        is_exact=False,
        accumulates=True,
    ),
    "closure": Case(StepsWithAClosure, SIX_BATCHES),
    "retain_graph": Case(RetainsTheGraph, SIX_BATCHES, is_exact=False, accumulates=True),
    "several_backwards": Case(SeveralBackwards, SIX_BATCHES, is_exact=False, accumulates=True),
    "several_backwards_sgd": Case(
        partial(SeveralBackwards, SGD), SIX_BATCHES, is_exact=False, accumulates=True
    ),
    "accumulates_by_hand": Case(AccumulatesByHand, SIX_BATCHES, accumulates=True),
    "never_zeroes": Case(NeverZeroes, SIX_BATCHES, is_exact=False, accumulates=True),
    "steps_twice": Case(StepsTwice, SIX_BATCHES),
    "keeps_zero_gradients": Case(
        KeepsZeroGradients, SIX_BATCHES, reference=DDP_UNUSED, accumulates=True
    ),
    "overridden_backward": Case(ScalesInBackward, SIX_BATCHES),
    "overridden_backward_accumulated": Case(
        ScalesInBackward, SIX_BATCHES, trainer={"accumulate_grad_batches": 3}
    ),
    "clips_by_hand": Case(ClipsByHand, SIX_BATCHES, is_exact=False),
    "sharpness_aware": Case(SharpnessAware, SIX_BATCHES),
    "sharpness_aware_sgd": Case(partial(SharpnessAware, SGD), SIX_BATCHES),
    "batch_norm": Case(NormalisesBatches, SIX_BATCHES, local_state=r"running_(mean|var)$"),
    "steps_rarely": Case(StepsRarely, SIX_BATCHES),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CASES)
def test_manual_optimization_gives_ddps_numbers(name: str, stage: str) -> None:
    check_parity(CASES[name], stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["gan_toggled", "closure", "several_backwards"])
def test_manual_optimization_on_three_ranks(name: str, stage: str) -> None:
    check_parity(CASES[name], stage, world_size=3)
