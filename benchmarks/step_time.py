"""Step time, memory and bytes of zero1/2/3 against DDP and FSDP2, all in one invocation.

    python benchmarks/step_time.py --rounds 5 --out step_time.jsonl --plot step_time.png

Every figure is explained in README.md beside this file.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import sys

from harness.backends import DEFAULT_BACKENDS
from harness.launch import Hosts, clean_up_when_terminated, private_loopback
from harness.options import add_job_options, job_of, world_size_of
from harness.report import plot, print_errors, print_table, space_rows, summarise, time_rows
from harness.rounds import append_json, run_rounds

REFERENCES = ("lightning_ddp", "fsdp2")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_job_options(parser, DEFAULT_BACKENDS)
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--world-size", type=int, metavar="N", help="default: 2, or one per GPU")
    parser.add_argument(
        "--references",
        nargs="+",
        default=list(REFERENCES),
        metavar="NAME",
        help="backends to divide step times by",
    )
    parser.add_argument(
        "--no-namespace",
        action="store_true",
        help="don't make a network namespace to count bytes in, even as root",
    )
    parser.add_argument("--plot", metavar="PNG", help="draw a bar plot (needs matplotlib)")
    options = parser.parse_args()
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib, which is not installed")
    return options


def main() -> int:
    """Run the rounds and report; 1 if a backend failed."""
    options = _options()
    job = job_of(options)
    world_size = world_size_of(options.world_size, job.device)
    place = (
        contextlib.nullcontext(Hosts(world_size))
        if options.no_namespace or job.device == "cuda"
        else private_loopback(world_size)
    )
    with place as hosts:
        measured = run_rounds(options.backends, options.rounds, job, hosts, options.out)
    summaries = summarise(options.backends, measured.rounds, measured.errors, options.references)
    title = (
        f"GPT {job.size}, {world_size} ranks on {job.device}, {job.precision}, "
        f"micro batch {job.micro_batch} x {job.seq} tokens"
    )
    print_table(f"Time: {title}", time_rows(summaries, options.references))
    print_table("Private memory and bytes of a rank", space_rows(summaries))
    print_errors(summaries)
    for summary in summaries:
        record = dataclasses.asdict(summary)
        record.pop("rounds")
        append_json(options.out, {"kind": "summary", **record})
    if options.plot:
        plot(summaries, options.references[0], options.plot)
    return 1 if measured.errors else 0


if __name__ == "__main__":
    clean_up_when_terminated()
    sys.exit(main())
