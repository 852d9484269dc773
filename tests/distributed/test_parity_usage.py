"""Habits of real training code that get between a module and whoever shards it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.distributed.test_parity_parameters import Block, Blocks
from tests.support.models import SGD, Recording, Regression, mlp, regression_loader
from tests.support.runs import STAGES, Case, check_parity

SIX_BATCHES = partial(regression_loader, 6)


class CallsForwardDirectly(Regression):
    """Bypasses `__call__`, and with it every hook, of blocks and of layers."""

    def __init__(self) -> None:
        super().__init__(Blocks)

    def loss(self, batch: Any) -> Tensor:
        x = batch[0]
        first, second, third = self.net.blocks
        x = first.forward(x)
        x = x + second.down.forward(torch.tanh(second.up.forward(x)))
        return F.mse_loss(self.net.head.forward(third(x)), batch[1])


class LazyOutput(nn.Module):
    """Returns a generator and a function, which use the weights long after the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor) -> tuple[Iterator[Tensor], Any]:
        return self._each(x), lambda value: value * self.scale

    def _each(self, x: Tensor) -> Iterator[Tensor]:
        for layer in self.layers:
            x = torch.tanh(F.linear(x, layer.weight) + layer.bias)
            yield x


class UsesLazyOutput(Regression):
    def __init__(self) -> None:
        super().__init__(LazyOutput)
        self.out = nn.Linear(7, 5)

    def loss(self, batch: Any) -> Tensor:
        outputs, scale = self.net(batch[0])
        return F.mse_loss(self.out(scale(sum(outputs))), batch[1])


class KeepsReferences(Regression):
    """Holds on to parameters, and to views of them, from before the run."""

    def __init__(self) -> None:
        super().__init__(Blocks)
        self.held = [self.net.blocks[1].up.weight, self.net.head.bias]

    def on_fit_start(self) -> None:
        self.late = list(self.net.blocks[0].parameters())

    def loss(self, batch: Any) -> Tensor:
        penalty = sum(p.pow(2).sum() for p in [*self.held, *self.late])
        return super().loss(batch) + 0.01 * penalty

    def on_train_end(self) -> None:
        mine = {id(p) for p in self.parameters()}
        self.note("same_objects", all(id(p) in mine for p in [*self.held, *self.late]))


