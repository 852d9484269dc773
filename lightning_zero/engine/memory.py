"""Bytes of one rank by kind: what the layout forecasts, and what is really there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.engine.buffer import FlatBuffer
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.placement import Placement
from lightning_zero.engine.probe import state_bytes_per_element
from lightning_zero.engine.weights import ShardedWeights
from lightning_zero.offload.host import HostMemory


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
    forecast = _forecast(engine)
    weights, offload = engine.weights, engine.offload
    is_sharded = isinstance(weights, ShardedWeights)
    states = None if offload is None else offload.states
    state_bytes = sum(driver.state_bytes() for driver in engine.drivers)
    apart = [b for b in engine.buffers if is_sharded or b.owns_shard]
    measured = {
        "model weights": sum(b.shard.nbytes for b in apart if not b.has_master)
        + sum(0 if b.model is None else b.model.nbytes for b in engine.buffers)
        + (0 if is_sharded else sum(_bytes(b.full) for b in engine.buffers)),
        "gradients": engine.grads.shard_bytes(),
        "master weights": sum(b.shard.nbytes for b in apart if b.has_master),
        "optimizer state": 0 if states is not None else state_bytes,
    }
    rows = [MemoryRow(kind, forecast[kind, None], count) for kind, count in measured.items()]
    window = weights if isinstance(weights, ShardedWeights) else None
    trainable = _trainable(engine)
    is_kept = engine.placements.grad is Placement.UNREDUCED
    kept = sum(b.layout.numel * b.master_dtype.itemsize for b in trainable) if is_kept else 0
    rows += [
        MemoryRow(
            "gather window",
            0 if window is None else _window_forecast(window),
            0 if window is None else window.peak_bytes,
        ),
        MemoryRow(
            "gradient buckets",
            max(kept, 3 * max((b.nbytes for b in trainable), default=0)),
            engine.grads.peak_bytes,
        ),
    ]
    for device in [] if offload is None else offload.devices:
        resting = sum(count for (_, place), count in forecast.items() if place is device)
        # state that the optimizer can address it keeps by itself
        own = state_bytes if device is states and isinstance(device, HostMemory) else 0
        rows.append(MemoryRow(f"resting on {device.name}", resting, device.resting_bytes + own))
    return rows


def _trainable(engine: ZeroEngine) -> list[FlatBuffer]:
    return [b for b in engine.buffers if any(h.param.requires_grad for h in b.handles)]


def _forecast(engine: ZeroEngine) -> Counter[tuple[str, Any]]:
    """Bytes by kind and place; None is the memory of the model's device."""
    offload = engine.offload
    found: Counter[tuple[str, Any]] = Counter()
    for buffer in engine.buffers:
        numel, places = buffer.layout.shard_numel, buffer.places
        if buffer.owns_shard:
            kind = "master weights" if buffer.has_master else "model weights"
            found[kind, places.shard] += numel * buffer.shard.dtype.itemsize
        if buffer.model is not None:
            found["model weights", places.model] += numel * buffer.dtype.itemsize
        if not buffer.is_sharded:
            found["model weights", None] += buffer.nbytes
    copies = 2 if offload is not None and offload.is_delayed else 1
    for buffer in _trainable(engine):
        nbytes = buffer.layout.shard_numel * buffer.master_dtype.itemsize
        found["gradients", buffer.places.grad] += copies * nbytes
    for driver in engine.drivers:
        for segment in driver.segments:
            per_element = state_bytes_per_element(
                driver.inner, segment.buffer.shard.dtype, segment.group
            )
            place = None if offload is None else offload.states
            found["optimizer state", place] += (segment.stop - segment.start) * per_element
    return found


def _window_forecast(weights: ShardedWeights) -> int:
    sizes = [unit.nbytes for unit in weights.units]
    neighbours = max((a + b for a, b in pairwise(sizes)), default=max(sizes, default=0))
    return max(neighbours, weights.window_bytes)


def _plain_report(module: nn.Module, optimizers: Sequence[Optimizer]) -> list[MemoryRow]:
    params = list(module.parameters())
    weights = sum(map(_bytes, params))
    grads = sum(_bytes(p) for p in params if p.requires_grad)
    stepped = [
        (o, p, i)
        for o in optimizers
        for i, group in enumerate(o.param_groups)
        for p in group["params"]
    ]
    state = sum(p.numel() * state_bytes_per_element(o, p.dtype, i) for o, p, i in stepped)
    held = [
        v
        for o in optimizers
        for entries in o.state.values()
        for v in (entries.values() if isinstance(entries, dict) else (entries,))
    ]
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
