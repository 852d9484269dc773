"""What offloading to host memory costs and saves on one GPU, against the same GPT with plain AdamW.

Every configuration runs in a process of its own. First all of them train the same GPT on the same
batches; then, with the GPU's memory capped at `--cap`, each trains ever deeper ones until one does
not fit or the time is used up. `--device cpu --tiny` only proves that the script runs.

    python benchmarks/gpu_offload.py                  # one large GPU, within 5 minutes
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from harness.model import GPT, SEQUENCES_PER_RANK, Size
from harness.probes import StepClock, memory, reset_peak
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from lightning_zero import OffloadCallback, ZeroStrategy
from lightning_zero.engine.offload import OffloadCounts
from lightning_zero.offload.host import HostMemory

WARMUP, PROFILED = 3, 2
GIB = 1 << 30


class Config(NamedTuple):
    """A stage, and what rests in host memory; stage 0: neither."""

    title: str
    stage: int = 0
    params: str | None = None
    is_delayed: bool = False


CONFIGS = {
    "plain": Config("plain AdamW"),
    "zero2": Config("zero2, optimizer", 2),
    "zero3": Config("zero3, optimizer and params", 3, "cpu"),
    "delayed": Config("zero2, delayed update", 2, is_delayed=True),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of some layers, few steps")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=32, help="sequences per step")
    parser.add_argument("--steps", type=int, default=8, help="measured, after warm-up")
    parser.add_argument("--cap", type=float, default=16, help="GiB of the GPU for the deepest GPT")
    parser.add_argument("--budget", type=float, default=270, help="seconds for everything")
    parser.add_argument("--config", choices=CONFIGS, help=argparse.SUPPRESS)
    parser.add_argument("--fits", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        options.layers, options.width, options.vocab = 2, 64, 256
        options.seq, options.batch, options.steps, options.cap = 32, 2, 3, 0
    return options


class Task(pl.LightningModule):
    """The GPT and its own few sequences over and over."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options
        heads = max(1, options.width // 128)
        size = Size(options.layers, options.width, heads, options.vocab)
        torch.manual_seed(7)
        with torch.device("meta" if options.fits else options.device):
            self.gpt = GPT(size, options.seq)
        if options.fits:  # never whole on the device, and quickly there
            self.gpt.to_empty(device="cpu")
        for parameter in self.gpt.parameters():
            if options.fits:
                torch.nn.init.constant_(parameter, 0.01)
            elif parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.02)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.gpt(batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)

    def train_dataloader(self) -> DataLoader[Tensor]:
        options, generator = self.options, torch.Generator().manual_seed(1000)
        shape = (SEQUENCES_PER_RANK, options.seq + 1)
        pool = torch.randint(options.vocab, shape, generator=generator)
        rows = torch.arange(total_steps(options) * options.batch) % SEQUENCES_PER_RANK
        return DataLoader([pool[row] for row in rows], batch_size=options.batch)


def total_steps(options: argparse.Namespace) -> int:
    return 2 if options.fits else WARMUP + options.steps + PROFILED


# -- one run


