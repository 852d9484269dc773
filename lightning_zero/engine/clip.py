"""Norm and clipping of sharded gradients: one pass over this rank's shards and one small all-
reduce.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm.collectives import Collectives


def total_norm(
    squares: list[Tensor], is_double: bool, collectives: Collectives, device: torch.device
) -> Tensor:
    """The 2-norm of gradients of which every rank has the ``squares`` of its pieces, as fp32 scalar
    (fp64 if ``is_double``). Not finite if any of them is not.

    Collective.
    """
    dtype = torch.float64 if is_double else torch.float32
    total = (
        torch.stack([square.to(device) for square in squares]).sum()
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


def clip_by_value(regions: Iterable[Tensor], limit: float) -> None:
    """Clamp gradients to ``-limit .. limit`` in place."""
    for region in regions:
        region.clamp_(-limit, limit)
