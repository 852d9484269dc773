"""The demo runs, shows what it promises and writes a checkpoint that plain PyTorch can read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "train_gpt.py"
SMALL = "--layers 2 --width 32 --heads 2 --context 32 --ngram-buckets 64 --batch-size 2"
SHORT = "--max-steps 4 --validations 1 --val-bytes 2048 --sample-bytes 20"


@pytest.mark.parametrize(("strategy", "devices"), [("zero3", 2), ("zero2", 1), ("ddp", 2)])
def test_the_demo_trains_reports_saves_and_writes(
    tmp_path: Path, strategy: str, devices: int
) -> None:
    options = ["--strategy", strategy, "--devices", str(devices), "--out", str(tmp_path)]
    command = [sys.executable, str(SCRIPT), *options, "--accelerator", "cpu"]
    done = subprocess.run(
        [*command, *SMALL.split(), *SHORT.split()],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if strategy != "ddp":
        assert "gather window" in done.stdout
    (file,) = tmp_path.glob("*.ckpt")
    checkpoint = torch.load(file, weights_only=True)
    assert all(torch.isfinite(value).all() for value in checkpoint["state_dict"].values())
    moments = checkpoint["optimizer_states"][0]["state"]
    assert len(moments) == sum(
        len(group["params"]) for group in checkpoint["optimizer_states"][0]["param_groups"]
    )
