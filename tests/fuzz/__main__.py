"""Nightly: `python -m tests.fuzz --seeds 1000`. One seed: `python -m tests.fuzz --seed 17 -v`.

Outcomes are appended to a file, one line each; a run that was broken off goes on after them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.fuzz.ops import KINDS
from tests.fuzz.program import make_program
from tests.fuzz.runner import Outcome, fails_at, run_program, shrink
from tests.support.distributed import POOL
from tests.support.runs import STAGES


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="one seed only, shrunk if it is a finding")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), help="one stage only")
    parser.add_argument("--kinds", nargs="*", default=(), help="ops of these kinds only")
    parser.add_argument("--without", nargs="*", default=(), help="no ops of these kinds")
    parser.add_argument("--log", type=Path, help="file of the outcomes; resumed if it exists")
    parser.add_argument("--until-finding", action="store_true", help="stop at the first finding")
    parser.add_argument("-v", "--verbose", action="store_true", help="print every program")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    stages = STAGES if options.stage is None else (f"zero{options.stage}",)
    chosen = tuple(k for k in (options.kinds or KINDS) if k not in options.without)
    kinds = chosen if options.kinds or options.without else ()
    if options.seed is not None:
        return _one(options.seed, kinds, stages)
    done = _read(options.log)
    seeds = [s for s in range(options.start, options.start + options.seeds) if s not in done]
    outcomes = [outcome for known in done.values() for outcome in known]
    for seed in _with_progress(seeds):
        program = make_program(seed, kinds)
        if options.verbose:
            print(program, flush=True)
        begin = time.monotonic()
        found = run_program(program, stages)
        outcomes += found
        _append(options.log, seed, found, time.monotonic() - begin)
        findings = [outcome for outcome in found if outcome.verdict == "finding"]
        for outcome in findings:
            print(f"\n{program}\nFINDING at {outcome.stage}: {outcome.detail[-1500:]}", flush=True)
        if findings and options.until_finding:
            print(f"found at seed {seed}, the {seed - options.start + 1}. program")
            break
    _summarise(outcomes)
    return int(any(outcome.verdict == "finding" for outcome in outcomes))


def _one(seed: int, kinds: tuple[str, ...], stages: tuple[str, ...]) -> int:
    program = make_program(seed, kinds)
    print(program)
    outcomes = run_program(program, stages)
    for outcome in outcomes:
        print(f"{outcome.stage}: {outcome.verdict} {outcome.detail}")
    findings = [outcome for outcome in outcomes if outcome.verdict == "finding"]
    for outcome in findings[-1:]:
        smallest = shrink(program, fails_at(outcome.stage))
        print(f"\nsmallest that fails under {outcome.stage}:\n{smallest}")
        for again in run_program(smallest, (outcome.stage,)):
            print(again.detail)
    return int(bool(findings))


def _with_progress(seeds: list[int]) -> Iterable[int]:
    try:
        from rich.progress import track
    except ImportError:
        return _counted(seeds)
    return track(seeds, "programs") if sys.stdout.isatty() else _counted(seeds)


def _counted(seeds: list[int]) -> Iterator[int]:
    for index, seed in enumerate(seeds):
        if index % 25 == 0:
            print(f"{index} of {len(seeds)} programs", flush=True)
        yield seed


def _read(log: Path | None) -> dict[int, list[Outcome]]:
    if log is None or not log.exists():
        return {}
    lines: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()]
    return {line["seed"]: [Outcome(**outcome) for outcome in line["outcomes"]] for line in lines}


def _append(log: Path | None, seed: int, outcomes: list[Outcome], seconds: float) -> None:
    if log is not None:
        line = {"seed": seed, "seconds": round(seconds, 2), "outcomes": [vars(o) for o in outcomes]}
        with log.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _summarise(outcomes: list[Outcome]) -> None:
    print(f"\n{'stage':8}{'equal':>10}{'refused':>10}{'findings':>10}")
    counts = Counter((outcome.stage, outcome.verdict) for outcome in outcomes)
    for stage in STAGES:
        row = (counts[stage, "equal"], counts[stage, "refused"], counts[stage, "finding"])
        print(f"{stage:8}{row[0]:>10}{row[1]:>10}{row[2]:>10}")
    print(f"programs that DDP itself fails: {counts['ddp', 'discarded']}")
    words = Counter(o.detail[:100] for o in outcomes if o.verdict in ("refused", "discarded"))
    for text, count in words.most_common(12):
        print(f"{count:5} x {text}")


if __name__ == "__main__":
    try:
        code = main()
    finally:
        POOL.close()
    raise SystemExit(code)
