"""Bytes of one rank by kind: what the layout forecasts, and what is really there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.engine.buffer import FlatBuffer
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.placement import Placement
from lightning_zero.engine.probe import state_bytes_per_element
from lightning_zero.engine.weights import ShardedWeights


class MemoryRow(NamedTuple):
    """Bytes of one kind of state on this rank."""

    kind: str
    forecast_bytes: int
    measured_bytes: int


def memory_report(
    engine: ZeroEngine | None, module: nn.Module, optimizers: Sequence[Optimizer]
) -> list[MemoryRow]:
    """The rows for a sharded module, or for a plain one (``engine`` None)."""
    return _plain_report(module, optimizers) if engine is None else _sharded_report(engine)


def _sharded_report(engine: ZeroEngine) -> list[MemoryRow]:
    trainable = [b for b in engine.buffers if any(h.param.requires_grad for h in b.handles)]
    shard_bytes = {b: b.nbytes // engine.collectives.world_size for b in engine.buffers}
    grad_bytes = {b: b.layout.shard_numel * b.master_dtype.itemsize for b in trainable}
    mastered = [b for b in engine.buffers if b.has_master]
    plain = [b for b in engine.buffers if not b.has_master]
    weights = engine.weights
    is_sharded = isinstance(weights, ShardedWeights)
    state = sum(
        (segment.stop - segment.start)
        * state_bytes_per_element(driver.inner, segment.buffer.shard.dtype)
        for driver in engine.drivers
        for segment in driver.segments
    )
    is_kept = engine.placements.grad is Placement.UNREDUCED
    kept = sum(b.layout.numel * b.master_dtype.itemsize for b in trainable) if is_kept else 0
    largest = max((b.nbytes for b in trainable), default=0)
    return [
        MemoryRow(
            "model weights",
            sum(shard_bytes[b] for b in plain)
            if is_sharded
            else sum(b.nbytes for b in engine.buffers),
            sum(_shard_bytes(b) for b in plain)
            if is_sharded
            else sum(_bytes(b.full) for b in engine.buffers),
        ),
        MemoryRow("gradients", sum(grad_bytes.values()), engine.grads.shard_bytes()),
        MemoryRow(
            "master weights",
            sum(b.layout.shard_numel * b.master_dtype.itemsize for b in mastered),
            sum(_shard_bytes(b) for b in mastered),
        ),
        MemoryRow("optimizer state", state, sum(driver.state_bytes() for driver in engine.drivers)),
        MemoryRow(
            "gather window",
            _window_forecast(weights) if isinstance(weights, ShardedWeights) else 0,
            weights.peak_bytes if isinstance(weights, ShardedWeights) else 0,
        ),
        MemoryRow("gradient buckets", max(kept, 3 * largest), engine.grads.peak_bytes),
    ]


def _shard_bytes(buffer: FlatBuffer) -> int:
    return buffer.shard.nbytes + (0 if buffer.model is None else buffer.model.nbytes)


def _window_forecast(weights: ShardedWeights) -> int:
    sizes = [unit.nbytes for unit in weights.units]
    neighbours = max((a + b for a, b in pairwise(sizes)), default=max(sizes, default=0))
    return max(neighbours, weights.window_bytes)


def _plain_report(module: nn.Module, optimizers: Sequence[Optimizer]) -> list[MemoryRow]:
    params = list(module.parameters())
    weights = sum(map(_bytes, params))
    grads = sum(_bytes(p) for p in params if p.requires_grad)
    stepped = [(o, p) for o in optimizers for group in o.param_groups for p in group["params"]]
    state = sum(p.numel() * state_bytes_per_element(o, p.dtype) for o, p in stepped)
    held = [v for o in optimizers for entries in o.state.values() for v in entries.values()]
    return [
        MemoryRow("model weights", weights, weights),
        MemoryRow("gradients", grads, sum(_bytes(p.grad) for p in params if p.grad is not None)),
        MemoryRow("master weights", 0, 0),
        MemoryRow("optimizer state", state, sum(_bytes(v) for v in held if isinstance(v, Tensor))),
        MemoryRow("gather window", 0, 0),
        MemoryRow("gradient buckets", 0, 0),
    ]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
