"""Gradients that no step has used yet, on their way into a checkpoint and out of it.

A checkpoint may be taken in the middle of an accumulation window. Reduced gradients are saved as
shards; what stage 1 has added up before its reduction is saved by each rank for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zero.engine.bucket import GradBucket
from lightning_zero.engine.buffer import ParamHandle
from lightning_zero.engine.grads import GradReducer
from lightning_zero.engine.shard import Shard


@dataclass(frozen=True)
class GradShard:
    """Stands for a reduced gradient, of which every rank has a part."""

    handle: ParamHandle
    bucket: GradBucket

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements."""
        return self.bucket.dtype

    @property
    def shard(self) -> Shard:
        """The gradients of the whole buffer, of which this rank has a part."""
        return self.bucket.shard_or_new()


def pending_shards(grads: GradReducer) -> dict[str, GradShard]:
    """Reduced gradients that no step has used, by the name of their parameter; the same on all
    ranks.
    """
    grads.settle()
    return {
        handle.fqn: GradShard(handle, bucket)
        for bucket in grads.buckets.values()
        for handle in bucket.buffer.handles
        if handle in grads.pending and bucket.has_grad[handle.index]
    }


def pending_unreduced(grads: GradReducer) -> dict[str, Tensor]:
    """What this rank has added up and not sent, divided by the number of ranks, by name."""
    grads.settle()
    return {
        handle.fqn: bucket.unreduced_view(handle)
        for bucket in grads.buckets.values()
        for handle in bucket.buffer.handles
        if bucket.is_written[handle.index]
    }


def restore_gradients(
    grads: GradReducer,
    handles: Sequence[ParamHandle],
    shards: Mapping[str, Tensor],
    unreduced: Sequence[Mapping[str, Tensor]],
    rank: int,
) -> None:
    """Go on with saved gradients. Local; every rank passes the same.

    Args:
        grads: the reducer, without gradients.
        handles: all parameters.
        shards: reduced gradients.
        unreduced: by rank of the saving run, what :func:`pending_unreduced` gave there. If as many
            ranks go on, each takes its own; else their sum counts as reduced.
        rank: this rank.
    """
    is_own = grads.keeps_unreduced and len(unreduced) == grads.world_size
    for handle in handles:
        bucket = grads.buckets[handle.buffer]
        parts = [shards[handle.fqn]] if handle.fqn in shards else []
        local = [] if is_own else [part for part in unreduced if handle.fqn in part]
        parts += [part[handle.fqn] for part in local]
        for part in parts:
            _add_to_shard(bucket, handle, part)
        if parts:
            grads.pending.add(handle)
        if is_own and handle.fqn in unreduced[rank]:
            bucket.add(handle, unreduced[rank][handle.fqn].detach(), 1.0, bucket.dtype)
            grads.pending.add(handle)
    if is_own and any(unreduced):
        grads.expect_sums()


def _add_to_shard(bucket: GradBucket, handle: ParamHandle, value: Tensor) -> None:
    buffer, where = handle.buffer, handle.buffer.own_range(handle)
    shard = bucket.shard_or_new()  # zeros at first
    bucket.has_grad[handle.index] = True
    if len(where):
        mine = buffer.flatten(handle, value.detach())[where.start : where.stop]
        with shard.use(write=True) as content:
            buffer.own_piece(handle, content).add_(mine.to(content.device))
