"""Tensors that rest in ranges of a file."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_zero.errors import OffloadError
from lightning_zero.offload.device import OffloadCounters, Slab
from lightning_zero.offload.disk_file import DiskFile
from lightning_zero.offload.memory import round_up
from lightning_zero.offload.movers import Move, Movers
from lightning_zero.offload.staging import StagingBuffer, StagingPool


@dataclass
class DiskParts:
    """What the slabs of one disk share.

    Attributes:
        changed: guards the phases of all slabs and what is below. Nobody waits for the pool while
            holding it.
        slabs: those that are open, in the order in which they were made.
        failures: of the slabs whose last write failed; the first failure first.
    """

    file: DiskFile
    pool: StagingPool
    movers: Movers
    counters: OffloadCounters = field(default_factory=OffloadCounters)
    changed: threading.Condition = field(default_factory=threading.Condition)
    slabs: dict[DiskSlab, None] = field(default_factory=dict)
    failures: dict[DiskSlab, OffloadError] = field(default_factory=dict)
    is_closed: bool = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waited."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.counters.waited_seconds += time.perf_counter() - begin

    def settle(self) -> OffloadError | None:
        """Why what was written so far is not on the disk, if it is not."""
        try:
            self.file.settle()
        except OffloadError as error:
            # The system says so once, to whoever asks first, and not whose bytes are lost.
            with self.changed:
                for slab in self.slabs:
                    if slab.is_writing:
                        slab.cancel(error)
            return error
        return None


class _Phase(enum.Enum):
    """Where a slab is in [Note: life of a slab]."""

    RESTING = enum.auto()
    READING = enum.auto()
    LOADED = enum.auto()
    WRITING = enum.auto()
    CLOSED = enum.auto()


class DiskSlab(Slab):
    """A range of the file, and a staging buffer while it is not resting."""

    is_addressable = False

    def __init__(self, parts: DiskParts, numel: int, dtype: torch.dtype, label: str) -> None:
        super().__init__(numel, dtype, label)
        self._parts, self._changed = parts, parts.changed
        self._file_bytes = round_up(self.nbytes)
        self._offset = parts.file.reserve(self._file_bytes, label)
        self._phase = _Phase.RESTING
        self._is_stored = False
        self._buffer: StagingBuffer | None = None
        self._move: Move | None = None  # the read or write that is under way
        # A load that was asked for during a write: what is being written stays loaded.
        self._is_wanted = False
        # why the last read failed, until somebody is told
        self._read_error: BaseException | None = None

    @property
    def is_writing(self) -> bool:
        """Whether a write is under way."""
        return self._phase is _Phase.WRITING

    def start_load(self) -> None:
        """See :meth:`Slab.start_load`. What is still being written is not read but kept."""
        with self._changed:
            self._check_open()
            if self._phase is _Phase.WRITING:
                self._want()
            if self._phase is not _Phase.RESTING:
                return
            self._check_stored()
        self._read_error = None
        self._take_buffer()
        self._start(_Phase.READING, self._parts.file.read, self._read_ended)

    def load(self) -> Tensor:
        """See :meth:`Slab.load`."""
        if self._read_error is None:
            self.start_load()
        with self._changed:
            self._wait_until_idle()
            self._check_open()
            if self._phase is _Phase.RESTING:
                self._check_stored()
                error, self._read_error = self._read_error, None
                raise OffloadError(str(error)) from error
            return self._tensor()

    def prepare(self) -> Tensor:
        """See :meth:`Slab.prepare`."""
        with self._changed:
            self._check_open()
            if self._phase is _Phase.WRITING:
                self._want()
            self._wait_until_idle()
            self._check_open()
            self._read_error = None
            if self._phase is _Phase.LOADED:
                return self._tensor()
        self._take_buffer()
        with self._changed:
            self._check_open_or_drop()
            self._phase = _Phase.LOADED
            return self._tensor()

    def start_store(self) -> None:
        """See :meth:`Slab.start_store`."""
        with self._changed:
            self._check_open()
            if self._phase is not _Phase.LOADED:
                raise self._not_loaded()
        if self._buffer is not None:
            self._parts.pool.expect(self._buffer)
        self._start(_Phase.WRITING, self._parts.file.write, self._write_ended)

    def release(self) -> None:
        """See :meth:`Slab.release`. A read is cut short, a write is not."""
        with self._changed:
            if self._phase is _Phase.READING:
                self.cancel()
                self._wait_until_idle()
            self._read_error = None
            if self._phase is _Phase.LOADED:
                self._phase = _Phase.RESTING
                self._drop_buffer()
            elif self._is_wanted:
                self._is_wanted = False
                if self._buffer is not None:
                    self._parts.pool.expect(self._buffer)

    def close(self) -> None:
        """See :meth:`Slab.close`. What is under way is cut short."""
        with self._changed:
            if self._phase is _Phase.CLOSED:
                return
            self.cancel()
            self._wait_until_idle()
            self._phase = _Phase.CLOSED
            self._drop_buffer()
            self._parts.slabs.pop(self, None)
            self._parts.failures.pop(self, None)
            self._changed.notify_all()
        self._parts.file.give_back(self._offset, self._file_bytes)

    def cancel(self, reason: BaseException | None = None) -> None:
        """Let what is under way end soon, as a failure."""
        move = self._move
        if move is not None:
            move.cancel(reason or self._closed())

    # What follows is called with the lock held, unless it says otherwise.

    def _check_open(self) -> None:
        if self._phase is _Phase.CLOSED or self._parts.is_closed:
            raise self._closed()

    def _check_open_or_drop(self) -> None:
        """The same after the lock was given up: another thread may have closed the device."""
        try:
            self._check_open()
        except RuntimeError:
            self._drop_buffer()
            raise

    def _check_stored(self) -> None:
        failure = self._parts.failures.get(self)
        if failure is not None:
            raise OffloadError(f"the content of slab '{self.label}' is lost: {failure}")
        if not self._is_stored:
            raise self._never_stored()

    def _wait_until_idle(self) -> None:
        if self._move is not None:
            with self._parts.waiting():
                self._changed.wait_for(lambda: self._move is None)

    def _tensor(self) -> Tensor:
        if self._buffer is None:
            return torch.empty(0, dtype=self.dtype)
        return self._buffer.tensor(self.numel, self.dtype)

    def _want(self) -> None:
        if not self._is_wanted:
            self._is_wanted = True
            if self._buffer is not None:
                self._parts.pool.keep(self._buffer)

    def _drop_buffer(self) -> None:
        if self._buffer is not None:
            self._parts.pool.give_back(self._buffer)
            self._buffer = None

    def _take_buffer(self) -> None:
        """Called without the lock: it may wait for threads that need it."""
        if self.nbytes:
            with self._parts.waiting():
                self._buffer = self._parts.pool.acquire(self.nbytes)

    def _start(
        self,
        phase: _Phase,
        move_range: Callable[[memoryview, int, str], None],
        ended: Callable[[Move], None],
    ) -> None:
        """Called without the lock."""
        view = self._buffer.view() if self._buffer is not None else memoryview(b"")

        def move_bytes(start: int, stop: int) -> None:
            move_range(view[start:stop], self._offset + start, self.label)

        with self._changed:
            self._check_open_or_drop()
            self._phase, self._move = phase, Move(self._file_bytes, move_bytes, ended)
            self._parts.movers.start(self._move)

    def _read_ended(self, move: Move) -> None:
        """Called by a mover, without the lock."""
        self._parts.file.drop_cache(self._offset, self._file_bytes)
        with self._changed:
            if move.error is None:
                self._phase = _Phase.LOADED
                self._parts.counters.read_bytes += self.nbytes
                self._parts.counters.read_seconds += move.seconds
            else:
                self._phase, self._read_error = _Phase.RESTING, move.error
                self._drop_buffer()
            self._move = None
            self._changed.notify_all()

    def _write_ended(self, move: Move) -> None:
        """Called by a mover, without the lock."""
        parts, error = self._parts, move.error or self._parts.settle()
        parts.file.drop_cache(self._offset, self._file_bytes)
        with self._changed:
            # others may have found out meanwhile that bytes are lost
            error = error or move.error
            parts.failures.pop(self, None)
            if error is None:
                self._is_stored = True
                parts.counters.written_bytes += self.nbytes
                parts.counters.written_seconds += move.seconds
            else:
                parts.failures[self] = OffloadError(str(error))
            if error is None and self._is_wanted:
                self._phase = _Phase.LOADED
            else:
                self._phase = _Phase.RESTING
                self._drop_buffer()
            self._is_wanted = False
            self._move = None
            self._changed.notify_all()
