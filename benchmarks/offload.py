"""What offloading reaches of the disk's own rate, and of one fused AdamW over one flat tensor.

One process. Training and yardstick take turns in rounds, so that a slow phase of the machine hits
both; ratios compare what happened in one round.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import OffloadCallback, ZeroStrategy
from lightning_zero.engine.engine import ZeroEngine, engine_of
from lightning_zero.offload.memory import map_pages
from lightning_zero.offload.movers import CHUNK_BYTES

WARMUP = 2
# Where states rest in files, freed memory goes back to the system; new memory is cheaper like this.
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}


class Layers(pl.LightningModule):
    """Square linear layers, and almost no data: a step is its optimizer's step."""

    def __init__(self, mb: int, width: int) -> None:
        super().__init__()
        count = max(2, round(mb * 1e6 / (4 * width * width)))
        self.width = width
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(list(torch.randn(4096, self.width)), batch_size=2)


class Round(NamedTuple):
    """Some steps and the yardstick beside them; seconds, and bytes of the steps."""

    seconds: float
    yardsticks: tuple[float, ...]
    nbytes: float
    exposed: float
    overlap: float


Yardstick = Callable[[float, float], tuple[float, ...]]
"""From bytes read and written to seconds, by each of the ways to measure."""


@dataclass
class Rounds(pl.Callback):
    """Runs ``rounds`` rounds of ``steps`` steps of the whole engine against a yardstick."""

    rounds: int
    steps: int
    yardstick: Yardstick
    found: list[Round] = field(default_factory=list)
    _begin: float = 0.0
    _before: tuple[float, ...] = ()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        done = batch_idx - WARMUP
        if done < 0 or done % self.steps:
            return
        if done:
            self._end(trainer)
        self._start(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end(trainer)

    def _start(self, trainer: pl.Trainer) -> None:
        settled(trainer)
        self._before = counts(trainer)
        self._begin = time.perf_counter()

    def _end(self, trainer: pl.Trainer) -> None:
        settled(trainer)
        seconds = time.perf_counter() - self._begin
        pairs = zip(counts(trainer), self._before, strict=True)
        read, written, busy, exposed = (after - before for after, before in pairs)
        overlap = max(0.0, 1 - exposed / busy) if busy else 1.0
        nbytes = read + written
        self.found.append(
            Round(seconds, self.yardstick(read, written), nbytes, exposed / self.steps, overlap)
        )


def engine_in(trainer: pl.Trainer) -> ZeroEngine:
    engine = engine_of(trainer.lightning_module)
    assert engine is not None
    return engine


def settled(trainer: pl.Trainer) -> None:
    """Wait for the step in the background and for everything that is being written."""
    offload = engine_in(trainer).offload
    assert offload is not None
    offload.runner.wait()
    for device in offload.devices:
        device.wait()


def counts(trainer: pl.Trainer) -> tuple[float, ...]:
    """Bytes read and written, seconds of work and seconds that training waited."""
    offload = engine_in(trainer).offload
    assert offload is not None
    files = [device.counters for device in offload.devices]
    cost = offload.counts()
    read, written = sum(f.read_bytes for f in files), sum(f.written_bytes for f in files)
    return read, written, cost.busy_seconds, cost.exposed_seconds


def train(
    module: pl.LightningModule,
    stage: int,
    max_steps: int,
    callbacks: Sequence[pl.Callback],
    **more: Any,
) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=ZeroStrategy(stage=stage, gather_after_fit=False),
        max_steps=max_steps,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )
    trainer.fit(module)


# -- the disk


