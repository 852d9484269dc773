"""Command-line options that the benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from harness.backends import BACKENDS, MALLOC_SUFFIX, split_name
from harness.job import Job
from harness.model import SIZES


def add_job_options(parser: argparse.ArgumentParser, backends: Sequence[str]) -> None:
    """What to run."""
    names = "; ".join(f"{name}: {meaning}" for name, meaning in BACKENDS.items())
    parser.add_argument(
        "--backends",
        nargs="+",
        default=list(backends),
        metavar="NAME",
        help=f"{names}. Append {MALLOC_SUFFIX} to let glibc keep freed memory.",
    )
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--micro-batch", type=int, default=1, metavar="N")
    parser.add_argument("--seq", type=int, default=128, metavar="N", help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="measured steps")
    parser.add_argument("--warmup", type=int, default=3, metavar="N", help="steps before them")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument(
        "--clip", type=float, default=1.0, metavar="NORM", help="gradient norm; 0: no clipping"
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of a rank")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="for one run")
    parser.add_argument("--out", metavar="FILE", help="append JSON lines to FILE")


def job_of(options: argparse.Namespace) -> Job:
    """The options as a job (for any backend); checks the backends' names."""
    for name in options.backends:
        split_name(name)
    if options.precision == "bf16" and options.clip:
        raise ValueError(
            f"Expected --clip 0 with --precision bf16, got {options.clip}: under mixed precision "
            "the Trainer does not clip for a fused optimizer."
        )
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return Job(
        backend="",
        size=options.size,
        micro_batch=options.micro_batch,
        seq=options.seq,
        steps=options.steps,
        warmup=options.warmup,
        device=device,
        precision=options.precision,
        clip_norm=options.clip,
        threads=options.threads,
        timeout_s=options.timeout,
    )


def world_size_of(requested: int | None, device: str) -> int:
    """As asked for; else one rank per GPU, or two on a CPU."""
    if requested is not None:
        return requested
    return torch.cuda.device_count() if device == "cuda" else 2
