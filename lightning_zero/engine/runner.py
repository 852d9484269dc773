"""A thread that steps shards while the next forward is already running."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator

import torch

from lightning_zero.pending import Pending

_JOIN_SECONDS = 30.0


class WaitClock:
    """Adds up how long the training loop has waited.

    Attributes:
        seconds: so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The training loop waits inside."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start


class StepRunner:
    """Runs jobs one after the other in a thread of its own.

    After a job has failed no other one runs, and every wait raises the failure: a step that was
    done by half is never used.

    Args:
        waits: where the time that callers wait is counted.
        device: what the thread uses as its current device.

    Attributes:
        busy_seconds: time spent in jobs.
    """

    def __init__(self, waits: WaitClock, device: torch.device) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], threading.Event] | None]
        self._jobs = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._last: threading.Event | None = None
        self._is_stopped = False
        self._waits, self._device = waits, device
        self.busy_seconds = 0.0

    def submit(self, job: Callable[[], None]) -> Pending:
        """Run ``job`` after those before it."""
        if self._thread is None:
            # Ctrl-C ends the process although a job is running
            self._thread = threading.Thread(target=self._run, name="zero-step", daemon=True)
            self._thread.start()
        done = self._last = threading.Event()
        self._jobs.put((job, done))
        return Pending(lambda: self._wait(done), done.is_set)

    def wait(self) -> None:
        """Wait for all jobs; raises the failure of the first that failed."""
        if self._last is not None:
            self._wait(self._last)

    def _wait(self, done: threading.Event) -> None:
        if not done.is_set():
            with self._waits.waiting():
                done.wait()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # it is another one for each thread
        while (entry := self._jobs.get()) is not None:
            job, done = entry
            start = time.perf_counter()
            if self._failure is None and not self._is_stopped:
                try:
                    job()
                except BaseException as failure:
                    self._failure = failure
            self.busy_seconds += time.perf_counter() - start
            done.set()

    def stop(self) -> None:
        """End the thread after the job that is running; those after it are not run."""
        self._is_stopped = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(_JOIN_SECONDS)
            self._thread = None
