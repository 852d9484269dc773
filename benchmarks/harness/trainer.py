"""The same training through Lightning's Trainer: zero1/2/3, DDP, FSDP2, no communication."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor
from torch.utils.data import DataLoader

from harness.job import Job
from harness.model import GPT, build_model, make_batches
from harness.monitor import Monitor
from harness.plain import ADAMW, shard_with_fsdp2

ZERO_BACKENDS = ("zero1", "zero2", "zero3")
LIGHTNING_BACKENDS = ("lightning_alone", "lightning_ddp", "lightning_fsdp2", *ZERO_BACKENDS)


class NoCommunication(DDPStrategy):
    """DDP that never wraps the module: every rank trains alone, in the same Trainer."""

    def configure_ddp(self) -> None:
        """Leave the module as it is."""


class Task(pl.LightningModule):
    """The GPT with its optimizer and data."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job
        self.gpt: GPT | None = None
        if job.backend != "lightning_fsdp2":  # which shards in `configure_model`
            self.gpt = build_model(job.size, job.seq)

    def configure_model(self) -> None:
        """Shard under FSDP2; nothing to do otherwise."""
        if self.gpt is None:
            self.gpt = build_model(self.job.size, self.job.seq).to(self.device)
            mesh = self.device_mesh
            assert mesh is not None
            shard_with_fsdp2(self.gpt, mesh["data_parallel"], self.job.precision)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The model returns its loss."""
        assert self.gpt is not None
        loss: Tensor = self.gpt(batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW as in the plain loops."""
        return torch.optim.AdamW(self.parameters(), **ADAMW)

    def train_dataloader(self) -> DataLoader[Any]:
        """This rank's batches, ready made."""
        job = self.job
        batches = make_batches(
            job.size, job.seq, job.micro_batch, self.global_rank, job.total_steps
        )
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def package_counters(strategy: Strategy) -> dict[str, int] | None:
    """What the strategy counted so far, for those that count."""
    engine = getattr(strategy, "engine", None)
    counters = getattr(getattr(engine, "collectives", None), "counters", None)
    if counters is None:
        return None
    names = ("all_gathers", "reduce_scatters", "all_reduces", "broadcasts", "sent_bytes")
    return {name: int(getattr(counters, name)) for name in names}


class Watch(pl.Callback):
    """Passes the Trainer's steps on to the monitor."""

    def __init__(self, job: Job, monitor: Monitor) -> None:
        self.job, self.monitor = job, monitor

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The strategy is set up from here on."""
        self.monitor.counters = lambda: package_counters(trainer.strategy)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """One batch is one step."""
        self.monitor.begin_step(batch_idx)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Record the loss; the last step closes the window."""
        self.monitor.add_loss(outputs["loss"])
        if batch_idx + 1 == self.job.total_steps:
            self.monitor.close()


def _strategy(backend: str, world_size: int) -> Strategy | str:
    if backend == "lightning_alone":
        return NoCommunication()
    if backend == "lightning_ddp":
        return "ddp"
    if backend == "lightning_fsdp2":
        return ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1)
    import lightning_zero  # noqa: F401  (registers the names)

    return backend


def _precision(job: Job) -> Any:
    if job.precision == "bf16" and job.backend != "lightning_fsdp2":
        return "bf16-mixed"
    return "32-true"


def run_lightning(job: Job, monitor: Monitor) -> None:
    """Train for `job.total_steps` through the Trainer."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    world_size, devices = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = pl.Trainer(
        accelerator="gpu" if job.device == "cuda" else "cpu",
        devices=devices,
        num_nodes=world_size // devices,
        strategy=_strategy(job.backend, world_size),
        precision=_precision(job),
        plugins=[TorchElasticEnvironment()],
        max_steps=job.total_steps,
        gradient_clip_val=job.clip_norm or None,
        callbacks=[Watch(job, monitor)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Task(job))
