"""The rank side of the process pool: a long-lived process that runs one task after another.

A task names a module-level function; the worker runs it with the environment that `torchrun` would
have set, reports the outcome, and takes down the process group, so that the next task finds a
process as good as new without paying for the imports again.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

FINISH = b"finish"
# tqdm keeps one daemon monitor for the life of the process; the code under test leaks nothing.
TOLERATED_THREADS = frozenset({"TMonitor"})


@dataclass(frozen=True)
class Task:
    """One call on one rank; the function travels by name, so that decorated tests can be sent."""

    module: str
    qualname: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    env: Mapping[str, str]
    init_group: bool = False


@dataclass(frozen=True)
class Outcome:
    """What one rank has to say about a task."""

    rank: int
    value: Any = None
    error_type: str | None = None
    message: str = ""
    traceback: str = ""
    seconds: float = 0.0
    leaked_threads: list[str] = field(default_factory=list)

    @property
    def is_failure(self) -> bool:
        return self.error_type is not None


def resolve(module: str, qualname: str) -> Callable[..., Any]:
    """The function of that name; of a test under `@distributed` it is the undecorated body."""
    target: Any = importlib.import_module(module)
    for name in qualname.split("."):
        target = getattr(target, name)
    return getattr(target, "__distributed_body__", target)


def ask_no_name_server() -> None:
    """Look names of hosts up in this machine's own list only (glibc; nothing happens elsewhere).

    torch's store asks for the name of whoever connects. A name server that is slow to say that it
    does not know costs every connection seconds.
    """
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)
    if configure is not None:
        configure(b"hosts", b"files")


def worker_main(connection: Connection, log_path: str, stacks_path: str) -> None:
    """Serve tasks until the parent closes the connection."""
    os.setsid()  # children of a task (spawn launchers) die with the worker's process group
    _redirect_output(log_path)
    ask_no_name_server()
    stacks = Path(stacks_path).open("w")  # noqa: SIM115 - must outlive every signal
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable(file=stacks)
    _exit_with_parent()

    import torch

    torch.set_num_threads(1)
    base_env = dict(os.environ)
    while True:
        try:
            payload = connection.recv_bytes()
        except EOFError:
            return
        outcome = _run(payload)
        connection.send_bytes(_dump(outcome))
        # The group stays until every rank has answered: the store lives in rank 0, and taking it
        # away early would break a peer that is still at work.
        if connection.recv_bytes() != FINISH:
            return
        _clean_up(base_env)
        connection.send_bytes(FINISH)


def _run(payload: bytes) -> Outcome:
    start = time.monotonic()
    rank = -1
    threads = set(threading.enumerate())
    try:
        task: Task = pickle.loads(payload)
        rank = int(task.env["RANK"])
        os.environ.update(task.env)
        function = resolve(task.module, task.qualname)
        _seed_and_group(task)
        value = function(*task.args, **task.kwargs)
        del function
    except BaseException as error:
        # Peers that wait for this rank notice the closed sockets and fail at once.
        trace = "".join(traceback.format_exception(error))
        outcome = Outcome(
            rank, None, type(error).__name__, str(error), trace, time.monotonic() - start
        )
        error.__traceback__ = None
        _destroy_group()
        return outcome
    return Outcome(
        rank,
        value,
        seconds=time.monotonic() - start,
        leaked_threads=_new_threads(threads),
    )


def _seed_and_group(task: Task) -> None:
    import torch

    torch.manual_seed(0)
    if task.init_group:
        torch.distributed.init_process_group("gloo")


def _new_threads(before: set[threading.Thread]) -> list[str]:
    deadline = time.monotonic() + 2.0
    while True:
        new = [
            f"{type(thread).__name__} {thread.name!r}"
            for thread in threading.enumerate()
            if thread not in before and type(thread).__name__ not in TOLERATED_THREADS
        ]
        if not new or time.monotonic() > deadline:
            return new
        time.sleep(0.02)  # a thread that was told to stop may need a moment


def _dump(outcome: Outcome) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception as error:
        note = f"the result of rank {outcome.rank} can't be pickled: {error}"
        return pickle.dumps(Outcome(outcome.rank, None, type(error).__name__, note, note))


def _destroy_group() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        try:
            dist.destroy_process_group()
        except Exception:
            traceback.print_exc()


def _clean_up(base_env: Mapping[str, str]) -> None:
    import torch

    _destroy_group()
    os.environ.clear()
    os.environ.update(base_env)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    warnings.resetwarnings()
    warnings.simplefilter("default")
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()


def _redirect_output(log_path: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives with the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    warnings.simplefilter("default")


def _exit_with_parent() -> None:
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
