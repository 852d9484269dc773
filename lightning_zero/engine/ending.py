"""How parameters leave an engine: with their full values, or without them.

After an error the ranks may have been anywhere: one in a forward, another in a backward. What a
rank has started and not finished is dropped then, and the weights are gathered from the shards,
which only a step changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lightning_zero.engine import guard
from lightning_zero.engine.buffer import FlatBuffer
from lightning_zero.engine.units import ZeroUnit
from lightning_zero.errors import ZeroError
from lightning_zero.pending import Pending

if TYPE_CHECKING:
    from lightning_zero.engine.engine import ZeroEngine


@dataclass
class Progress:
    """How far a run has come. Ranks with the same steps hold shards of the same weights."""

    steps: int = 0
    """Optimizer steps that have ended."""
    is_stepping: bool = False
    """One has begun and not ended."""
    backwards: int = 0
    """Backwards that have begun."""
    is_in_backward: bool = False
    """One has not ended."""


def recover(engine: ZeroEngine, *, keeps_gradients: bool) -> None:
    """Make shards and groups fit for use after an error. Collective, over groups without traffic.

    Args:
        engine: in whatever state the error has left it.
        keeps_gradients: no rank was in a backward, and all have had the same ones.
    """
    has_failed = False
    if keeps_gradients:
        try:
            engine.grads.settle()
        except ZeroError:
            has_failed = True
    label = "what is left of the gradients"
    (has_failed,) = engine.collectives.any_rank([has_failed], engine.device, label)
    if has_failed or not keeps_gradients:
        engine.grads.drop_all()
    if engine.offload is not None:
        engine.offload.runner.wait()
    if engine.access.serving is not None:
        engine.access.serving.is_open = False
    for unit in engine.units:
        _drop_gathers(unit)
    with torch.no_grad():
        engine.forget_backward()
        engine.weights.start_refresh(engine.buffers)
        engine.weights.finish_communication()


def _drop_gathers(unit: ZeroUnit) -> None:
    """Forget the gathers of a unit that have been started, and who was using it."""
    unit.num_holds = unit.pins = 0
    unit.is_in_graph = False
    if unit.is_gathering:
        for buffer in unit.buffers:
            buffer.pending = Pending()
        unit.is_gathering = False
        unit.versions = unit.current_versions()


def give_up(buffers: Sequence[FlatBuffer]) -> None:
    """Take buffers of an engine that could not be built off the module. Local.

    Parameters whose values are not all here become unusable, and say so.
    """
    for buffer in buffers:
        if buffer.layout.world_size == 1 and buffer.is_sharded:
            buffer.allocate()
            buffer.start_gather()
            buffer.pending.wait()
        with torch.no_grad():
            if buffer.layout.world_size == 1 or not (buffer.is_sharded or buffer.owns_shard):
                guard.release(list(buffer.handles))
                buffer.give_back()
            else:
                guard.abandon(list(buffer.handles))
                buffer.leave_placeholders()


def close_units(engine: ZeroEngine, *, gather: bool) -> None:
    """Give the parameters their full values, or leave those sharded whose values are not all here.

    Collective if ``gather``. If that fails, nobody may take placeholders for weights.
    """
    left = list(engine.units)
    try:
        _settle(engine, gather=gather)
        while left:
            _give_back(engine, left[0], gather=gather)
            left.pop(0)
    except BaseException:
        for unit in left:
            _give_back(engine, unit, gather=False)
        raise


def _settle(engine: ZeroEngine, *, gather: bool) -> None:
    """Let nothing be under way any more."""
    if not gather:
        if engine.offload is not None:
            engine.offload.runner.stop()
        return
    engine.meet(is_last=True)
    # a rank that leaves early would leave the others waiting for it
    engine.collectives.all_gather_object(None, "the end of the run")
    engine.end_backward()
    engine.grads.wait()
    engine.release_weights()
    engine.publish_delayed()
    engine.weights.finish_communication()
    if engine.offload is not None:
        engine.offload.runner.wait()


def _give_back(engine: ZeroEngine, unit: ZeroUnit, *, gather: bool) -> None:
    if gather:
        engine.weights.fetch(unit)
    is_here = not (engine.weights.has_storage_of_its_own or unit.is_gathering)
    if gather or (is_here and not unit.owns_shards):
        guard.release(unit.handles)
        with torch.no_grad():
            for buffer in unit.buffers:
                buffer.give_back()
    else:
        guard.abandon(unit.handles)
        for buffer in unit.buffers:
            buffer.leave_placeholders()
