"""What a process can read about itself and its machine. Every probe is None where it can't be had.

[Note: private memory]
`private` is Private_Clean + Private_Dirty of /proc/self/smaps_rollup: pages that no other process
maps, so code shared between the ranks is left out. The kernel keeps a high-water mark only for the
resident set; it is reset after warm-up, and the peak of private memory is that mark less what was
resident but not private at the end. Memory shared between ranks on purpose is not private, so it
is reported beside it (`shared`, each rank's share).
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

SETTLE_S, SETTLE_LIMIT_S, SETTLE_BYTES = 0.2, 30.0, 16_384


class Memory(NamedTuple):
    """Megabytes (1e6) at one moment."""

    private: float
    shared: float
    peak: float | None


class Snapshot(NamedTuple):
    """Counters that only grow; the difference of two snapshots is a cost."""

    wall_s: float
    cpu_s: float
    machine_cpu_s: float | None
    page_faults: int


def _fields_kb(path: str, names: Iterable[str]) -> dict[str, float] | None:
    wanted = set(names)
    try:
        text = Path(path).read_text()
    except OSError:
        return None
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {name: float(rest.split()[0]) for name, rest in pairs if name in wanted}


def cpu_memory() -> Memory | None:
    """This process's private memory now and at its peak since `reset_peak`."""
    names = ("Rss", "Private_Clean", "Private_Dirty", "Pss_Shmem")
    now = _fields_kb("/proc/self/smaps_rollup", names)
    mark = _fields_kb("/proc/self/status", ["VmHWM"])
    if now is None or mark is None:
        return None
    private = now["Private_Clean"] + now["Private_Dirty"]
    peak = mark["VmHWM"] - (now["Rss"] - private)
    shared = now.get("Pss_Shmem", 0.0)
    return Memory(*(round(kb * 1.024e-3, 1) for kb in (private, shared, peak)))


def cuda_memory() -> Memory:
    """Memory that tensors take on the current CUDA device."""
    now, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    return Memory(round(now / 1e6, 1), 0.0, round(peak / 1e6, 1))


def memory(device: str) -> Memory | None:
    """The memory that limits training on `device`."""
    return cuda_memory() if device == "cuda" else cpu_memory()


def reset_peak(device: str) -> None:
    """Start the high-water mark anew at what is in use now."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return
    # Where it isn't allowed, the peak counts from the start of the process.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def interface_bytes(interface: str | None) -> int | None:
    """Bytes transmitted by a network device of this process's network namespace."""
    if interface is None:
        return None
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.strip().partition(":")
        if name == interface:
            return int(counters.split()[8])
    raise ValueError(f"Expected a network device {interface!r} in /proc/net/dev, found none.")


def settled_interface_bytes(interface: str | None) -> int | None:
    """The counter once messages that are under way have left: a step may end before they do."""
    sent = interface_bytes(interface)
    deadline = time.monotonic() + SETTLE_LIMIT_S
    while sent is not None and time.monotonic() < deadline:
        time.sleep(SETTLE_S)
        before, sent = sent, interface_bytes(interface)
        if sent is not None and sent - before < SETTLE_BYTES:
            break
    return sent


def machine_cpu_s() -> float | None:
    """CPU seconds that the whole machine has been busy."""
    try:
        with open("/proc/stat") as stat:
            user, nice, system, _, _, irq, softirq = map(int, stat.readline().split()[1:8])
    except OSError:
        return None
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def snapshot() -> Snapshot:
    """All of this process's counters at once."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return Snapshot(
        wall_s=time.perf_counter(),
        cpu_s=usage.ru_utime + usage.ru_stime,
        machine_cpu_s=machine_cpu_s(),
        page_faults=usage.ru_minflt + usage.ru_majflt,
    )


class StepClock:
    """Marks between steps; on CUDA marks are events, so that marking never waits for the device."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._seconds: list[float] = []

    def mark(self) -> None:
        """Remember this moment (of the device's work, on CUDA)."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._seconds.append(time.perf_counter())

    def intervals_ms(self) -> list[float]:
        """Milliseconds between successive marks."""
        if self._cuda:
            torch.cuda.synchronize()
            pairs = zip(self._events, self._events[1:], strict=False)
            return [first.elapsed_time(second) for first, second in pairs]
        pairs_s = zip(self._seconds, self._seconds[1:], strict=False)
        return [1e3 * (second - first) for first, second in pairs_s]
