"""What watches a training loop: the interface, and the monitor that records time and memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from harness.job import Job
from harness.probes import (
    Memory,
    Snapshot,
    StepClock,
    memory,
    reset_peak,
    settled_interface_bytes,
    snapshot,
)

Counters = Callable[[], dict[str, int] | None]


def no_counters() -> None:
    """For backends that don't count what they send."""
    return


class Monitor(Protocol):
    """Called by every backend's loop, on every rank, in this order.

    A step lasts from one `begin_step` to the next (to `close` for the last one), so that work
    which a strategy moves to the edges of a step, such as a gather before the next forward, is
    counted in full.
    """

    counters: Counters

    def begin_step(self, step: int) -> None:
        """Before the step's forward; `step` counts from 0, warm-up included."""

    def add_loss(self, loss: Tensor) -> None:
        """This rank's loss of the step."""

    def close(self) -> None:
        """After the last step, before anything is torn down."""

    def result(self) -> dict[str, Any]:
        """Plain data for the report."""


class StepMonitor:
    """Time, memory, page faults, CPU time and bytes of the steps after warm-up."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._clock = StepClock(job.device)
        self._losses: list[Tensor] = []
        self._base = memory(job.device)
        self._warm: Memory | None = None
        self._start: Snapshot | None = None
        self._sent_before: int | None = None
        self._counted: dict[str, int] = {}
        self._fields: dict[str, Any] = {}
        self.counters: Counters = no_counters

    def begin_step(self, step: int) -> None:
        """Open the measured window after warm-up; mark the step's start."""
        if step == self._job.warmup:
            gc.collect()
            self._warm = memory(self._job.device)
            reset_peak(self._job.device)
            dist.barrier()
            self._sent_before = settled_interface_bytes(self._job.interface)
            dist.barrier()
            self._counted = dict(self.counters() or {})
            self._start = snapshot()
        if step >= self._job.warmup:
            self._clock.mark()

    def add_loss(self, loss: Tensor) -> None:
        """Keep the loss where it is: reading it would wait for the device."""
        self._losses.append(loss.detach().clone())

    def close(self) -> None:
        """End the window."""
        assert self._start is not None
        self._clock.mark()
        times = self._clock.intervals_ms()
        end, start, steps = snapshot(), self._start, self._job.steps
        counted = self.counters() or {}
        per_step = {name: (counted[name] - self._counted.get(name, 0)) / steps for name in counted}
        self._fields = {
            "step_ms": [round(t, 3) for t in times],
            "window_s": end.wall_s - start.wall_s,
            "cpu_ms": 1e3 * (end.cpu_s - start.cpu_s) / steps,
            "machine_cpu_s": _difference(end.machine_cpu_s, start.machine_cpu_s),
            "page_faults": (end.page_faults - start.page_faults) / steps,
            "interface_bytes": self._interface_bytes(),
            "counters": per_step or None,
            "memory_end": memory(self._job.device),
        }

    def _interface_bytes(self) -> float | None:
        dist.barrier()
        sent = _difference(settled_interface_bytes(self._job.interface), self._sent_before)
        dist.barrier()
        return None if sent is None else sent / self._job.steps / self._job.ranks_per_interface

    def result(self) -> dict[str, Any]:
        """Everything measured, per step where it is a cost."""
        memories = {"memory_base": self._base, "memory_warm": self._warm}
        memories["memory_end"] = self._fields.pop("memory_end")
        fields = {name: value and value._asdict() for name, value in memories.items()}
        return {**fields, **self._fields, "losses": [loss.item() for loss in self._losses]}


def _difference(end: float | None, start: float | None) -> float | None:
    return None if end is None or start is None else end - start
