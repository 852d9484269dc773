"""Which shards rest where, and what moving them costs.

[Note: where shards rest] Optimizer state and master weights rest on the device ``states``,
parameters of stage 3 on ``params``. What rests elsewhere is stepped in host memory. A shard that is
the parameter itself (no master of another dtype) and is in host memory anyway stays where
parameters rest: there is one copy of it. Gradients rest with the optimizer state, and leave the
device as they are reduced.

Sources: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", sections 4 and 5.2
(delayed update); Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale
Deep Learning", section 5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.engine.runner import StepRunner, WaitClock
from lightning_zero.engine.shard import HeldShard, RestingShard, Shard
from lightning_zero.offload.device import OffloadDevice
from lightning_zero.offload.host import HostMemory
from lightning_zero.offload.transfer import Transfers

if TYPE_CHECKING:
    from lightning_zero.engine.buffer import FlatBuffer


class Places(NamedTuple):
    """Where the shards of one flat buffer rest; None: in the memory of the model's device.

    Attributes:
        shard: what is stepped, or never changes.
        model: a separate shard of model weights, if ``has_model``.
        has_model: whether there is one, for gathers, besides what is stepped.
        grad: the reduced gradients.
    """

    shard: Any
    model: Any
    has_model: bool
    grad: Any


def choose_places(
    states: Any,
    params: Any,
    *,
    has_master: bool,
    is_trainable: bool,
    is_sharded: bool,
    is_on_host: bool,
    is_delayed: bool,
) -> Places:
    """See [Note: where shards rest].

    Args:
        states: the place of optimizer state, a device or its name.
        params: the place of stage 3's parameters.
        has_master: whether what is stepped has another dtype than the model weights.
        is_trainable: whether it is stepped at all.
        is_sharded: whether the model weights are.
        is_on_host: whether the model is computed on the CPU.
        is_delayed: whether weights are used while they are stepped.
    """
    params = params if is_sharded else None
    if has_master:
        shard = states or params
    elif is_trainable and states is not None and is_delayed:
        shard = states
    elif is_trainable and states is not None and not is_on_host:
        shard = params or states
    else:
        shard = params
    is_apart = has_master or shard is not params or (is_delayed and is_trainable)
    has_model = is_sharded and shard is not None and is_apart
    return Places(shard, params, has_model, states if is_trainable else None)


class OffloadCounts(NamedTuple):
    """What offloading has cost so far; differences of two of these belong to a step.

    Attributes:
        moved_bytes: to and from the device that computes the model, and to and from files.
        busy_seconds: of stepping, reading and writing, added up.
        exposed_seconds: that the training loop has waited for them.
    """

    moved_bytes: float = 0
    busy_seconds: float = 0.0
    exposed_seconds: float = 0.0

    @property
    def overlap(self) -> float:
        """The part of the work that was hidden behind something else."""
        if not self.busy_seconds:
            return 1.0
        return max(0.0, 1.0 - self.exposed_seconds / self.busy_seconds)

    def __sub__(self, other: OffloadCounts) -> OffloadCounts:
        """What has been added since ``other``."""
        return OffloadCounts(*(a - b for a, b in zip(self, other, strict=True)))


class Offload:
    """The devices of a run, and the thread that steps what rests there.

    Args:
        states: where optimizer state, master weights and gradients rest; None: on the device.
        params: where the parameters of stage 3 rest.
        transfers: copies between the device and the host.
        max_unit_bytes: units should not be larger.
        delay_after: after how many steps of an optimizer its updates arrive one step late; None:
            never.
        on_close: called when everything has been given back.
    """

    def __init__(
        self,
        states: OffloadDevice | None,
        params: OffloadDevice | None,
        transfers: Transfers,
        *,
        max_unit_bytes: int,
        delay_after: int | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._on_close = on_close
        self.max_unit_bytes = max_unit_bytes
        self.states, self.params, self.transfers = states, params, transfers
        self.delay_after = delay_after
        self.waits = WaitClock()
        self.runner = StepRunner(self.waits, transfers.device)

    @property
    def is_delayed(self) -> bool:
        """Whether updates may arrive one step late, and weights are used while they are stepped."""
        return self.delay_after is not None

    @property
    def devices(self) -> list[OffloadDevice]:
        """The devices, each once."""
        return list(dict.fromkeys(d for d in (self.states, self.params) if d is not None))

    @property
    def scales_in_place(self) -> bool:
        """Whether gradients are clipped where they rest; else in each copy that a step loads."""
        return self.states is None or isinstance(self.states, HostMemory)

    def places(self, buffer: FlatBuffer, *, is_sharded: bool) -> Places:
        """See [Note: where shards rest]."""
        return choose_places(
            self.states,
            self.params,
            has_master=buffer.has_master,
            is_trainable=any(handle.param.requires_grad for handle in buffer.handles),
            is_sharded=is_sharded,
            is_on_host=self.transfers.is_on_host,
            is_delayed=self.is_delayed,
        )

    def rest(
        self, tensor: Tensor, device: OffloadDevice | None, label: str, *, pinned: bool
    ) -> Shard:
        """A shard with the content of ``tensor``; of its own memory unless ``device`` is None."""
        if device is None:
            return HeldShard(tensor)
        shard = self.empty(tensor.numel(), tensor.dtype, device, label, pinned=pinned)
        with shard.fill() as content:
            content.copy_(tensor)
        return shard

    def empty(
        self,
        numel: int,
        dtype: torch.dtype,
        device: OffloadDevice,
        label: str,
        *,
        pinned: bool = False,
    ) -> RestingShard:
        """A shard on an offload device, to be filled; ``pinned``: the model's device copies from or
        to it directly.
        """
        if isinstance(device, HostMemory):
            return RestingShard(device.make_slab(numel, dtype, label, pinned=pinned), self.waits)
        return RestingShard(device.make_slab(numel, dtype, label), self.waits)

    def counts(self) -> OffloadCounts:
        """What offloading has cost so far."""
        devices = [device.counters for device in self.devices]
        moved = self.transfers.uploaded_bytes + self.transfers.downloaded_bytes
        io_seconds = sum(c.read_seconds + c.written_seconds for c in devices)
        return OffloadCounts(
            moved + sum(c.read_bytes + c.written_bytes for c in devices),
            self.runner.busy_seconds + io_seconds,
            self.waits.seconds,
        )

    def close(self) -> None:
        """Stop everything and give the memory and files back."""
        self.runner.stop()
        self.transfers.close()
        for device in self.devices:
            device.close()
        if self._on_close is not None:
            self._on_close()