class RawDisk:
    """A file of the given size that is read and written past the page cache, in order."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        direct = getattr(os, "O_DIRECT", 0)
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | direct, 0o600)
        except OSError:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._num_chunks = -(-nbytes // CHUNK_BYTES)
        os.posix_fallocate(self._handle, 0, self._num_chunks * CHUNK_BYTES)
        self._move(os.pwritev, self._num_chunks)

    def _move(self, call: Callable[..., int], count: int, first: int = 0, every: int = 1) -> None:
        with_pages = memoryview(map_pages(CHUNK_BYTES))
        for index in range(first, count, every):
            call(self._handle, [with_pages], index % self._num_chunks * CHUNK_BYTES)

    def one_by_one(self, read: float, written: float) -> None:
        """One call after the other: first all reads, then all writes."""
        self._move(os.preadv, round(read / CHUNK_BYTES))
        self._move(os.pwritev, round(written / CHUNK_BYTES))

    def at_once(self, read: float, written: float) -> None:
        """Two threads read while two write."""
        calls = ((os.preadv, read), (os.pwritev, written))
        threads = [
            threading.Thread(target=self._move, args=(call, round(size / CHUNK_BYTES), first, 2))
            for call, size in calls
            for first in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def seconds(self, read: float, written: float) -> tuple[float, ...]:
        """See :data:`Yardstick`."""
        return timed(self.one_by_one, read, written), timed(self.at_once, read, written)

    def close(self) -> None:
        os.close(self._handle)
        self.path.unlink()


def timed(action: Callable[..., object], *args: Any) -> float:
    start = time.perf_counter()
    action(*args)
    return time.perf_counter() - start


# -- the step alone


class Alone(NamedTuple):
    """One optimizer step in the background with nothing else running, and the yardstick beside it.

    Attributes:
        seconds: until the last byte is where it rests.
        cpu_seconds: of the thread that steps.
        nbytes: read and written.
        yardsticks: seconds of the yardstick, by each of the ways to measure.
    """

    seconds: float
    cpu_seconds: float
    nbytes: float
    yardsticks: tuple[float, ...]


@dataclass
class StepsAlone(pl.Callback):
    """Lets every step end before the next forward."""

    yardstick: Yardstick
    found: list[Alone] = field(default_factory=list)
    _before: tuple[float, ...] = ()

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        settled(trainer)
        self._before = (time.perf_counter(), thread_seconds(trainer), *counts(trainer)[:2])

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        settled(trainer)
        after = (time.perf_counter(), thread_seconds(trainer), *counts(trainer)[:2])
        seconds, cpu_seconds, read, written = (
            a - b for a, b in zip(after, self._before, strict=True)
        )
        if batch_idx >= WARMUP:
            self.found.append(
                Alone(seconds, cpu_seconds, read + written, self.yardstick(read, written))
            )


def thread_seconds(trainer: pl.Trainer) -> float:
    """Processor time of the thread that steps, which must have nothing to do."""
    found: list[float] = []
    offload = engine_in(trainer).offload
    assert offload is not None
    offload.runner.submit(lambda: found.append(time.thread_time())).wait()
    return found[0]


class FlatAdamW:
    """torch's AdamW(fused=True) of one flat tensor."""

    def __init__(self, numel: int) -> None:
        flat = nn.Parameter(torch.zeros(numel))
        flat.grad = torch.full_like(flat, 1e-3)
        self._optimizer = torch.optim.AdamW([flat], lr=1e-4, fused=True)

    def seconds(self, read: float, written: float) -> tuple[float, ...]:
        """Of the clock and of this thread."""
        before = time.thread_time()
        seconds = timed(self._optimizer.step)
        return seconds, time.thread_time() - before


class CpuCase(NamedTuple):
    """What is stepped in host memory."""

    title: str
    stage: int
    params: str | None
    precision: str
    width: int


def cpu_cases(width: int) -> Iterator[CpuCase]:
    yield CpuCase("optimizer", 2, None, "32-true", width)
    yield CpuCase("optimizer and params", 3, "cpu", "32-true", width)
    yield CpuCase("optimizer, bf16-mixed", 2, None, "bf16-mixed", width)
    yield CpuCase("optimizer, layers of 1 MB", 2, None, "32-true", 512)


def measure_cpu(options: argparse.Namespace, case: CpuCase) -> list[Alone]:
    module = Layers(options.mb, case.width)
    flat = FlatAdamW(sum(p.numel() for p in module.parameters()))
    watch = StepsAlone(flat.seconds)
    offload = OffloadCallback("cpu", case.params, force=True)  # type: ignore[arg-type]
    steps = WARMUP + options.rounds * options.steps
    train(module, case.stage, steps, [offload, watch], precision=case.precision)
    return watch.found


