"""Plain functions on real processes: `run_on_ranks`, and `@distributed` for whole tests.

Importing torch, lightning and the package takes seconds, so processes are forked from a server that
has done it once, and are then kept and reused. A failure costs the pool (the next call gets fresh
processes); a process that hangs is made to show its stack, and is killed. Nothing here can hang
pytest.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from tests.support.worker import FINISH, Outcome, Task, worker_main

# What the server imports; the rest is imported by each process that needs it.
PRELOAD = ["tests.support.preload"]
DEFAULT_TIMEOUT = 120.0
# Once a rank has failed the others usually fail within moments; one that does not is hung.
GRACE_AFTER_FAILURE = 15.0
LOG_TAIL_CHARS = 3000


class RankFailure(AssertionError):
    """At least one rank raised or hung; the message has every rank's traceback or stack."""


@dataclass
class _Worker:
    process: ForkServerProcess
    connection: Connection
    log: Path
    stacks: Path
    log_offset: int = 0
    stacks_offset: int = 0

    def mark(self) -> None:
        self.log_offset = self.log.stat().st_size if self.log.exists() else 0
        self.stacks_offset = self.stacks.stat().st_size if self.stacks.exists() else 0

    def read_log(self) -> str:
        return _read_from(self.log, self.log_offset)[-LOG_TAIL_CHARS:]

    def read_stacks(self) -> str:
        return _read_from(self.stacks, self.stacks_offset)


