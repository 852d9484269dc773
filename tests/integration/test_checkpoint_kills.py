"""SIGKILL at any instant of a save leaves the old or the new checkpoint, and nothing in the way.

`ZERO_KILLS=1000 pytest tests/integration/test_checkpoint_kills.py --timeout=0` tries more of them,
at random instants, and each single step.
"""

from __future__ import annotations

import io
import itertools
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zero.checkpoint.failures import CheckpointError
from lightning_zero.checkpoint.folder import (
    load_tensors,
    read_meta,
    remove_folder,
    save_folder,
    verify,
)
from lightning_zero.comm.collectives import SingleRank
from tests.support.distributed import PRELOAD
from tests.support.folders import shards, wholes

KILLS = int(os.environ.get("ZERO_KILLS", "50"))
STEPS = (
    1 if KILLS > 50 else 4
)  # of a save; each is tried with the former, one of them with the latter
WORLD_SIZE = 2


class PipeRanks(SingleRank):
    """Processes that know each other through pipes: a star around rank 0."""

    def __init__(self, rank: int, pipes: list[Connection]) -> None:
        super().__init__()
        self.rank, self.world_size, self._pipes = rank, len(pipes) + 1 if rank == 0 else 0, pipes

    def all_gather_object(self, value: Any, label: str) -> list[Any]:
        if self.rank:
            self._pipes[0].send(value)
            values: list[Any] = self._pipes[0].recv()
            return values
        values = [value, *(pipe.recv() for pipe in self._pipes)]
        for pipe in self._pipes:
            pipe.send(values)
        return values


def state(version: int) -> dict[str, torch.Tensor]:
    return {
        "model.weight": torch.full((100, 100), float(version)),
        "model.bias": torch.full((3,), float(version)),
    }


def version_of(path: Path) -> int:
    """Of a complete checkpoint; anything else is an error."""
    verify(path, every_byte=True)
    found = state(0)
    load_tensors(path, wholes(found))
    version = int(read_meta(path)["version"])
    for tensor in found.values():
        assert (tensor == version).all()
    return version


def save(path: Path, version: int, collectives: SingleRank) -> None:
    rank, world_size = collectives.rank, WORLD_SIZE if isinstance(collectives, PipeRanks) else 1
    parts = shards(state(version), rank, world_size)
    save_folder(path, parts, {"version": version}, {}, collectives)


def fork(action: Callable[[], None]) -> int:
    """Run something in a new process that has all modules already."""
    pid = os.fork()
    if pid:
        return pid
    try:
        action()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def check_and_save_again(path: Path, possible: set[int], next_version: int) -> None:
    assert version_of(path) in possible, possible
    save(path, next_version, SingleRank())
    assert os.listdir(path.parent) == [path.name]
    assert version_of(path) == next_version


def save_for_ever(path: Path, first: int, rank: int, pipes: list[Any], done: int) -> None:
    """One rank of a group that saves one version after the other, and reports each to `done`."""
    ends = [a for a, _ in pipes] if rank == 0 else [pipes[rank - 1][1]]
    for end in itertools.chain.from_iterable(pipes):
        if end not in ends:
            end.close()  # so that the death of its owner is noticed
    for version in itertools.count(first):
        save(path, version, PipeRanks(rank, ends))
        if rank == 0:
            os.write(done, b"x")


def kill_a_group(path: Path, first: int, patience: float, chance: random.Random) -> int:
    """How many saves were completed before the group was killed."""
    pipes = [multiprocessing.Pipe() for _ in range(WORLD_SIZE - 1)]
    read, done = os.pipe()
    pids = [
        fork(lambda rank=rank: save_for_ever(path, first, rank, pipes, done))
        for rank in range(WORLD_SIZE)
    ]
    os.close(done)
    for end in itertools.chain.from_iterable(pipes):
        end.close()
    time.sleep(chance.uniform(0, patience))
    # all at once, or one first, so that the others have time to notice and clean up, or not
    order = chance.sample(pids, len(pids))
    os.kill(order[0], signal.SIGKILL)
    time.sleep(chance.choice([0, 0, chance.uniform(0, 0.03)]))
    for pid in order[1:]:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    with os.fdopen(read, "rb") as file:
        return len(file.read())


def kill_at_random(path: Path, seed: int) -> None:
    """Many groups of processes, each killed at a random instant."""
    chance = random.Random(seed)
    version, seconds = 0, 0.1
    save(path, version, SingleRank())
    for number in range(KILLS):
        start = time.monotonic()
        completed = kill_a_group(path, version + 1, min(2 * seconds, 1.0), chance)
        seconds = 0.7 * seconds + 0.3 * (time.monotonic() - start) / (completed + 0.5)
        last = version + completed
        version = last + 2
        try:
            check_and_save_again(path, {last, last + 1}, version)
        except Exception as error:
            raise AssertionError(f"seed {seed}, kill {number}") from error


def kill_before_step(path: Path, step: int) -> bool:
    """Save in a process that is killed before the n-th thing that it does to files.

    Returns:
        Whether it came that far.
    """

    def is_about_files(function: Any) -> bool:
        owner = getattr(function, "__self__", None)
        return isinstance(owner, io.IOBase) or getattr(function, "__module__", "") in (
            "posix",
            "fcntl",
        )

    def run() -> None:
        left = step

        def kill(frame: object, event: str, function: Any) -> None:
            nonlocal left
            if event == "c_call" and is_about_files(function):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(kill)
        save(path, 2, SingleRank())
        sys.setprofile(None)

    _, status = os.waitpid(fork(run), 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def kill_at_every_step(path: Path, existed: bool) -> None:
    """One process, killed before the first, the second, ... of the things it does to files."""
    for step in itertools.count(random.randrange(STEPS), STEPS):
        if existed:
            save(path, 1, SingleRank())
        was_killed = kill_before_step(path, step)
        if not existed and was_killed and not path.exists():
            with pytest.raises(CheckpointError, match="does not exist"):
                verify(path, every_byte=False)
            save(path, 3, SingleRank())
        check_and_save_again(path, {1, 2} if existed else {2, 3}, 4)
        if not existed:
            remove_folder(path)
            assert os.listdir(path.parent) == []
        if not was_killed:
            assert step > 50
            return


def in_nursery(function: Callable[..., None], *args: Any) -> None:
    """Run in a process of its own, which forks quickly and has no threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ours, theirs = context.Pipe()
    process = context.Process(target=_nurse, args=(theirs, function, args))
    process.start()
    theirs.close()
    try:
        assert ours.poll(3600), "hung"
        error = ours.recv()
    finally:
        process.kill()
        process.join()
    assert error is None, error


def _nurse(connection: Connection, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        function(*args)
        connection.send(None)
    except BaseException:
        connection.send(traceback.format_exc())


def test_kills_at_random_instants(tmp_path: Path) -> None:
    in_nursery(kill_at_random, tmp_path / "last.ckpt", random.randrange(1 << 30))


@pytest.mark.parametrize("existed", [True, False])
def test_kills_at_every_step(tmp_path: Path, existed: bool) -> None:
    in_nursery(kill_at_every_step, tmp_path / "last.ckpt", existed)
