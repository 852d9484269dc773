"""Counts bytes that are really there, without asking the package."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from tests.support import models
from tests.support.runs import make_trainer


def live_bytes() -> int:
    """Bytes of all storages that any tensor of this process refers to."""
    gc.collect()
    sizes = {}
    for candidate in gc.get_objects():
        # type() rather than isinstance(): a proxy must not be woken
        if not issubclass(type(candidate), Tensor) or candidate.layout is not torch.strided:
            continue
        if candidate.device.type != "meta":  # which has no memory
            with torch._C.DisableTorchFunctionSubclass():
                storage = candidate.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


class Blocks(pl.LightningModule):
    """Twelve equal layers between an embedding-sized first and last one; records what it uses."""

    def __init__(self, width: int = 64, layers: int = 12, num_tiny: int = 0) -> None:
        super().__init__()
        self.first = nn.Linear(7, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.tiny = nn.ParameterList(nn.Parameter(torch.ones(3)) for _ in range(num_tiny))
        self.last = nn.Linear(width, 5)
        self.at_rest: list[int] = []
        self.in_forward: list[int] = []

    @property
    def num_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
            self.in_forward.append(gathered_bytes(self))
        scale = torch.stack([p.sum() for p in self.tiny]).mean() if len(self.tiny) else 1.0
        return ((self.last(x) * scale - y) ** 2).mean()

    def on_train_batch_end(self, *_: Any) -> None:
        self.at_rest.append(live_bytes())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def gathered_bytes(module: pl.LightningModule) -> int:
    """Bytes of full weights that this rank holds at the moment."""
    engine = module.trainer.strategy.engine  # type: ignore[attr-defined]
    return sum(buffer.full.untyped_storage().nbytes() for buffer in engine.buffers)


def train(
    strategy: Callable[[], Strategy], module: Blocks, on_end: Callable[[pl.Trainer], None]
) -> None:
    """Train a module and look at the trainer while the run is still set up."""

    class Look(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            on_end(trainer)

    make_trainer(strategy, callbacks=[Look()]).fit(module, models.regression_loader())
