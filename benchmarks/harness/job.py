"""What one set of processes is asked to run: a plain record that travels as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One backend, one set of fresh processes."""

    backend: str
    """A name out of `harness.backends.BACKENDS`."""
    task: Literal["time", "passes"] = "time"
    """Measure time and memory, or count passes over tensors (far too slow to time)."""
    size: str = "base"
    micro_batch: int = 1
    seq: int = 128
    steps: int = 10
    warmup: int = 3
    device: Literal["cpu", "cuda"] = "cpu"
    precision: Literal["fp32", "bf16"] = "fp32"
    clip_norm: float = 1.0
    """Largest norm of the gradients; 0 leaves them as they are."""
    threads: int = 1
    """Threads of one process for computation; only used on a CPU."""
    interface: str | None = None
    """Network device whose byte counter belongs to this job alone; None where there is none."""
    ranks_per_interface: int = 1
    timeout_s: float = 300.0

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, warm-up included."""
        return self.warmup + self.steps

    def to_json(self) -> str:
        """The job as one argument of a command line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The inverse of `to_json`."""
        return cls(**json.loads(text))
