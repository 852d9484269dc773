"""Moves what only a step needs out of the device's memory, for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor

from lightning_zero.engine.buffer import FlatBuffer
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.offload import Offload
from lightning_zero.engine.optimizer import OptimizerDriver
from lightning_zero.engine.resting_state import RestingState
from lightning_zero.engine.shard import HeldShard
from lightning_zero.offload.device import OffloadDevice


@contextlib.contextmanager
def parked_states(engine: ZeroEngine, offload: Offload) -> Iterator[None]:
    """Inside, optimizer state rests where ``offload`` has it, and so do master weights that no
    gather reads.

    Saving and loading work inside; steps do not. Every rank.
    """
    assert offload.states is not None
    for driver in engine.drivers:
        _park_state(driver, offload.states)
    masters = [b for b in engine.buffers if b.has_master and not b.is_sharded]
    for buffer in masters:
        with buffer.shard.use() as master:
            label = f"the master weights of {buffer.name}"
            shard = offload.rest(master, offload.states, label, pinned=False)
        buffer.replace_shard(shard)
    try:
        yield
    finally:
        for buffer in masters:
            _bring_back_master(engine, buffer)
        for driver in engine.drivers:
            driver.bring_back_state()


def _park_state(driver: OptimizerDriver, device: OffloadDevice) -> None:
    driver.resting_state = RestingState(driver.inner.state, device)
    for buffer in driver.buffers:
        driver.resting_state.store(buffer, driver.segments_of(buffer))


def _bring_back_master(engine: ZeroEngine, buffer: FlatBuffer) -> None:
    with buffer.shard.use() as content:
        master: Tensor = content.to(buffer.device, copy=True)
    buffer.replace_shard(HeldShard(master))
    for driver in engine.drivers:
        for segment in driver.segments_of(buffer):
            segment.param.data = master[segment.start : segment.stop]
