"""Reading, copying and writing weights from the hooks of a run."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.utilities.model_summary import ModelSummary
from torch import Tensor, nn

from tests.distributed.test_parity_parameters import Blocks
from tests.support.models import ADAM, SGD, Regression, regression_loader
from tests.support.runs import STAGES, Case, check_parity, full_state, whole

SIX_BATCHES = partial(regression_loader, 6)


class Accessing(Regression):
    """Regression on blocks, so that stage 3 has several units to gather."""

    def __init__(self, optimizer: Any = ADAM) -> None:
        super().__init__(Blocks, optimizer)


class CopiesAtStart(Accessing):
    """The teacher is a deep copy, made when the module is already sharded."""

    def on_fit_start(self) -> None:
        self.copies = [copy.deepcopy(self.net)]
        self.note("copy", full_state(self.copies[0]))

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            target = self.copies[0](batch[0])
        return super().loss(batch) + F.mse_loss(self.net(batch[0]), target)

    def on_train_end(self) -> None:
        self.note("copy", full_state(self.copies[0]))


class CopiesMidway(Accessing):
    """Copies between steps; a copy does not follow the training."""

    def on_train_batch_end(self, *_: Any) -> None:
        twin = copy.deepcopy(self.net)
        self.note("copy", full_state(twin))
        self.note("output", twin(torch.ones(1, 7)))


class ReadsValues(Accessing):
    """Reads weights plainly in hooks: norms, extremes, items, histograms, state dicts."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        weight = self.net.blocks[1].up.weight
        self.note("norm", weight.detach().norm())
        self.note("item", weight[0, 0].item())
        self.note("numpy", torch.from_numpy(weight.detach().numpy().copy()))
        self.note("extremes", [float(p.min()) for p in self.parameters()])

    def on_train_batch_end(self, *_: Any) -> None:
        self.note("state", full_state(self.net.head))
        self.note("clone", self.net.blocks[0].down.bias.clone())
        self.note("vector", nn.utils.parameters_to_vector(self.net.blocks[2].parameters()))


class ReadsWhole(Accessing):
    """Reads inside `full_params`, where every parameter is a plain tensor."""

    def on_train_batch_end(self, *_: Any) -> None:
        with whole(self.net, self.trainer):
            self.note("weights", {n: p.detach().clone() for n, p in self.net.named_parameters()})
            self.note("kinds", [type(p).__name__ for p in self.net.parameters()])
            self.note("output", self.net(torch.ones(1, 7)))


class WritesWhole(Accessing):
    """Writes inside `full_params`, before and between steps."""

    def on_fit_start(self) -> None:
        self._write(0.5)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self._write(0.9)

    def _write(self, factor: float) -> None:
        with whole(self, self.trainer, write=True), torch.no_grad():
            for p in self.net.parameters():
                p.mul_(factor)
            self.net.blocks[0].up.weight[0].fill_(0.25)


class InitialisesInPlace(Accessing):
    """Initialises in `on_fit_start`, in the ways that are in use."""

    def on_fit_start(self) -> None:
        generator = torch.Generator().manual_seed(9)
        block, other, last = self.net.blocks
        nn.init.orthogonal_(block.up.weight, generator=generator)
        nn.init.xavier_uniform_(block.down.weight, generator=generator)
        nn.init.zeros_(block.up.bias)
        nn.init.trunc_normal_(other.up.weight, generator=generator)
        other.up.bias.data.zero_()
        other.down.weight.data.normal_(generator=generator)
        other.down.bias.data = torch.full((7,), 0.1)
        nn.init.constant_(last.up.bias, 0.5)
        nn.init.normal_(last.down.weight, generator=generator)
        nn.init.kaiming_uniform_(last.up.weight, generator=generator)
        nn.init.uniform_(last.down.bias, generator=generator)
        with torch.no_grad():
            last.up.weight.add_(block.up.weight)
            last.up.bias += 0.5
            last.down.weight[:, 0] = 0.125
            torch._foreach_mul_(list(last.down.parameters()), 0.5)
        flat = torch.linspace(-1, 1, 40)
        nn.utils.vector_to_parameters(flat, self.net.head.parameters())