class Watch(pl.Callback):
    """Measures the steps after warm-up, and profiles some after those.

    Attributes:
        found: what was measured.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.clock = StepClock(options.device)
        self.found: dict[str, Any] = {}
        self.losses: list[Tensor] = []
        self._profile: Any = None
        self._start = (OffloadCounts(), 0, 0)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        step, last = batch_idx - WARMUP, self.options.steps
        if self.options.fits or step < 0:
            return
        if step == 0:
            reset_peak(self.options.device)
            self._start = self._counts(trainer)
        if step <= last:
            self.clock.mark()
        if step == last:
            self._measure(trainer)
            if self.options.device == "cuda":
                self._profile = profile(activities=[ProfilerActivity.CUDA])
                self._profile.start()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self.losses.append(outputs["loss"].detach())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._profile is not None:
            torch.cuda.synchronize()
            self._profile.stop()
            self.found.update(overlap_of_copies(self._profile))
        self.found["losses"] = [loss.item() for loss in self.losses]

    def _measure(self, trainer: pl.Trainer) -> None:
        times = self.clock.intervals_ms()
        now, steps = self._counts(trainer), self.options.steps
        cost = now[0] - self._start[0]
        self.found = {
            "step_ms": statistics.median(times),
            "step_ms_all": times,
            "peak_mb": getattr(memory(self.options.device), "peak", None),
            "exposed_ms": 1e3 * cost.exposed_seconds / steps,
            "overlap": cost.overlap,
            "uploaded_mb": (now[1] - self._start[1]) / steps / 1e6,
            "downloaded_mb": (now[2] - self._start[2]) / steps / 1e6,
            **pinned_and_host_mb(trainer),
        }

    @staticmethod
    def _counts(trainer: pl.Trainer) -> tuple[OffloadCounts, int, int]:
        offload = offload_of(trainer)
        if offload is None:
            return OffloadCounts(), 0, 0
        transfers = offload.transfers
        return offload.counts(), transfers.uploaded_bytes, transfers.downloaded_bytes


def offload_of(trainer: pl.Trainer) -> Any:
    engine = getattr(trainer.strategy, "engine", None)
    return None if engine is None else engine.offload


def pinned_and_host_mb(trainer: pl.Trainer) -> dict[str, float]:
    """What is page-locked, and what rests in host memory."""
    offload = offload_of(trainer)
    if offload is None:
        return {}
    pinned = offload.transfers.peak_pinned_bytes
    resting = 0
    for device in offload.devices:
        resting += device.resting_bytes
        pinned += device.pinned_bytes if isinstance(device, HostMemory) else 0
    return {"pinned_mb": pinned / 1e6, "resting_mb": resting / 1e6}


def overlap_of_copies(profiled: Any) -> dict[str, float]:
    """Of the copies in each direction: how long they take, and the share of that time during which
    a kernel runs; and the bytes that were copied from or to memory that is not page-locked.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        profiled.export_chrome_trace(str(path))
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
    spans: dict[str, list[tuple[float, float]]] = {"kernel": [], "HtoD": [], "DtoH": []}
    pageable = 0.0
    for event in events:
        kind = event.get("cat")
        if kind == "gpu_memcpy":
            if "Pageable" in event["name"]:
                pageable += event.get("args", {}).get("bytes", 0)
            kind = next((way for way in ("HtoD", "DtoH") if way in event["name"]), None)
        if kind in spans and "dur" in event:
            spans[kind].append((event["ts"], event["ts"] + event["dur"]))
    kernels = union(spans["kernel"])
    found = {"pageable_mb": pageable / 1e6 / PROFILED}
    for way, name in (("HtoD", "upload"), ("DtoH", "download")):
        copies = union(spans[way])
        total = sum(stop - start for start, stop in copies)
        found[f"{name}_ms"] = total / 1e3 / PROFILED
        found[f"{name}_hidden"] = common(copies, kernels) / total if total else 1.0
    return found