class Casts(Regression):
    """Autocast of its own within the step: casts of weights are cached until the context ends."""

    def __init__(self) -> None:
        super().__init__(Blocks, SGD)

    def loss(self, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.net(batch[0]) + self.net(batch[0] * 0.5)
        return F.mse_loss(hidden.float(), batch[1])


class Child(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(7, 13, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def compute(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])


class HasAChild(Recording):
    """A LightningModule within a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Child()
        self.other = nn.ModuleDict({"a": Child(), "b": Block()})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.other["b"](batch[0])
        return self.child.compute((x, batch[1])) + self.other["a"].compute(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class OwnParameter(nn.Parameter):
    """A parameter class of the user's, with an attribute that the optimizer's groups go by."""

    decays = True


class HasOwnParameters(Regression):
    def __init__(self) -> None:
        super().__init__(Blocks)
        for block in self.net.blocks:
            block.up.weight = OwnParameter(block.up.weight.detach().clone())
            block.down.weight.decays = True  # type: ignore[assignment]

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if getattr(p, "decays", False)]
        others = [p for p in self.parameters() if not getattr(p, "decays", False)]
        self.note("counts", (len(decayed), len(others)))
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0}]
        return torch.optim.AdamW(groups, lr=1e-2)

    def on_train_batch_end(self, *_: Any) -> None:
        self.note("decayed", sum(getattr(p, "decays", False) for p in self.parameters()))
        self.note("own", sum(isinstance(p, OwnParameter) for p in self.parameters()))


class Pruned(Regression):
    """Pruned from the start: the weight is computed in a hook from a parameter and a mask."""

    def __init__(self) -> None:
        super().__init__(Blocks)
        for block in self.net.blocks:
            prune.random_unstructured(block.up, "weight", 0.3)


class PrunesMidway(Regression):
    """Pruning in the middle of the run renames a parameter, and adds a buffer and a hook."""

    def __init__(self) -> None:
        super().__init__(Blocks)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (1, 3):
            prune.l1_unstructured(self.net.blocks[batch_idx // 2].up, "weight", 0.25)


class ReplacesAModule(Regression):
    """The head is taken out of the module for a while; its parameters stay in the optimizer."""

    def __init__(self) -> None:
        super().__init__(Blocks)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.kept, self.net.head = self.net.head, nn.Identity()
        if batch_idx == 4:
            self.net.head = self.kept

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.net(batch[0])[:, :5], batch[1])


class NotesLayout(Regression):
    """The memory format of a weight is part of what a module relies on."""

    def __init__(self) -> None:
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))
        super().__init__(lambda: net.to(memory_format=torch.channels_last))

    def loss(self, batch: Any) -> Tensor:
        weight = self.net[0].weight
        self.note("strides", weight.stride())
        self.note("channels_last", weight.is_contiguous(memory_format=torch.channels_last))
        return super().loss(batch)


class ManyForwards(Regression):
    """Learns from its own outputs: forwards of several kinds, before and after one another."""

    def __init__(self) -> None:
        super().__init__(partial(mlp, 7, 13, 7))
        self.out = nn.Linear(7, 5)

    def loss(self, batch: Any) -> Tensor:
        x = batch[0]
        with torch.no_grad():
            for _ in range(3):
                x = self.net(x)
        self.eval()
        target = self.out(self.net(x)).detach()
        self.train()
        outputs = [self.out(self.net(part)) for part in x.split(1)]
        return F.mse_loss(torch.cat(outputs), batch[1]) + F.mse_loss(outputs[0], target[:1])


class Positions(nn.Module):
    """Returns a view of its parameter, as positional embeddings do."""

    def __init__(self, length: int = 11) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(length, 7))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.table[: len(x)], self.scale.expand(len(x), 7)


class KeepsAView(nn.Linear):
    """Leaves a view of its weight on itself for others to use."""

    def forward(self, x: Tensor) -> Tensor:
        self.transposed = self.weight.t()
        self.detached = self.weight.detach()
        return super().forward(x)


class UsesReturnedViews(nn.Module):
    """Other layers run before what was returned is used."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.out = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        rows, scale = self.positions(x)
        for block in self.blocks:
            x = block(x)
        return self.out((x + rows) * scale)


class UsesKeptViews(nn.Module):
    """Other layers run before what was left on a layer is used."""

    def __init__(self) -> None:
        super().__init__()
        self.viewed = KeepsAView(7, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.out = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.viewed(x)
        for block in self.blocks:
            x = block(x)
        x = x @ self.viewed.transposed + (x @ self.viewed.detached).tanh()
        return self.out(x)


class ViewsLeaveTheSteps(Regression):
    """Views of weights outlive the steps, and the run."""

    def __init__(self) -> None:
        super().__init__(UsesReturnedViews)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.held = self.net.positions(batch[0])
        return super().validation_step(batch, batch_idx)

    def on_validation_end(self) -> None:
        self.note("held", self.held[0])

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        first = self.net.positions(batch[0])
        self.net(batch[0])
        return [*first, self.net.out.weight, self.net.out.bias[:2]]


def predicts_views(trainer: pl.Trainer, module: pl.LightningModule, case: Case) -> Any:
    trainer.fit(module, case.data(), regression_loader(2))
    predictions = trainer.predict(module, regression_loader(2))
    return torch.utils._pytree.tree_map(torch.clone, predictions)


IMAGES = partial(regression_loader, 5, 3, (3, 6, 6))
CASES = {
    "forward_called_directly": Case(CallsForwardDirectly, SIX_BATCHES),
    "lazy_output": Case(UsesLazyOutput, SIX_BATCHES),
    "references_held": Case(KeepsReferences, SIX_BATCHES),
    "own_autocast": Case(Casts, SIX_BATCHES),
    "nested_lightning_modules": Case(HasAChild, SIX_BATCHES),
    "own_parameter_class": Case(HasOwnParameters, SIX_BATCHES),
    "pruned": Case(Pruned, SIX_BATCHES),
    "prunes_midway": Case(PrunesMidway, SIX_BATCHES),
    "replaces_a_module": Case(
        ReplacesAModule, SIX_BATCHES, reference="ddp_find_unused_parameters_true"
    ),
    "memory_format": Case(NotesLayout, IMAGES),
    "many_forwards": Case(ManyForwards, SIX_BATCHES),
    "views_returned": Case(partial(Regression, UsesReturnedViews), SIX_BATCHES),
    "views_kept": Case(partial(Regression, UsesKeptViews), SIX_BATCHES),
    "views_leave_the_steps": Case(ViewsLeaveTheSteps, SIX_BATCHES, drive=predicts_views),
    "float64": Case(partial(Regression, Blocks), SIX_BATCHES, trainer={"precision": "64-true"}),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CASES)
def test_unusual_use_gives_ddps_numbers(name: str, stage: str) -> None:
    check_parity(CASES[name], stage)
