"""Trains a model whose Adam state is ten times the memory that the process may have.

Three runs in processes of their own, with the same weights and data: plain PyTorch without a limit,
and, under the limit, this package with and without offloading to disk. The one without has to fail.

Plain PyTorch steps every parameter in the backward, as soon as it has its gradient, so that its
gradients need no memory; with `--mapped` its weights and Adam state are mapped files, for sizes
that do not fit in memory. No file of weights is ever read as a whole by the process with the limit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

CGROUPS = Path("/sys/fs/cgroup/memory")
MB = 10**6
GROUP = "zerobench"
LAYERS_PER_BLOCK = 3
KINDS = ("plain", "offloaded", "held")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--allowance", type=int, default=1200, help="MB; see --limit")
    parser.add_argument(
        "--state", type=int, default=0, help="MB of Adam's two moments; 0: ten times the allowance"
    )
    parser.add_argument(
        "--limit",
        choices=("cgroup", "data"),
        default="cgroup" if os.access(CGROUPS, os.W_OK) else "data",
        help="cgroup: all memory of the process, its interpreter and file cache included. data:"
        " RLIMIT_DATA, what it may allocate besides what it has after a small training run",
    )
    parser.add_argument("--width", type=int, default=2048, help="of a layer")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--staging", type=int, default=256, help="MB of staging memory")
    parser.add_argument("--mapped", action="store_true", help="the reference uses mapped files")
    parser.add_argument("--folder", type=Path, help="on a local disk; a temporary one")
    parser.add_argument("--verbose", action="store_true", help="show what the runs print")
    parser.add_argument("--run", choices=KINDS, help=argparse.SUPPRESS)
    return parser.parse_args()


def num_layers(options: argparse.Namespace) -> int:
    """So many that Adam's two moments take what is asked for."""
    state = options.state or 10 * options.allowance
    return LAYERS_PER_BLOCK * -(-state * MB // (LAYERS_PER_BLOCK * options.width**2 * 8))


# -- the limit


class Limit:
    """What this process may have from now on, and how much of it it had at most."""

    def __init__(self, kind: str, nbytes: int) -> None:
        self.kind, self.nbytes = kind, nbytes
        self._group: Path | None = None
        self._base = self._peak = data_bytes()
        if kind == "cgroup":
            self._group = CGROUPS / f"{GROUP}{os.getpid()}"
            self._group.mkdir()
            (self._group / "memory.limit_in_bytes").write_text(str(nbytes))
            (self._group / "cgroup.procs").write_text(str(os.getpid()))
        else:
            resource.setrlimit(resource.RLIMIT_DATA, (self._base + nbytes,) * 2)
            threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self._peak = max(self._peak, data_bytes())
            time.sleep(0.005)

    @property
    def peak_bytes(self) -> int:
        if self._group is not None:
            return int((self._group / "memory.max_usage_in_bytes").read_text())
        return self._peak - self._base


def data_bytes() -> int:
    """What RLIMIT_DATA limits: memory that is writable and nobody else's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("Expected 'VmData' in /proc/self/status.")


# -- the runs, each in a process of its own


def run(options: argparse.Namespace) -> dict[str, Any]:
    """What ``--run`` names."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # sums in one order, whatever Lightning sets
    limit = None
    if options.run != "plain" and options.limit == "cgroup":
        limit = Limit("cgroup", options.allowance * MB)  # the interpreter's memory is in there, too
    from harness.file_backed import Tower, plain_losses, trainer_losses

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    staging = options.staging << 20
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        if options.run != "plain" and limit is None:
            trainer_losses(Tower(folder, 64, 6, 1), 1, folder, staging)  # all threads are there
            limit = Limit("data", options.allowance * MB)
        begin = time.perf_counter()
        found: dict[str, Any]
        try:
            model = Tower(folder, options.width, num_layers(options), options.steps)
            if limit is None:
                states = folder if options.mapped else None
                found = {"losses": plain_losses(model, options.steps, states)}
            else:
                states = folder if options.run == "offloaded" else None
                found = trainer_losses(model, options.steps, states, staging)
        except (RuntimeError, OSError, MemoryError) as error:
            found = {"error": str(error).strip().splitlines()[0]}
        found["seconds"] = time.perf_counter() - begin
    if limit is not None:
        found["peak_mb"] = limit.peak_bytes / MB
    return found


def run_in_child(options: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Run this file again; a process that was killed counts as failed."""
    names = ("allowance", "state", "limit", "width", "steps", "staging", "folder")
    arguments = [f"--{name}={getattr(options, name)}" for name in names]
    command = [sys.executable, __file__, *arguments, f"--run={kind}"]
    child = subprocess.run(
        [*command, *(["--mapped"] if options.mapped else [])],
        stdout=subprocess.PIPE,
        stderr=None if options.verbose else subprocess.DEVNULL,
        text=True,
        check=False,
    )
    for group in CGROUPS.glob(f"{GROUP}*"):
        with contextlib.suppress(OSError):  # others are running
            group.rmdir()
    if child.returncode:
        return {"error": f"exit status {child.returncode}"}
    found: dict[str, Any] = json.loads(child.stdout.strip().splitlines()[-1])
    return found


def main() -> int:
    """Print one line per run. The exit status is 0 if the losses are equal and the run without
    offloading has failed.
    """
    options = parse()
    if options.run:
        print(json.dumps(run(options)))
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        options.folder = folder
        results = {kind: run_in_child(options, kind) for kind in KINDS}
    state_mb = num_layers(options) * options.width**2 * 8 / MB
    what = "all memory" if options.limit == "cgroup" else "what it allocates for training"
    print(
        f"{options.allowance} MB of allowance ({options.limit}: {what}), {state_mb:.0f} MB of Adam"
        f" state, {options.steps} steps"
    )
    for kind, found in results.items():
        peak, disk = found.get("peak_mb"), found.get("disk_bytes")
        facts = [
            found.get("error") or "losses " + " ".join(f"{x:.9g}" for x in found["losses"]),
            f"{found['seconds']:.0f} s" if "seconds" in found else "",
            f"peak {peak:.0f} MB" if peak else "no limit" if kind == "plain" else "",
            f"{disk / MB:.0f} MB on disk" if disk else "",
        ]
        print(f"{kind:10}" + "; ".join(fact for fact in facts if fact))
    offloaded, plain = (results[kind].get("losses") for kind in ("offloaded", "plain"))
    is_equal = plain is not None and offloaded == plain
    print("the losses are equal" if is_equal else "the losses differ")
    return 0 if is_equal and "error" in results["held"] else 1


if __name__ == "__main__":
    sys.exit(main())
