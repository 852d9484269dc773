"""Norm and clipping of sharded gradients: one pass over this rank's shards and one small all-
reduce.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm.collectives import Collectives


def total_norm(regions: list[Tensor], collectives: Collectives, device: torch.device) -> Tensor:
    """The 2-norm of the gradients of which every rank holds ``regions``, as fp32 scalar (fp64 if
    any of them is). Not finite if any of them is not.

    Collective.
    """
    dtype = max(
        (
            torch.promote_types(r.dtype if not r.is_complex() else r.real.dtype, torch.float32)
            for r in regions
        ),
        key=lambda dtype: dtype.itemsize,
        default=torch.float32,
    )
    squares = [
        torch.linalg.vector_norm(r, dtype=torch.promote_types(r.dtype, torch.float32)).to(
            device, torch.float64
        )
        ** 2
        for r in regions
    ]
    total = (
        torch.stack(squares).sum()
        if squares
        else torch.zeros((), dtype=torch.float64, device=device)
    )
    collectives.start_all_reduce(total, dist.ReduceOp.SUM, "the gradient norm").wait()
    return total.sqrt().to(dtype)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients are multiplied with so that their norm is at most ``max_norm`` (as
    ``clip_grad_norm_`` does).
    """
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def clip_by_value(regions: list[Tensor], limit: float) -> None:
    """Clamp gradients to ``-limit .. limit`` in place."""
    for region in regions:
        region.clamp_(-limit, limit)
