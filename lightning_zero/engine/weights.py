"""When the full weights are there: the two placements of model weights behind one interface.

Callers ``enter`` and ``leave`` a unit around every module call that uses it, and ``need`` it in
backward. Replicated weights are always there, but after a step a unit has to wait for the other
ranks' updates. Sharded weights are gathered ahead of their use and freed after it, within a byte
window.
"""

from __future__ import annotations

import abc
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from statistics import median

from torch import Tensor

from lightning_zero.engine.buffer import FlatBuffer, ParamHandle
from lightning_zero.engine.schedule import Schedule
from lightning_zero.engine.units import UnitPhase, ZeroUnit


class Weights(abc.ABC):
    """The model weights of all units."""

    has_storage_of_its_own: bool
    """Whether a full value handed out is a copy (sharded) or the parameter's own memory
    (replicated).
    """

    by_storage: dict[int, tuple[ZeroUnit, FlatBuffer]]
    """What is gathered and will be freed, by the address of its memory."""

    def __init__(self, units: Sequence[ZeroUnit]) -> None:
        self.units = units
        self.by_storage = {}
        self._unit_of = {handle: unit for unit in units for handle in unit.handles}

    @abc.abstractmethod
    def need(self, unit: ZeroUnit, phase: UnitPhase) -> None:
        """Make the full weights of a unit available. Collective if they are sharded."""

    @abc.abstractmethod
    def done(self, unit: ZeroUnit) -> None:
        """The backward of a unit has passed."""

    @abc.abstractmethod
    def release_all(self) -> None:
        """End of a backward, a step or an evaluation step: nothing stays gathered, every parameter
        is guarded.
        """

    @abc.abstractmethod
    def fetch(self, unit: ZeroUnit) -> None:
        """Fill the flat buffers of a resting unit for good, when the run ends.

        Collective if they are sharded.
        """

    @abc.abstractmethod
    def start_refresh(self, buffers: Iterable[FlatBuffer]) -> None:
        """The shards of these buffers have been updated by a step."""

    def is_in_place(self, handle: ParamHandle) -> bool:
        """Whether reading a parameter gives its own memory, without communication."""
        return not (self.has_storage_of_its_own or handle.buffer.owns_shard)

    @abc.abstractmethod
    def read(self, handle: ParamHandle, *, is_rounded: bool) -> Tensor:
        """The full value of a parameter, as master weight or rounded: in place, or a copy.

        Collective for copies, except rounded ones of replicated weights.
        """

    @abc.abstractmethod
    def write(self, handle: ParamHandle, value: Tensor) -> None:
        """Set a parameter from its full value, which has to be the same on all ranks."""

    def adopt(self, handle: ParamHandle) -> None:
        """Keep what all ranks have written to the plain parameter of a gathered unit."""
        handle.buffer.write_own_slice(handle, handle.adopt_data())

    def write_back(self, unit: ZeroUnit) -> None:
        """Put what a module has changed in its own weights into the shards: it clamped them."""
        for handle in unit.handles:
            handle.buffer.write_own_slice(handle, handle.view)

    def enter(self, unit: ZeroUnit, phase: UnitPhase) -> None:
        """A module call that uses the unit begins."""
        self.need(unit, phase)
        unit.pins += 1
        if unit.pins == 1:
            unit.expose()

    def leave(self, unit: ZeroUnit) -> None:
        """A module call that used the unit has ended, perhaps with an exception."""
        unit.pins = max(0, unit.pins - 1)
        if not unit.pins:
            unit.guard()

    def finish_communication(self) -> None:
        """Wait for everything in flight, so that shards may be written."""
        for unit in self.units:
            unit.wait()


class ReplicatedWeights(Weights):
    """Every rank holds all weights; a step updates this rank's shard and the others' arrive unit by
    unit.
    """

    has_storage_of_its_own = False

    def enter(self, unit: ZeroUnit, phase: UnitPhase) -> None:
        """See the base class."""
        super().enter(unit, phase)
        if unit.pins == 1 and unit.owns_shards:
            unit.versions = unit.current_versions()

    def leave(self, unit: ZeroUnit) -> None:
        """See the base class."""
        if unit.pins == 1 and unit.owns_shards and unit.versions != unit.current_versions():
            self.write_back(unit)
        super().leave(unit)

    def need(self, unit: ZeroUnit, phase: UnitPhase) -> None:
        """See the base class."""
        if unit.is_gathering:
            unit.wait()

    def done(self, unit: ZeroUnit) -> None:
        """See the base class."""

    def release_all(self) -> None:
        """See the base class."""
        for unit in self.units:
            unit.pins = unit.num_holds
            if not unit.num_holds:
                unit.guard()

    def fetch(self, unit: ZeroUnit) -> None:
        """See the base class."""
        unit.wait()

    def start_refresh(self, buffers: Iterable[FlatBuffer]) -> None:
        """See the base class.

        All gathers are started at once, in the order of the forward; the forward waits.
        """
        updated = set(buffers)
        for unit in self.units:
            for buffer in unit.buffers:
                if buffer in updated:
                    buffer.start_gather()
                    unit.is_gathering = True

    def read(self, handle: ParamHandle, *, is_rounded: bool) -> Tensor:
        """See the base class."""
        handle.buffer.pending.wait()
        if self.is_in_place(handle):
            return handle.view
        if is_rounded:
            return handle.view.clone()
        return handle.buffer.gather_one(handle, handle.buffer.shard, "the value")

    def write(self, handle: ParamHandle, value: Tensor) -> None:
        """See the base class."""
        handle.buffer.pending.wait()
        handle.view.copy_(value)
        if handle.buffer.owns_shard:
            handle.buffer.write_own_slice(handle, value)


