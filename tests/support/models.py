"""Small modules and fixed data from which training cases are put together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
SGD: OptimizerFactory = partial(torch.optim.SGD, lr=0.1)
ADAM: OptimizerFactory = partial(torch.optim.Adam, lr=1e-2)


def world_size() -> int:
    """Size of the world that the harness has started."""
    return int(os.environ["WORLD_SIZE"])


def rank() -> int:
    """Rank that the harness has given to this process."""
    return int(os.environ["RANK"])


def regression_loader(
    num_batches: int = 5,
    batch_size: int = 3,
    in_shape: tuple[int, ...] = (7,),
    out_shape: tuple[int, ...] = (5,),
    seed: int = 7,
) -> DataLoader[Any]:
    """Fixed (x, y) rows, `num_batches` for each rank; Lightning's sampler deals them out."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = num_batches * batch_size * world_size()
    x = torch.randn(num_rows, *in_shape, generator=generator)
    y = torch.randn(num_rows, *out_shape, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def token_loader(
    num_batches: int = 5, batch_size: int = 3, length: int = 4, vocabulary: int = 11, seed: int = 7
) -> DataLoader[Any]:
    """Fixed (tokens, tokens shifted by one) rows."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = num_batches * batch_size * world_size()
    tokens = torch.randint(vocabulary, (num_rows, length + 1), generator=generator)
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=batch_size)


def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers with a Tanh between them; odd sizes by default."""
    sizes = sizes or (7, 13, 5)
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Recording(pl.LightningModule):
    """A module that can keep what it saw: `note` goes into the record of the run."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: dict[str, list[Any]] = {}

    def note(self, name: str, value: Any) -> None:
        """Keep a value (tensors are copied) under a name, once per call."""
        if isinstance(value, Tensor):
            value = value.detach().clone()
        self.notes.setdefault(name, []).append(value)


class Regression(Recording):
    """Fits `net` to (x, y) batches by mean squared error; features override what they need."""

    def __init__(
        self,
        net: Callable[[], nn.Module] = mlp,
        optimizer: OptimizerFactory = ADAM,
        loss_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.net = net()
        self.make_optimizer = optimizer
        self.loss_scale = loss_scale

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x).float(), y.float()) * self.loss_scale

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


class Language(Regression):
    """Predicts the next token; `net` maps tokens to logits."""

    def loss(self, batch: Any) -> Tensor:
        tokens, targets = batch
        logits = self.net(tokens)
        return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())
