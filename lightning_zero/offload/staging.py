"""Host memory that content passes through on its way from and to a disk."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from lightning_zero.offload.memory import (
    drop_pages,
    hide_from_children,
    map_pages,
    round_up,
    tensor_on,
)


class StagingBuffer:
    """Page-aligned memory. Belongs to whoever acquired it until it is given back.

    Attributes:
        nbytes: how much of it is in use, a multiple of 4096; the budget is charged with this.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._pages = map_pages(nbytes)
        hide_from_children(self._pages)

    @property
    def capacity_bytes(self) -> int:
        """How much it can hold."""
        return len(self._pages)

    def resize(self, nbytes: int) -> None:
        """Use another part of the capacity. What is not used any more is no memory any more."""
        if nbytes < self.nbytes:
            drop_pages(self._pages, nbytes)
        self.nbytes = nbytes

    def tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Its beginning as a tensor."""
        return tensor_on(self._pages, numel, dtype)

    def view(self) -> memoryview:
        """The bytes in use."""
        return memoryview(self._pages)[: self.nbytes]


class StagingPool:
    """Buffers under a budget, which are used again: memory that is new to the process costs more
    time than a fast disk. Any thread may call it.

    Attributes:
        budget_bytes: how much memory the buffers may be, in use or idle.
        peak_bytes: how much they have been at most.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.peak_bytes = 0
        self._busy_bytes = self._idle_bytes = 0
        self._idle: list[StagingBuffer] = []  # the longest idle first
        # those in use which will be given back without the caller's doing
        self._returning: set[StagingBuffer] = set()
        self._changed = threading.Condition()

    @property
    def held_bytes(self) -> int:
        """How much memory the buffers are now, in use or idle."""
        return self._busy_bytes + self._idle_bytes

    def has_room(self, nbytes: int) -> bool:
        """Whether :meth:`acquire` would neither wait nor exceed the budget."""
        with self._changed:
            return self._fits(round_up(nbytes))

    def acquire(self, nbytes: int) -> StagingBuffer:
        """A buffer for ``nbytes`` bytes, with anything in it.

        If the budget does not allow it, waits for buffers that are about to be given back. If there
        are none, exceeds the budget: the caller would wait for itself.
        """
        nbytes = round_up(nbytes)
        with self._changed:
            while not self._fits(nbytes) and self._returning:
                self._changed.wait()
            buffer = self._take_idle(nbytes)
            while self._idle and self._busy_bytes + nbytes + self._idle_bytes > self.budget_bytes:
                self._idle_bytes -= self._idle.pop(0).nbytes
            if buffer is None:
                buffer = StagingBuffer(nbytes)
            self._busy_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return buffer

    def expect(self, buffer: StagingBuffer) -> None:
        """Say that ``buffer`` will be given back by a thread that waits for nobody."""
        with self._changed:
            self._returning.add(buffer)

    def keep(self, buffer: StagingBuffer) -> None:
        """Say that it will not, after all."""
        with self._changed:
            self._returning.discard(buffer)
            self._changed.notify_all()

    def give_back(self, buffer: StagingBuffer) -> None:
        """End the use of ``buffer``, which the pool may now give to others."""
        with self._changed:
            self._returning.discard(buffer)
            self._busy_bytes -= buffer.nbytes
            # what was beyond the budget does not stay
            if self._busy_bytes + self._idle_bytes + buffer.nbytes <= self.budget_bytes:
                self._idle.append(buffer)
                self._idle_bytes += buffer.nbytes
            self._changed.notify_all()

    def clear(self) -> None:
        """Free the idle buffers."""
        with self._changed:
            self._idle.clear()
            self._idle_bytes = 0

    def _fits(self, nbytes: int) -> bool:
        return self._busy_bytes + nbytes <= self.budget_bytes

    def _take_idle(self, nbytes: int) -> StagingBuffer | None:
        fitting = [buffer for buffer in self._idle if buffer.capacity_bytes >= nbytes]
        if not fitting:
            return None
        # what is new to the process, and what will be once the buffer grows again
        best = min(fitting, key=lambda buffer: abs(buffer.nbytes - nbytes))
        is_free = self.held_bytes + nbytes <= self.budget_bytes
        if is_free and best.nbytes - nbytes > nbytes:
            return None
        self._idle.remove(best)
        self._idle_bytes -= best.nbytes
        best.resize(nbytes)
        return best
