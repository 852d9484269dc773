"""Runs a program under DDP and the stages and says what came of it.

An outcome is *equal*, *refused* (an error of our own, on every rank), *discarded* (DDP itself
fails) or a *finding*: other numbers, an error of torch, a hang, a process that died.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from tests.fuzz import ops_hooks  # noqa: F401 - registers its kinds
from tests.fuzz.module import case_of
from tests.fuzz.program import Program
from tests.support.runs import (
    STAGES,
    ParityRun,
    RunError,
    StrategyLike,
    compare_stage,
    fine_strategy,
    run_under_each,
)

Verdict = Literal["equal", "refused", "discarded", "finding"]
# Errors that say what to do. Ranks that run the same program may not get out of step, so
# RankMismatchError is none of them.
REFUSALS = (
    "NotImplementedError",
    "MisconfigurationException",
    "ShardedParameterError",
    "PeerFailedError",
    "ValueError",
    "RuntimeError",
    "TypeError",
)
OUR_FRAME = re.compile(r'File "[^"]*lightning_zero/[^"]*", line \d+, in \w+')
FRAME = re.compile(r'^  File "[^"]*", line \d+, in .*$', re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """What came of a program under one stage."""

    stage: str
    verdict: Verdict
    detail: str = ""


def run_program(
    program: Program, stages: tuple[str, ...] = STAGES, timeout: float = 40.0
) -> list[Outcome]:
    """Run a program on two processes; one outcome for each stage."""
    case = case_of(program)
    strategies: dict[str, StrategyLike] = {case.reference: case.reference}
    save_format = program.resume or "full"
    for stage in stages:
        strategies[stage] = partial(fine_strategy, stage, program.bucket_bytes, save_format)  # type: ignore[arg-type]
    results = run_under_each(case, strategies, 2, timeout=timeout)
    failed = [result for result in results[case.reference] if isinstance(result, RunError)]
    if failed:
        return [Outcome("ddp", "discarded", failed[0].message)]
    run = ParityRun(case, results)
    return [_judge(run, stage) for stage in stages]


def _judge(run: ParityRun, stage: str) -> Outcome:
    errors = [result for result in run.by_strategy[stage] if isinstance(result, RunError)]
    if errors:
        if len(errors) == len(run.by_strategy[stage]) and all(map(is_stated, errors)):
            return Outcome(stage, "refused", _first_words(errors))
        return Outcome(stage, "finding", "\n".join(error.traceback for error in errors))
    try:
        compare_stage(run, stage, 2)
    except AssertionError as error:
        return Outcome(stage, "finding", str(error))
    return Outcome(stage, "equal")


def is_stated(error: RunError) -> bool:
    """Whether an error is a refusal of our own: raised by our code and of a class that says so."""
    frames = FRAME.findall(error.traceback)
    is_ours = bool(frames) and OUR_FRAME.search(frames[-1]) is not None
    return is_ours and error.message.split(":")[0] in REFUSALS


def _first_words(errors: list[RunError]) -> str:
    own = [error for error in errors if not error.message.startswith("PeerFailedError")]
    return (own or errors)[0].message[:160]


def shrink(
    program: Program,
    still_fails: Callable[[Program], bool],
    max_runs: int = 60,
) -> Program:
    """The smallest program, by taking one thing after another away, for which it still fails."""
    runs = 0
    while True:
        for simpler in program.simpler():
            if runs >= max_runs:
                return program
            runs += 1
            if still_fails(simpler):
                program = simpler
                break
        else:
            return program


def fails_at(stage: str, like: str = "") -> Callable[[Program], bool]:
    """Whether a program is a finding at a stage, with ``like`` in its text."""

    def still_fails(program: Program) -> bool:
        outcomes = run_program(program, (stage,))
        return any(o.verdict == "finding" and like in o.detail for o in outcomes)

    return still_fails
