"""Passes over parameters and gradients that a backend makes beyond plain training.

    python benchmarks/passes.py

One rank of two counts every operator of a step; the same step in a single process without any
strategy is subtracted. README.md beside this file says what a pass is and what isn't seen.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any, NamedTuple

from harness.job import Job
from harness.launch import Hosts, clean_up_when_terminated, run_backend
from harness.model import parameter_bytes
from harness.options import add_job_options, job_of
from harness.report import print_table
from harness.rounds import append_json

DEFAULT_BACKENDS = ("lightning_ddp", "zero1", "zero2", "zero3", "ddp", "fsdp2")
LEAST_PASSES = 0.005  # smaller surpluses are left out of the tables
OPTIMIZER_KERNELS = ("_fused_adamw_",)


class Surplus(NamedTuple):
    """One operator's passes beyond plain training, in units of all parameters' bytes."""

    name: str
    calls: float
    read: float
    written: float


def surpluses(
    ranks: dict[str, list[float]], plain: dict[str, list[float]], unit_bytes: int
) -> list[Surplus]:
    """By operator, largest first; the optimizer's kernels are left out."""
    nothing = [0.0, 0.0, 0.0]
    found = []
    for name in {*ranks, *plain} - set(OPTIMIZER_KERNELS):
        calls, read, written = (
            a - b for a, b in zip(ranks.get(name, nothing), plain.get(name, nothing), strict=True)
        )
        found.append(Surplus(name, calls, read / unit_bytes, written / unit_bytes))
    large = [s for s in found if max(abs(s.read), abs(s.written)) >= LEAST_PASSES]
    return sorted(large, key=lambda s: -abs(s.read) - abs(s.written))


def _operator_rows(found: list[Surplus]) -> list[list[str]]:
    table = [["operator", "calls", "reads", "writes", "passes"]]
    for s in [*found, _total(found)]:
        passes = s.read + s.written
        numbers = (f"{number:+.3f}" for number in (s.read, s.written, passes))
        table.append([s.name, f"{s.calls:+.1f}", *numbers])
    return table


def _total(found: list[Surplus]) -> Surplus:
    sums = (sum(column) for column in zip(*(s[1:] for s in found), strict=True))
    return Surplus("total", *sums) if found else Surplus("total", 0.0, 0.0, 0.0)


def _print_backend(name: str, result: dict[str, Any], found: list[Surplus]) -> None:
    print_table(f"{name}: passes beyond plain training, in units of P", _operator_rows(found))
    for collective, (calls, sent) in sorted(result["collectives"].items()):
        print(f"  c10d {collective}: {calls:.1f} calls, {sent / 1e6:.1f} MB")
    if result["counters"]:
        counted = ", ".join(f"{k} {v:,.1f}" for k, v in result["counters"].items())
        print(f"  package's counters: {counted}")
    print()


def _summary_row(name: str, result: dict[str, Any], found: list[Surplus] | None) -> list[str]:
    passes = None if found is None else [s.read + s.written for s in found]
    return [
        name,
        "-" if passes is None else f"{sum(p for p in passes if p > 0):.2f}",
        "-" if passes is None else f"{sum(passes):+.2f}",
        f"{sum(calls for calls, _ in result['collectives'].values()):.0f}",
        f"{result['allocations']:.1f}",
        f"{result['allocated_bytes'] / 1e6:.1f}",
        f"{result['page_faults']:,.0f}",
    ]


def _measure(name: str, job: Job, world_size: int, out: str | None) -> dict[str, Any] | None:
    outcome = run_backend(name, job, Hosts(world_size))
    if outcome.error:
        print(f"{name} failed: {outcome.error}", flush=True)
        failure = {"name": name, "error": outcome.error, "logs": outcome.logs}
        append_json(out, {"kind": "failure", **failure})
        return None
    append_json(out, {"kind": "passes", "name": name, **outcome.ranks[0]})
    return outcome.ranks[0]


def main() -> int:
    """Count the plain step, then each backend's; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_job_options(parser, DEFAULT_BACKENDS)
    parser.set_defaults(steps=4, device="cpu")
    parser.add_argument("--world-size", type=int, default=2, metavar="N")
    options = parser.parse_args()
    job = dataclasses.replace(job_of(options), task="passes")
    unit_bytes = parameter_bytes(job.size, job.seq)
    plain = _measure("alone", job, 1, options.out)
    if plain is None:
        return 1
    heading = ["backend", "passes added", "net", "c10d calls", "fresh storages", "fresh MB"]
    heading.append("page faults")
    table = [heading, _summary_row("plain training", plain, None)]
    for name in options.backends:
        result = _measure(name, job, options.world_size, options.out)
        if result is None:
            table.append([name, *["-"] * (len(heading) - 1)])
            continue
        found = surpluses(result["operators"], plain["operators"], unit_bytes)
        _print_backend(name, result, found)
        table.append(_summary_row(name, result, found))
    title = (
        f"A step of rank 0 of {options.world_size}: GPT {job.size}, P = {unit_bytes / 1e6:.1f} MB"
    )
    print_table(title, table)
    return 0 if all(row[1] != "-" for row in table[2:]) else 1


if __name__ == "__main__":
    clean_up_when_terminated()
    sys.exit(main())
