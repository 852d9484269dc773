"""Threads that read and write several slabs at the same time, piece by piece."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

# How much one call of the system moves.
CHUNK_BYTES = 8 << 20


class Move:
    """The way of one slab's content, cut into chunks.

    Args:
        nbytes: how long it is.
        move_bytes: moves the bytes from its first to its second argument. Called from several
            threads.
        ended: called once, by one of those threads, when nothing of it is under way any more.

    Attributes:
        error: what has gone wrong first; nothing is begun after it.
        seconds: how long it took, once it has ended.
    """

    def __init__(
        self,
        nbytes: int,
        move_bytes: Callable[[int, int], None],
        ended: Callable[[Move], None],
    ) -> None:
        self.error: BaseException | None = None
        self.seconds = 0.0
        self._nbytes, self._move_bytes, self._ended = nbytes, move_bytes, ended
        self._position = self._num_running = 0
        self._begin = 0.0
        self._has_ended = False
        self._lock = threading.Lock()

    def cancel(self, reason: BaseException) -> None:
        """Begin no further chunk. It still ends as any other, with ``reason`` as its error."""
        with self._lock:
            self.error = self.error or reason

    def advance(self, queue: SimpleQueue[Move | None]) -> None:
        """Move one chunk; what is left goes back to the queue first, for other threads."""
        chunk = self._take()
        if chunk is not None:
            if chunk[1] < self._nbytes:
                queue.put(self)
            try:
                self._move_bytes(*chunk)
            except BaseException as error:
                # whatever it was, somebody waits for the end
                self.cancel(error)
            with self._lock:
                self._num_running -= 1
        if self._is_over():
            self._ended(self)

    def _take(self) -> tuple[int, int] | None:
        with self._lock:
            if self.error is not None or self._position == self._nbytes:
                return None
            self._begin = self._begin or time.perf_counter()
            start, self._position = (
                self._position,
                min(self._position + CHUNK_BYTES, self._nbytes),
            )
            self._num_running += 1
            return start, self._position

    def _is_over(self) -> bool:
        """True for the first thread that finds it so."""
        with self._lock:
            has_more = self.error is None and self._position < self._nbytes
            if has_more or self._num_running or self._has_ended:
                return False
            self._has_ended = True
            self.seconds = time.perf_counter() - (self._begin or time.perf_counter())
            return True


class Movers:
    """The threads. Moves that are under way at the same time take turns, chunk by chunk."""

    def __init__(self, num_threads: int) -> None:
        self._queue: SimpleQueue[Move | None] = SimpleQueue()
        # Daemons: an interpreter that exits does not wait for a disk that hangs. They are inside of
        # plain system calls then, or asleep.
        self._threads = [
            threading.Thread(
                target=_serve, args=(self._queue,), name=f"zero-offload-{index}", daemon=True
            )
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, move: Move) -> None:
        """Begin to move ``move``."""
        self._queue.put(move)

    def close(self) -> None:
        """End the threads, after what is under way. Nothing may be started any more. Calling it
        again is free.
        """
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()


def _serve(queue: SimpleQueue[Move | None]) -> None:
    while (move := queue.get()) is not None:
        move.advance(queue)
        # the thread must not keep alive what it has moved while it waits for more
        del move