def union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def common(a: Sequence[tuple[float, float]], b: Sequence[tuple[float, float]]) -> float:
    """How much of two sorted lists of spans is in both."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train one configuration."""
    if options.fits and options.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.cap * GIB / total))
    config = CONFIGS[options.config]
    watch, callbacks = Watch(options), []
    strategy: Any = "auto"
    if config.stage:
        strategy = ZeroStrategy(stage=config.stage, gather_after_fit=False)  # type: ignore[arg-type]
        callbacks.append(
            OffloadCallback(
                "cpu",
                config.params,  # type: ignore[arg-type]
                delayed_update=config.is_delayed,
                force=options.device == "cpu",
            )
        )
    trainer = pl.Trainer(
        accelerator=options.device,
        devices=1,
        strategy=strategy,
        precision="bf16-mixed",
        max_steps=total_steps(options),
        callbacks=[*callbacks, watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    try:
        module = Task(options)
        count = sum(p.numel() for p in module.parameters())
        trainer.fit(module)
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    return {**watch.found, "parameters": count}


# -- all runs


class Runs:
    """Runs this file again and again, within the time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self._end = time.monotonic() + options.budget

    def run(self, config: str, *, layers: int | None = None) -> dict[str, Any]:
        """One configuration; with ``layers``, only whether that depth fits."""
        left = self._end - time.monotonic()
        if left < 5:
            return {"error": "no time left"}
        changes = {"config": config}
        if layers is not None:
            changes |= {"layers": str(layers), "batch": "1"}
        names = ("device", "layers", "width", "vocab", "seq", "batch", "steps", "cap", "config")
        values = {name: changes.get(name, getattr(self.options, name)) for name in names}
        flags = ["--fits"] if layers is not None else []
        command = [sys.executable, __file__, *(f"--{k}={v}" for k, v in values.items()), *flags]
        start = time.monotonic()
        try:
            child = subprocess.run(
                command, capture_output=True, text=True, timeout=left, check=False
            )
        except subprocess.TimeoutExpired:
            return {"error": "no time left"}
        if child.returncode:
            lines = child.stderr.strip().splitlines() or [f"exit status {child.returncode}"]
            return {"error": lines[-1], "log": lines[-30:]}
        found: dict[str, Any] = json.loads(child.stdout.strip().splitlines()[-1])
        return {**found, "seconds": time.monotonic() - start}

    def deepest(self, config: str, first: int) -> dict[str, Any]:
        """Double the depth until it does not fit, then try the middle."""
        best: dict[str, Any] = {}
        layers, tries = first, []
        for _ in range(8):
            found = self.run(config, layers=layers)
            tries.append({"layers": layers, **found})
            if "error" in found:
                break
            best, layers = {"layers": layers, **found}, 2 * layers
        if best and tries[-1].get("error") == "out of memory":
            middle = best["layers"] * 3 // 2
            found = self.run(config, layers=middle)
            tries.append({"layers": middle, **found})
            if "error" not in found:
                best = {"layers": middle, **found}
        reason = next((t["error"] for t in tries if "error" in t), "deep enough")
        return {**best, "ended": reason, "tries": tries}


COLUMNS = {
    "peak_mb": "peak MB",
    "step_ms": "ms/step",
    "speed": "tok/s / plain",
    "exposed_ms": "exposed ms",
    "overlap": "overlap",
    "pinned_mb": "pinned MB",
    "resting_mb": "on host MB",
    "uploaded_mb": "up MB",
    "downloaded_mb": "down MB",
    "upload_hidden": "up hidden",
    "download_hidden": "down hidden",
    "pageable_mb": "pageable MB",
    "loss_difference": "loss diff",
}


def compared(results: dict[str, dict[str, Any]]) -> None:
    """Add what is relative to plain training."""
    plain = results["plain"]
    for found in results.values():
        if "error" in found or "error" in plain:
            continue
        found["speed"] = plain["step_ms"] / found["step_ms"]
        pairs = zip(found["losses"], plain["losses"], strict=True)
        found["loss_difference"] = max(abs(a - b) for a, b in pairs)


def cell(value: Any) -> str:
    if not isinstance(value, (int, float)):
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def main() -> int:
    options = parse()
    if options.config:
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        print(json.dumps(run(options)))
        return 0
    runs = Runs(options)
    results = {name: runs.run(name) for name in CONFIGS}
    compared(results)
    count = results["plain"].get("parameters", 0) / 1e6
    print(
        f"GPT of {count:.0f} M parameters, bf16-mixed, {options.batch} x {options.seq} tokens a"
        f" step, torch {torch.__version__}"
    )
    print(f"{'':28}" + "".join(f"{title:>14}" for title in COLUMNS.values()))
    for name, found in results.items():
        values = "".join(f"{cell(found.get(key)):>14}" for key in COLUMNS)
        print(f"{CONFIGS[name].title:28}{found.get('error') or values}", flush=True)
    deepest = {}
    if options.cap:
        print(f"\nlargest that trains in {options.cap:g} GiB, batch 1")
        for name, first in (("plain", 8), ("zero2", 16), ("zero3", 32)):
            deepest[name] = runs.deepest(name, first)
            size = deepest[name].get("parameters", 0) / 1e6
            layers, reason = deepest[name].get("layers", 0), deepest[name]["ended"]
            print(f"{CONFIGS[name].title:28}{size:7.0f} M, {layers} layers ({reason})", flush=True)
    folder = os.environ.get("OUT")
    if folder:
        record = {"options": vars(options), "results": results, "deepest": deepest}
        (Path(folder) / "gpu_offload.json").write_text(json.dumps(record, indent=1))
    return int(any("error" in found for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