def measure_nvme(
    options: argparse.Namespace, params: str | None, watch: Callable[[Yardstick], Any]
) -> list[Any]:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        disk = RawDisk(Path(folder) / "raw", int(options.mb * 1e6 * 3))
        watching = watch(disk.seconds)
        offload = OffloadCallback("nvme", params, nvme_path=folder)  # type: ignore[arg-type]
        steps = WARMUP + options.rounds * options.steps
        train(Layers(options.mb, options.width), 3 if params else 2, steps, [offload, watching])
        disk.close()
    found: list[Any] = watching.found
    return found


# -- the report


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):5.2f} ({min(values):.2f}-{max(values):.2f})"


def print_nvme(title: str, rounds: Sequence[Round], steps: int) -> None:
    one_by_one, at_once = (
        spread([r.yardsticks[way] / r.seconds for r in rounds]) for way in range(2)
    )
    mean = {
        name: statistics.median(getattr(r, name) for r in rounds)
        for name in ("nbytes", "seconds", "exposed", "overlap")
    }
    print(
        f"{title:26}{mean['nbytes'] / steps / 1e6:9.0f}{mean['seconds'] / steps:8.2f}"
        f"{mean['nbytes'] / mean['seconds'] / 1e6:8.0f}  {one_by_one:>19}{at_once:>19}"
        f"{mean['exposed']:10.2f}{mean['overlap']:9.2f}",
        flush=True,
    )


def print_alone(title: str, found: Sequence[Alone]) -> None:
    seconds, nbytes = (
        statistics.median(getattr(r, n) for r in found) for n in ("seconds", "nbytes")
    )
    ratios = [spread([r.yardsticks[way] / r.seconds for r in found]) for way in range(2)]
    print(
        f"{title:26}{nbytes / 1e6:9.0f}{seconds:8.2f}{nbytes / seconds / 1e6:8.0f}"
        f"  {ratios[0]:>19}{ratios[1]:>19}",
        flush=True,
    )


def print_cpu(title: str, found: Sequence[Alone], mb: int) -> None:
    seconds = statistics.median(r.seconds for r in found)
    wall = spread([r.yardsticks[0] / r.seconds for r in found])
    cpu = spread([r.yardsticks[1] / r.cpu_seconds for r in found])
    print(f"{title:26}{mb / 4 / seconds:9.0f}  {wall:>19}{cpu:>19}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=400, help="fp32 weights of the model")
    parser.add_argument("--width", type=int, default=2048, help="of a layer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="of one round")
    parser.add_argument("--threads", type=int, default=0, help="for computation")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one")
    parser.add_argument("--quick", action="store_true", help="whether it runs at all")
    options = parser.parse_args()
    if options.quick:
        options.mb, options.width, options.rounds, options.steps = 20, 512, 2, 2
    if os.environ.get("THP_MEM_ALLOC_ENABLE") is None:  # torch reads it when it allocates first
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **HUGE_PAGES})
    if options.threads:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)  # else Lightning sets what it likes
        torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print(
        f"AdamW of {options.mb} MB of weights on disk; medians (least-most of the ratio):"
        "\nrate / that of plain direct I/O, one call after the other, and four at once"
    )
    places = (("optimizer", None), ("optimizer and params", "nvme"))
    header = f"{'':26}  MB/step  s/step    MB/s       / one by one          / at once"
    print(f"\nthe optimizer's step\n{header}")
    for title, params in places:
        print_alone(title, measure_nvme(options, params, StepsAlone))
    print(f"\nwhole steps\n{header} exposed s  overlap")
    rounds = partial(Rounds, options.rounds, options.steps)
    for title, params in places:
        print_nvme(title, measure_nvme(options, params, rounds), options.steps)
    print(
        "\nAdamW in host memory: elements / s against torch's AdamW(fused=True) of one flat tensor"
    )
    print(f"{'':26} M elem/s          by the clock  by processor time")
    for case in cpu_cases(options.width):
        print_cpu(case.title, measure_cpu(options, case), options.mb)


if __name__ == "__main__":
    main()
