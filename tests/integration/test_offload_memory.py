"""A model whose states exceed the memory that the process may have trains all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "offload_memory.py"
ALLOWANCE_MB, ADAM_MB = 64, 320  # on disk rests twice as much: weights and gradients, too


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits what a process allocates")
def test_states_of_ten_times_the_memory_train_with_the_losses_of_plain_pytorch(
    tmp_path: Path,
) -> None:
    """The limit is real: without offloading the run ends with an error."""
    options = ["--limit=data", "--width=512", "--staging=16", "--steps=2", f"--folder={tmp_path}"]
    sizes = [f"--allowance={ALLOWANCE_MB}", f"--state={ADAM_MB}"]
    command = [sys.executable, str(BENCHMARK), *options, *sizes]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "held      " in run.stdout
    assert not list(tmp_path.iterdir())