class WritesBetweenSteps(Accessing):
    """Changes weights between the steps, as weight clipping and re-starts do."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for p in self.net.blocks[0].parameters():
                p.clamp_(-0.2, 0.2)
        if batch_idx == 3:
            self.net.blocks[1].up.reset_parameters = partial(_restart, self.net.blocks[1].up)
            self.net.blocks[1].up.reset_parameters()


def _restart(layer: nn.Linear) -> None:
    nn.init.constant_(layer.weight, 0.01)
    nn.init.zeros_(layer.bias)


class LoadsInTheMiddle(Accessing):
    """Loads a state dict into a part of the module during the run."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.net.blocks[0].load_state_dict(self.net.blocks[1].state_dict())


class AveragesByHand(Accessing):
    """A moving average of the weights, kept as the module's own buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.average = [p.detach().clone() for p in self.net.parameters()]

    def on_fit_start(self) -> None:
        self.average = [p.detach().clone() for p in self.net.parameters()]

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for mean, p in zip(self.average, self.net.parameters(), strict=True):
                mean.lerp_(p, 0.1)
        self.note("average", [mean.clone() for mean in self.average])


class Summarises(Accessing):
    """Counts its parameters while they are sharded."""

    def on_fit_start(self) -> None:
        summary = ModelSummary(self, max_depth=-1)
        self.note("total", summary.total_parameters)
        self.note("trainable", summary.trainable_parameters)
        self.note("layers", list(summary.param_nums))
        self.note("shapes", [tuple(p.shape) for p in self.parameters()])
        self.note("ndim_groups", [p.ndim >= 2 for p in self.parameters()])


def ema() -> list[pl.Callback]:
    return [EMAWeightAveraging(decay=0.9)]


def swa() -> list[pl.Callback]:
    return [StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)]


THREE_EPOCHS = {"max_epochs": 3}
TWO_BATCHES = partial(regression_loader, 2, seed=8)
CASES = {
    "deepcopy_at_start": Case(CopiesAtStart, SIX_BATCHES),
    "deepcopy_midway": Case(CopiesMidway, SIX_BATCHES),
    "reads_values": Case(ReadsValues, SIX_BATCHES),
    "reads_whole": Case(ReadsWhole, SIX_BATCHES),
    "writes_whole": Case(WritesWhole, SIX_BATCHES),
    "writes_whole_sgd": Case(partial(WritesWhole, SGD), SIX_BATCHES),
    "initialises_in_place": Case(InitialisesInPlace, SIX_BATCHES),
    "writes_between_steps": Case(WritesBetweenSteps, SIX_BATCHES),
    "loads_in_the_middle": Case(LoadsInTheMiddle, SIX_BATCHES),
    "averages_by_hand": Case(AveragesByHand, SIX_BATCHES),
    "summarises": Case(Summarises, SIX_BATCHES),
    "ema": Case(Accessing, validation_data=TWO_BATCHES, callbacks=ema, trainer=THREE_EPOCHS),
    "swa": Case(Accessing, validation_data=TWO_BATCHES, callbacks=swa, trainer=THREE_EPOCHS),
}
ON_THREE_RANKS = ["deepcopy_midway", "reads_values", "writes_whole", "initialises_in_place"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CASES)
def test_weights_can_be_read_and_written_in_hooks(name: str, stage: str) -> None:
    check_parity(CASES[name], stage)


class HoldsAliases(Accessing):
    """Takes the parameters' memory once and looks at it after every step."""

    def on_fit_start(self) -> None:
        self.held = [p.detach() for p in self.parameters()] + [self.net.blocks[0].up.weight.data]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("held", torch.cat([value.reshape(-1) for value in self.held]))


@pytest.mark.parametrize("stage", ["zero1", "zero2"])
def test_memory_taken_from_replicated_weights_follows_the_steps(stage: str) -> None:
    check_parity(Case(HoldsAliases, SIX_BATCHES), stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ON_THREE_RANKS)
def test_weights_can_be_read_and_written_on_three_ranks(name: str, stage: str) -> None:
    check_parity(CASES[name], stage, world_size=3)


def copies_after_fit(trainer: pl.Trainer, module: pl.LightningModule, case: Case) -> Any:
    trainer.fit(module, case.data())
    twin = copy.deepcopy(module.net)
    return [full_state(twin), twin(torch.ones(1, 7)).detach()]


AFTER_FIT = Case(Accessing, SIX_BATCHES, drive=copies_after_fit)


@pytest.mark.parametrize("stage", STAGES)
def test_the_trained_module_can_be_copied(stage: str) -> None:
    check_parity(AFTER_FIT, stage)
