"""Step time over a slow link against what it can't beat; started by slow_link.sh.

A step can't be shorter than the computation alone, nor than the time that the bytes it sends take
at the rate of the link: the floor is the larger of the two. `alone` trains the same model in as
many processes at once, without communication, in the same rounds.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Sequence

from harness.backends import split_name
from harness.launch import Hosts, clean_up_when_terminated
from harness.options import add_job_options, job_of
from harness.report import Round, Spread, print_table
from harness.rounds import Measured, run_rounds

DEFAULT_BACKENDS = ("lightning_ddp", "zero1", "zero2", "zero3", "fsdp2")
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


def bytes_per_s(rate: str) -> float:
    """A rate as tc writes it, such as 200mbit."""
    found = re.fullmatch(r"([\d.]+)([kmg]?)bit", rate)
    if not found:
        raise ValueError(f"Expected a rate like 200mbit or 1gbit, got {rate!r}.")
    return float(found[1]) * UNITS[found[2]] / 8


def compute_alone(backend: str) -> str:
    """The backend without communication to compare with: in the same loop."""
    plain, _ = split_name(backend)
    return "lightning_alone" if plain.startswith(("zero", "lightning")) else "alone"


def _floor_ms(own: Round, alone: Round, rate: float) -> float:
    wire_ms = 1e9 * (own.sent_mb or 0.0) / rate
    return max(alone.step_ms, wire_ms)


def _row(name: str, measured: Measured, rate: float) -> list[str]:
    alone = {r.number: r for r in measured.rounds if r.name == compute_alone(name)}
    own = [r for r in measured.rounds if r.name == name and r.number in alone]
    if not own:
        return [name, *["-"] * 7]
    middle = statistics.median
    over = Spread.of([r.step_ms / _floor_ms(r, alone[r.number], rate) for r in own])
    return [
        name,
        f"{middle(r.step_ms for r in own):,.0f}",
        f"{middle(alone[r.number].step_ms for r in own):,.0f}",
        f"{middle(r.sent_mb or 0.0 for r in own):,.1f}",
        f"{middle(1e9 * (r.sent_mb or 0.0) / rate for r in own):,.0f}",
        f"{middle(_floor_ms(r, alone[r.number], rate) for r in own):,.0f}",
        str(over),
        f"{middle(r.foreign_cpu or 0.0 for r in own):.0%}",
    ]


def _with_alone(backends: Sequence[str]) -> list[str]:
    """Each round starts with the computation alone, as often as the backends need it."""
    needed = {compute_alone(name): None for name in backends}
    return list(dict.fromkeys([*needed, *backends]))


def main() -> int:
    """Run the rounds and report; 1 if a backend failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_job_options(parser, DEFAULT_BACKENDS)
    parser.set_defaults(device="cpu", steps=6, warmup=2)
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--rate", required=True, help="of the link, as tc writes it")
    parser.add_argument("--namespaces", nargs=2, required=True, metavar="NAME")
    parser.add_argument("--master-address", required=True, metavar="ADDRESS")
    parser.add_argument("--interface", required=True, metavar="DEVICE")
    options = parser.parse_args()
    rate = bytes_per_s(options.rate)
    hosts = Hosts(2, tuple(options.namespaces), options.master_address, options.interface)
    names = _with_alone(options.backends)
    measured = run_rounds(names, options.rounds, job_of(options), hosts, options.out)
    heading = ["backend", "ms/step", "alone ms", "sent MB", "wire ms", "floor ms"]
    table = [[*heading, "step / floor", "foreign CPU"]]
    table += [_row(name, measured, rate) for name in names]
    print_table(f"GPT {options.size}, 2 ranks over {options.rate}", table)
    for name, error in measured.errors.items():
        print(f"{name} failed: {error}")
    return 1 if measured.errors else 0


if __name__ == "__main__":
    clean_up_when_terminated()
    sys.exit(main())
