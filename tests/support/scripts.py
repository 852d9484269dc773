"""Whole scripts under Lightning's own popen launcher, for what a user sees when a run goes wrong.

The script runs as a user would start it; each of its processes is watched by a parent that only
waits for it and writes down how it ended, because Lightning reaps its children without telling.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
AT_A_TIME = 3
ROOT = Path(__file__).resolve().parents[2]

# Placed in front of the user's script. It runs before any thread exists, so that a fork is safe.
_PRELUDE = """\
import ctypes, json, os, signal, sys, time

def _watch_this_process():
    start = time.monotonic()
    watcher = os.getpid()
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # die with the watcher
        if os.getppid() != watcher:
            os._exit(1)
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: os.kill(child, number))
    while True:
        try:
            _, status = os.waitpid(child, 0)
            break
        except InterruptedError:
            continue
    code = os.waitstatus_to_exitcode(status)
    rank = os.environ.get("LOCAL_RANK", "0")
    with open(os.path.join({folder!r}, f"exit_{{rank}}.json"), "w") as file:
        json.dump({{"code": code, "seconds": time.monotonic() - start}}, file)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if code < 0:
        os.kill(watcher, -code)
    os._exit(code % 256)

_watch_this_process()
sys.path.insert(0, {root!r})
from tests.support.worker import ask_no_name_server
ask_no_name_server()
"""


@dataclass(frozen=True)
class ScriptResult:
    """How a script ended, and what it printed on all its ranks."""

    returncode: int
    exit_codes: Mapping[int, int]
    """By local rank; a rank is missing if it never started or could not be waited for."""
    output: str
    seconds: float


class ScriptTimeout(AssertionError):
    """The script did not end by itself."""


def run_script(
    source: str, folder: Path, *, timeout: float = 120.0, args: tuple[str, ...] = ()
) -> ScriptResult:
    """Run the text of a script in a process of its own and wait until all its processes ended.

    Args:
        source: the script; it may import `lightning_zero` and `tests`.
        folder: where the script, its output and the exit codes are written.
        timeout: seconds after which every process of the script is killed.
        args: command line arguments of the script.

    Raises:
        ScriptTimeout: the script was still running; the message has what it printed.
    """
    prelude = _PRELUDE.format(folder=str(folder), root=str(ROOT))
    script = folder / "script.py"
    script.write_text(prelude + textwrap.dedent(source))
    log = folder / "output.txt"
    start = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, str(script), *args],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            env=_environment(),
            start_new_session=True,
        )
        try:
            _wait_for_session(process, start + timeout)
        except subprocess.TimeoutExpired:
            raise ScriptTimeout(
                f"still running after {timeout:.0f} s:\n{log.read_text(errors='replace')}"
            ) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    exit_codes = {
        int(path.stem.removeprefix("exit_")): json.loads(path.read_text())["code"]
        for path in folder.glob("exit_*.json")
    }
    seconds = time.monotonic() - start
    return ScriptResult(process.returncode, exit_codes, log.read_text(errors="replace"), seconds)


@contextlib.contextmanager
def run_ahead(scripts: Mapping[str, Callable[[], T]]) -> Iterator[Callable[[str], T]]:
    """Run scripts ahead of the tests that ask for how they ended, some at a time.

    A script imports on one core, first in one process and then in the next, and waits for a time if
    it is to go wrong. Nothing is run before the first is asked for; that one is run first.
    """
    futures: dict[str, Future[T]] = {}
    with ThreadPoolExecutor(AT_A_TIME) as executor:

        def result(name: str) -> T:
            if not futures:
                for other in sorted(scripts, key=lambda other: other != name):
                    futures[other] = executor.submit(scripts[other])
            return futures[name].result()

        yield result
        executor.shutdown(wait=False, cancel_futures=True)


def _wait_for_session(process: subprocess.Popen[bytes], deadline: float) -> None:
    """Wait for the process and for all it has started (they share its process group)."""
    process.wait(timeout=max(0.0, deadline - time.monotonic()))
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise subprocess.TimeoutExpired(process.args, 0.0)


def _environment() -> dict[str, str]:
    """The caller's environment, less everything that would make the script part of a group."""
    of_a_launcher = ("RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "GROUP_", "LOCAL_", "PL_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(of_a_launcher)}
    return {**env, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