class ShardedWeights(Weights):
    """Every rank holds its shard; units are gathered when they are used. They come without their
    full weights.

    [Note: the gather window] A unit is gathered when a module call or a node of the backward needs
    it, and units that will probably follow are prefetched. Units that are not in use are freed,
    least recently used first, as soon as another one needs their place in the window. So the last
    units of the forward are still there when the backward begins. In backward a unit is freed when
    all its gradients have arrived, and one with frozen weights as in forward. The unit in use and
    the one after it are allowed beyond the window.
    """

    has_storage_of_its_own = True

    def __init__(self, units: Sequence[ZeroUnit], window_bytes: int | None) -> None:
        super().__init__(units)
        sizes = [unit.nbytes for unit in units if unit.nbytes] or [0]
        self.window_bytes = 2 * int(median(sizes)) if window_bytes is None else window_bytes
        self.gathered_bytes = 0
        self.peak_bytes = 0
        self._gathered: OrderedDict[ZeroUnit, None] = OrderedDict()
        self._schedule: Schedule[ZeroUnit] = Schedule()
        for unit in units:
            unit.guard()

    def need(self, unit: ZeroUnit, phase: UnitPhase) -> None:
        """See the base class."""
        is_new = self._schedule.use(unit, phase is UnitPhase.BACKWARD)
        if unit not in self._gathered:
            self._make_room(unit.nbytes, {unit})
            self._start(unit)
        self._gathered.move_to_end(unit)
        if unit.phase is not UnitPhase.BACKWARD:  # recomputation in backward is still backward
            unit.phase = phase
        if is_new:
            self._prefetch(unit)
        if unit.is_gathering:
            self._finish(unit)

    def done(self, unit: ZeroUnit) -> None:
        """See the base class."""
        if unit in self._gathered and not unit.is_held and not unit.is_gathering:
            self._free(unit)

    def release_all(self) -> None:
        """See the base class."""
        for unit in self.units:
            unit.pins = unit.num_holds
            if unit.num_holds:
                continue
            if unit in self._gathered and not unit.is_held:
                self._free(unit)
            unit.guard()
        self._schedule.restart()

    def fetch(self, unit: ZeroUnit) -> None:
        """See the base class."""
        for buffer in unit.buffers:
            if not buffer.has_master:  # what is given back then is gathered by itself
                buffer.allocate()
                buffer.start_gather()
        unit.wait()

    def start_refresh(self, buffers: Iterable[FlatBuffer]) -> None:
        """See the base class. The next gather reads the updated shards."""

    def read(self, handle: ParamHandle, *, is_rounded: bool) -> Tensor:
        """See the base class."""
        unit, buffer = self._unit_of[handle], handle.buffer
        if unit in self._gathered and (is_rounded or not buffer.has_master):
            if unit.is_gathering:
                self._finish(unit)
            return handle.view.clone()
        value = buffer.gather_one(handle, buffer.shard, "the value")
        return value.to(buffer.dtype) if is_rounded else value

    def write(self, handle: ParamHandle, value: Tensor) -> None:
        """See the base class."""
        unit = self._unit_of[handle]
        if unit in self._gathered:
            if unit.is_gathering:
                self._finish(unit)
            handle.view.copy_(value)
        handle.buffer.write_own_slice(handle, value)

    def _prefetch(self, unit: ZeroUnit) -> None:
        keep, is_nearest = {unit}, True
        for following in self._schedule.upcoming():
            if following is unit:
                continue
            keep.add(following)
            if following not in self._gathered:
                self._make_room(following.nbytes, keep)
                if not is_nearest and self.gathered_bytes + following.nbytes > self.window_bytes:
                    for buffer in following.buffers:
                        buffer.start_load()
                    return
                self._start(following)
            is_nearest = False

    def _make_room(self, nbytes: int, keep: set[ZeroUnit]) -> None:
        for unit in list(self._gathered):
            if self.gathered_bytes + nbytes <= self.window_bytes:
                return
            # no gradient tells when the backward has passed frozen weights: they can come back
            is_due = unit.phase is UnitPhase.BACKWARD and not unit.has_frozen
            if not (unit.is_held or is_due or unit in keep):
                self._free(unit)

    def _start(self, unit: ZeroUnit) -> None:
        for buffer in unit.buffers:
            buffer.allocate()
            buffer.start_gather()
            self.by_storage[buffer.full.untyped_storage().data_ptr()] = unit, buffer
        unit.is_gathering = True
        self._gathered[unit] = None
        self.gathered_bytes += unit.nbytes
        self.peak_bytes = max(self.peak_bytes, self.gathered_bytes)

    def _finish(self, unit: ZeroUnit) -> None:
        unit.wait()
        for handle in unit.handles:
            handle.set_data(handle.view)
        unit.versions = unit.current_versions()

    def _free(self, unit: ZeroUnit) -> None:
        if unit.is_gathering:
            unit.wait()
        elif unit.versions != unit.current_versions():
            self.write_back(unit)
        del self._gathered[unit]
        self.gathered_bytes -= unit.nbytes
        unit.guard()
        for buffer in unit.buffers:
            self.by_storage.pop(buffer.full.untyped_storage().data_ptr(), None)
            buffer.free()
        unit.phase = UnitPhase.RESTING
