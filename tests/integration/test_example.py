"""The demo runs, shows what it promises and writes a checkpoint that plain PyTorch can read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.scripts import run_ahead

SCRIPT = Path(__file__).parents[2] / "examples" / "train_gpt.py"
SMALL = "--layers 2 --width 32 --heads 2 --context 32 --ngram-buckets 64 --batch-size 2"
SHORT = "--max-steps 4 --validations 1 --val-bytes 2048 --sample-bytes 20"


RUNS = {"zero3": 2, "zero2": 1, "ddp": 2}  # the strategy and its devices
Done = subprocess.CompletedProcess[str]


def demo(strategy: str, devices: int, out: Path) -> Done:
    options = ["--strategy", strategy, "--devices", str(devices), "--out", str(out)]
    command = [sys.executable, str(SCRIPT), *options, "--accelerator", "cpu"]
    return subprocess.run(
        [*command, *SMALL.split(), *SHORT.split()],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def run_of(folder: Path) -> Iterator[Callable[[str], Done]]:
    """The demo under a strategy, from its start to its end."""
    runs = {name: partial(demo, name, devices, folder / name) for name, devices in RUNS.items()}
    with run_ahead(runs) as result:
        yield result


@pytest.mark.parametrize("strategy", RUNS)
def test_the_demo_trains_reports_saves_and_writes(
    run_of: Callable[[str], Done], folder: Path, strategy: str
) -> None:
    done = run_of(strategy)
    assert done.returncode == 0, done.stdout + done.stderr
    if strategy != "ddp":
        assert "gather window" in done.stdout
    (file,) = (folder / strategy).glob("*.ckpt")
    checkpoint = torch.load(file, weights_only=True)
    assert all(torch.isfinite(value).all() for value in checkpoint["state_dict"].values())
    moments = checkpoint["optimizer_states"][0]["state"]
    assert len(moments) == sum(
        len(group["params"]) for group in checkpoint["optimizer_states"][0]["param_groups"]
    )
