"""A model that was never in memory as a whole, and two ways to train it on the same data."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import OffloadCallback, ZeroStrategy

LAYERS_PER_BLOCK = 3
BATCH = 2
LR = 2e-5


def write_tensor(path: Path, values: Tensor) -> None:
    """Write a file, and let the system forget what it has cached of it."""
    with path.open("wb") as file:
        file.write(memoryview(values.numpy()).cast("B"))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def mapped(path: Path, values: Tensor) -> Tensor:
    """A tensor of these values that is a file, which is gone with the tensor."""
    write_tensor(path, values)
    tensor = torch.from_file(str(path), shared=True, size=values.numel(), dtype=values.dtype)
    path.unlink()
    return tensor.view(values.shape)


class Block(nn.Module):
    """Some square linear layers, each added to its input, which is gathered as one unit."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + F.linear(F.layer_norm(x, x.shape[-1:]), weight)
        return x


class Tower(pl.LightningModule):
    """Blocks whose weights are files."""

    def __init__(self, folder: Path, width: int, count: int, steps: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)

        def weight(number: int) -> Tensor:
            values = torch.randn(width, width, generator=generator).mul_(0.1 / width**0.5)
            return mapped(folder / f"weight{number}", values)

        self.blocks = nn.Sequential(
            *(
                Block([weight(first + i) for i in range(LAYERS_PER_BLOCK)])
                for first in range(0, count, LAYERS_PER_BLOCK)
            )
        )
        self.data = torch.randn(steps * BATCH, width, generator=generator)
        self.losses: list[float] = []

    def forward(self, batch: Tensor) -> Tensor:
        """The loss, which falls as the outputs go to zero."""
        loss: Tensor = self.blocks(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self(batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LR, fused=True)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(list(self.data), batch_size=BATCH)


def trainer_losses(
    model: Tower, steps: int, states: Path | None, staging_bytes: int
) -> dict[str, Any]:
    """Train through the Trainer; weights, gradients and Adam's state rest in files in ``states``,
    or, if that is None, in memory.
    """
    offload = []
    if states is not None:
        offload = [OffloadCallback("nvme", "nvme", nvme_path=states, staging_bytes=staging_bytes)]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=ZeroStrategy(stage=3, gather_after_fit=False),
        max_steps=steps,
        callbacks=[*offload, *([Resting()] if states is not None else [])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,  # it would shuffle
    )
    trainer.fit(model)
    resting = [c.nbytes for c in trainer.callbacks if isinstance(c, Resting)]
    return {"losses": model.losses, "disk_bytes": sum(resting)}


class Resting(pl.Callback):
    """Notes how much rests on disk in the end."""

    nbytes = 0

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """After the last step."""
        assert isinstance(trainer.strategy, ZeroStrategy)
        assert trainer.strategy.engine is not None
        offload = trainer.strategy.engine.offload
        assert offload is not None
        offload.runner.wait()
        self.nbytes = sum(device.resting_bytes for device in offload.devices)


def plain_losses(model: Tower, steps: int, states: Path | None) -> list[float]:
    """The losses of plain PyTorch, which steps every parameter as soon as it has its gradient.

    Adam's state is in files in ``states``, or, if that is None, in memory.
    """
    optimizers = {p: torch.optim.AdamW([p], lr=LR, fused=True) for p in model.parameters()}
    for number, (param, optimizer) in enumerate(optimizers.items()):
        if states is not None:
            zeros = torch.zeros_like(param)
            optimizer.state[param] = {
                "step": torch.zeros(()),
                **{
                    key: mapped(states / f"{key}{number}", zeros)
                    for key in ("exp_avg", "exp_avg_sq")
                },
            }

        def step(param: nn.Parameter) -> None:
            optimizers[param].step()
            param.grad = None

        param.register_post_accumulate_grad_hook(step)
    for batch in model.train_dataloader():
        model(batch).backward()
    gc.collect()
    return model.losses