@dataclass
class WorkerPool:
    """Processes that stay up from call to call; started when first needed."""

    workers: list[_Worker] = field(default_factory=list)
    folder: Path | None = None

    def grow(self, world_size: int) -> list[_Worker]:
        if any(not worker.process.is_alive() for worker in self.workers):
            self.kill()
        while len(self.workers) < world_size:
            self.workers.append(self._start(len(self.workers)))
        return self.workers[:world_size]

    def _start(self, slot: int) -> _Worker:
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="lightning_zero_ranks_"))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        ours, theirs = multiprocessing.Pipe()
        name = f"{slot}_{time.monotonic_ns()}"
        log, stacks = self.folder / f"log_{name}", self.folder / f"stacks_{name}"
        process = context.Process(target=worker_main, args=(theirs, str(log), str(stacks)))
        with _environment(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1"):
            process.start()
        theirs.close()
        return _Worker(process, ours, log, stacks)

    def kill(self) -> None:
        """End every process of the pool, with what each has started."""
        for worker in self.workers:
            if worker.process.pid is not None:
                # A worker that has not yet made its own process group is killed by its id below.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.process.pid, signal.SIGKILL)
            with contextlib.suppress(Exception):
                worker.process.kill()
            worker.connection.close()
        for worker in self.workers:
            worker.process.join(5.0)
        self.workers.clear()

    def close(self) -> None:
        self.kill()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None


POOL = WorkerPool()
# Registered after multiprocessing's own exit function, hence run before it joins our processes.
atexit.register(POOL.close)


def run_on_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = DEFAULT_TIMEOUT,
    expect_failure: bool = False,
    init_group: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Run a module-level function on `world_size` processes, as `torchrun` would start them.

    Args:
        function: found again by name in the workers; arguments and results are pickled.
        world_size: how many ranks take part.
        *args: passed to the function on every rank.
        timeout: seconds after which the ranks that have not answered count as hung.
        expect_failure: return the `Outcome` of each rank instead of raising.
        init_group: give the function a default gloo process group.
        **kwargs: passed to the function on every rank.

    Returns:
        The results in rank order, or the outcomes with `expect_failure`.

    Raises:
        RankFailure: a rank raised (without `expect_failure`), hung, died, or leaked a thread.
    """
    body = getattr(function, "__distributed_body__", function)
    workers = POOL.grow(world_size)
    # As under torchrun, the store is nobody's but the launcher's: it is there before the ranks look
    # for it (they would wait half a second before they look again), and outlives them.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        environments = rank_environments(world_size, store.port)
        for rank, (worker, env) in enumerate(zip(workers, environments, strict=True)):
            task = Task(body.__module__, body.__qualname__, args, kwargs, env, init_group)
            worker.mark()
            try:
                worker.connection.send_bytes(pickle.dumps(task))
            except OSError as error:
                raise RankFailure(f"rank {rank} is gone: {error}") from None
        outcomes = _collect(workers, timeout, grace=timeout if expect_failure else None)
        failed = any(outcome.is_failure for outcome in outcomes)
        if failed and not expect_failure:
            raise RankFailure(_describe(workers, outcomes))
        _finish(workers)
    except BaseException:
        # Whatever went wrong (an interrupt of pytest included), these processes may be in any
        # state; fresh ones are cheap.
        POOL.kill()
        raise
    if expect_failure:
        if failed:
            POOL.kill()
        return outcomes
    _refuse_leaks(outcomes)
    return [outcome.value for outcome in outcomes]


def distributed(
    world_size: int = 2, *, timeout: float = DEFAULT_TIMEOUT, init_group: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a module-level test function into a test that runs it on every rank.

    Parameters and fixtures are resolved in pytest and passed on to the ranks by value.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**kwargs: Any) -> None:
            run_on_ranks(body, world_size, timeout=timeout, init_group=init_group, **kwargs)

        test.__distributed_body__ = body  # type: ignore[attr-defined]
        return test

    return decorate


def rank_environments(world_size: int, port: int) -> list[dict[str, str]]:
    """The variables that `torchrun` sets, one dict for each rank."""
    return [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "tests",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        for rank in range(world_size)
    ]


def _collect(workers: list[_Worker], timeout: float, grace: float | None) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    deadline = time.monotonic() + timeout
    ranks = {id(worker.connection): rank for rank, worker in enumerate(workers)}
    while len(outcomes) < len(workers):
        open_ends = [w.connection for rank, w in enumerate(workers) if rank not in outcomes]
        ready = wait(open_ends, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailure(_describe_hang(workers, outcomes))
        for connection in ready:
            rank = ranks[id(connection)]
            try:
                outcomes[rank] = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
            except (EOFError, OSError):
                outcomes[rank] = _outcome_of_a_death(rank, workers[rank])
        if any(outcome.is_failure for outcome in outcomes.values()):
            wait_more = GRACE_AFTER_FAILURE if grace is None else grace
            deadline = min(deadline, time.monotonic() + wait_more)
    return [outcomes[rank] for rank in range(len(workers))]


def _outcome_of_a_death(rank: int, worker: _Worker) -> Outcome:
    worker.process.join(5.0)
    how = f"the process of rank {rank} died (exit code {worker.process.exitcode})"
    return Outcome(rank, None, "ProcessDied", how, f"{how}\n{worker.read_stacks()}")


def _finish(workers: list[_Worker]) -> None:
    for worker in workers:
        with contextlib.suppress(OSError):
            worker.connection.send_bytes(FINISH)
    for worker in workers:
        with contextlib.suppress(EOFError, OSError):
            if not worker.connection.poll(30.0):
                raise RankFailure("a rank hangs while its process group is destroyed")
            worker.connection.recv_bytes()


def _describe(workers: list[_Worker], outcomes: list[Outcome]) -> str:
    parts = []
    for worker, outcome in zip(workers, outcomes, strict=True):
        if outcome.is_failure:
            parts.append(f"--- rank {outcome.rank} raised:\n{outcome.traceback}")
            parts.append(f"--- rank {outcome.rank} printed:\n{worker.read_log()}")
        else:
            parts.append(f"--- rank {outcome.rank} returned normally")
    return "\n" + "\n".join(parts)


def _describe_hang(workers: list[_Worker], outcomes: dict[int, Outcome]) -> str:
    hung = [rank for rank in range(len(workers)) if rank not in outcomes]
    for rank in hung:
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(workers[rank].process.pid, signal.SIGUSR1)  # type: ignore[arg-type]
    time.sleep(0.5)
    parts = [f"rank(s) {hung} hang"]
    for rank, worker in enumerate(workers):
        if rank in outcomes:
            outcome = outcomes[rank]
            text = outcome.traceback if outcome.is_failure else "returned normally"
            parts.append(f"--- rank {rank}:\n{text}")
        else:
            parts.append(f"--- rank {rank} hangs here:\n{worker.read_stacks()}")
            parts.append(f"--- rank {rank} printed:\n{worker.read_log()}")
    return "\n".join(parts)


def _refuse_leaks(outcomes: list[Outcome]) -> None:
    leaks = {o.rank: o.leaked_threads for o in outcomes if o.leaked_threads}
    if leaks:
        POOL.kill()
        raise RankFailure(f"threads are still running after the function returned: {leaks}")


def _read_from(path: Path, offset: int) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
