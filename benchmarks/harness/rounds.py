"""Runs backends in interleaved rounds, A B C A B C, so that a drift of the machine hits all."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from harness.job import Job
from harness.launch import Hosts, run_backend
from harness.report import Round, make_round


class Measured(NamedTuple):
    """Everything that the rounds brought."""

    rounds: list[Round]
    errors: dict[str, str]


def append_json(path: str | None, record: dict[str, Any]) -> None:
    """One line of JSON; nothing without a path."""
    if path:
        with open(path, "a") as file:
            file.write(json.dumps(record) + "\n")


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    model = platform.processor()
    try:
        with open("/proc/cpuinfo") as file:
            lines = [line for line in file if line.startswith("model name")]
        model = lines[0].split(":", 1)[1].strip() if lines else model
    except OSError:
        pass
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"cpu": model, "cores": os.cpu_count(), "gpus": gpus, "torch": torch.__version__}


def run_rounds(
    names: Sequence[str], num_rounds: int, job: Job, hosts: Hosts, out: str | None
) -> Measured:
    """Each backend once per round, in fresh processes.

    A backend that fails is left out of the later rounds; the others go on.
    """
    rounds: list[Round] = []
    errors: dict[str, str] = {}
    common = {"job": dataclasses.asdict(job), "world_size": hosts.world_size, **machine()}
    for number in range(num_rounds):
        for name in names:
            if name in errors:
                continue
            outcome = run_backend(name, job, hosts)
            if outcome.error:
                errors[name] = f"round {number + 1}: {outcome.error}"
                failure = {"name": name, "error": errors[name], "logs": outcome.logs}
                append_json(out, {"kind": "failure", **failure, **common})
                print(f"{name} failed: {errors[name]}", flush=True)
                continue
            done = make_round(name, number, job, outcome.ranks)
            rounds.append(done)
            append_json(out, {"kind": "round", **dataclasses.asdict(done), **common})
            print(f"round {number + 1}/{num_rounds} {name}: {done.step_ms:.1f} ms", flush=True)
    return Measured(rounds, errors)
