"""Random programs of user code: the numbers of DDP, or an error of ours on every rank.

`python -m tests.fuzz` runs many more of them, repeats one and makes it smaller.
"""

from __future__ import annotations

import pytest

from tests.fuzz.program import make_program
from tests.fuzz.runner import run_program


@pytest.mark.parametrize("seed", range(30))
def test_a_random_program_gives_the_numbers_of_ddp_or_is_refused(seed: int) -> None:
    program = make_program(seed)
    findings = [outcome for outcome in run_program(program) if outcome.verdict == "finding"]
    shown = "\n".join(f"{outcome.stage}: {outcome.detail}" for outcome in findings)
    assert not findings, f"python -m tests.fuzz --seed {seed}\n{program}\n{shown}"


def test_a_seed_always_gives_the_same_program_and_a_simpler_one_has_less() -> None:
    program = make_program(11)
    assert program == make_program(11)
    assert all(cut != program for cut in program.simpler())
    assert min(len(cut.ops) for cut in program.simpler()) < len(program.ops)
