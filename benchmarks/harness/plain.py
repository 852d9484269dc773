"""Training loops without Lightning: DDP, DDP + ZeroRedundancyOptimizer, FSDP2, no communication.

Each loop is written as its documentation advises, with the options that make it fast.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.job import Job
from harness.model import GPT, build_model, make_batches
from harness.monitor import Monitor

ADAMW: dict[str, Any] = {"lr": 2e-4, "weight_decay": 0.01, "fused": True}

PLAIN_BACKENDS = ("alone", "ddp", "ddp_zero_optimizer", "fsdp2")


def shard_with_fsdp2(model: GPT, mesh: Any, precision: str) -> None:
    """`fully_shard` on every block and on the root."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = bf16 if precision == "bf16" else MixedPrecisionPolicy()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)


def _wrap(job: Job, model: GPT) -> nn.Module:
    if job.backend == "alone":
        return model
    if job.backend == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh

        shard_with_fsdp2(
            model, init_device_mesh(job.device, (dist.get_world_size(),)), job.precision
        )
        return model
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def _optimizer(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    if job.backend == "ddp_zero_optimizer":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **ADAMW
        )
    return torch.optim.AdamW(model.parameters(), **ADAMW)


def _autocast(job: Job) -> AbstractContextManager[Any]:
    """FSDP2 casts by its own policy; the others by autocast."""
    if job.precision == "bf16" and job.backend != "fsdp2":
        return torch.autocast(job.device, torch.bfloat16)
    return nullcontext()


def run_plain(job: Job, monitor: Monitor) -> None:
    """Train for `job.total_steps` in the usual loop."""
    device = torch.device(job.device, int(os.environ["LOCAL_RANK"]) if job.device == "cuda" else 0)
    if job.device == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if job.device == "cuda" else "gloo")
    model = _wrap(job, build_model(job.size, job.seq).to(device))
    optimizer = _optimizer(job, model)
    batches = make_batches(job.size, job.seq, job.micro_batch, dist.get_rank(), job.total_steps)
    for step, batch in enumerate(batches):
        monitor.begin_step(step)
        with _autocast(job):
            loss = model(batch.to(device))
        loss.backward()
        if job.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        monitor.add_loss(loss)
    monitor.close()
