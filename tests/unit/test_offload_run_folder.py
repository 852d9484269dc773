"""Folders of runs, dead and alive. The processes of these tests are real."""

from __future__ import annotations

import os
import signal
import stat
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_zero.errors import OffloadError
from lightning_zero.offload import run_folder
from lightning_zero.offload.run_folder import RunFolder, free_bytes


def in_child(body: Callable[[], None]) -> int:
    """The number of a forked process that runs ``body``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        status = 1
        try:
            body()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def status_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def claim_and_sleep(path: Path, rank: int) -> None:
    folder = RunFolder.claim(path, rank)
    (folder.path / "states.bin").write_bytes(b"x" * 10_000)
    (path / f"ready-{rank}").touch()
    time.sleep(60)


def test_a_folder_is_made_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "scratch" / "offload"
    folder = RunFolder.claim(path, 3)
    assert folder.path.parent == path
    assert f"-{os.getpid()}-rank3" in folder.path.name
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    (folder.path / "states.bin").touch()
    folder.close()
    folder.close()
    assert names(path) == []


def test_a_dropped_folder_is_removed(tmp_path: Path) -> None:
    folder = RunFolder.claim(tmp_path, 0)
    assert len(names(tmp_path)) == 2
    del folder
    assert names(tmp_path) == []


def test_one_process_can_have_several_of_the_same_rank(tmp_path: Path) -> None:
    folders = [RunFolder.claim(tmp_path, 0) for _ in range(3)]
    assert len({folder.path for folder in folders}) == 3
    assert all(folder.path.is_dir() for folder in folders)
    for folder in folders:
        folder.close()
    assert names(tmp_path) == []


def test_the_folder_of_a_killed_process_is_removed_and_nothing_else(tmp_path: Path) -> None:
    foreign = [
        "lightning_zero-elsewhere-1-rank0",
        "my_data",
        "lightning_zero-notes",
    ]
    for name in foreign:
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.lock").touch()
    child = in_child(lambda: claim_and_sleep(tmp_path, 0))
    wait_for(lambda: (tmp_path / "ready-0").exists())
    (theirs,) = tmp_path.glob(f"*-{child}-rank0")

    RunFolder.claim(tmp_path, 1).close()
    assert theirs.is_dir(), "it is alive"

    os.kill(child, signal.SIGKILL)
    assert status_of(child) == -signal.SIGKILL
    RunFolder.claim(tmp_path, 1).close()
    assert names(tmp_path) == sorted([*foreign, *(f"{name}.lock" for name in foreign), "ready-0"])


def test_a_child_that_lives_on_does_not_keep_the_folder(tmp_path: Path) -> None:
    grandchildren: list[int] = []

    def own_and_fork() -> None:
        folder = RunFolder.claim(tmp_path, 0)
        sleeper = in_child(lambda: time.sleep(60))
        (folder.path / "states.bin").touch()
        (tmp_path / "sleeper").write_text(str(sleeper))
        (tmp_path / "ready").touch()
        time.sleep(60)

    child = in_child(own_and_fork)
    wait_for(lambda: (tmp_path / "ready").exists())
    grandchildren.append(int((tmp_path / "sleeper").read_text()))
    try:
        os.kill(child, signal.SIGKILL)
        status_of(child)
        os.kill(grandchildren[0], 0)  # is alive
        RunFolder.claim(tmp_path, 1).close()
        assert not list(tmp_path.glob("lightning_zero*"))
    finally:
        os.kill(grandchildren[0], signal.SIGKILL)


def test_a_forked_child_does_not_remove_the_folder_of_its_parent(tmp_path: Path) -> None:
    folder = RunFolder.claim(tmp_path, 0)
    assert status_of(in_child(folder.close)) == 0
    assert folder.path.is_dir()
    # and the lock is still the parent's
    assert status_of(in_child(lambda: RunFolder.claim(tmp_path, 1).close())) == 0
    assert folder.path.is_dir()
    folder.close()
    assert names(tmp_path) == []


def test_many_processes_claim_and_clean_at_once(tmp_path: Path) -> None:
    def churn(rank: int) -> None:
        for turn in range(40):
            folder = RunFolder.claim(tmp_path, rank)
            file = folder.path / "states.bin"
            file.write_bytes(b"x")
            time.sleep(0.001 * (turn % 3))
            assert file.read_bytes() == b"x"
            if turn % 4:
                folder.close()
            else:  # as if dead
                os.close(
                    run_folder._own_locks.pop(folder.path.with_name(folder.path.name + ".lock"))
                )
                folder._close.detach()

    children = [in_child(lambda rank=rank: churn(rank)) for rank in range(4)]  # type: ignore[misc]
    assert [status_of(child) for child in children] == [0] * 4
    RunFolder.claim(tmp_path, 0).close()
    assert names(tmp_path) == []


def test_file_systems_without_locks_are_used_without_cleaning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoLocks:
        LOCK_EX = LOCK_NB = 0

        @staticmethod
        def flock(handle: int, operation: int) -> None:
            raise OSError(38, "Function not implemented")

    monkeypatch.setattr(run_folder, "fcntl", NoLocks)
    dead = tmp_path / f"lightning_zero-{run_folder._host()}-1-rank0.lock"
    dead.touch()
    folder = RunFolder.claim(tmp_path, 0)
    assert folder.path.is_dir()
    folder.close()
    assert names(tmp_path) == [dead.name]


def test_a_path_that_can_not_be_used_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(OffloadError, match=rf"'{file}' can not be used.*File exists"):
        RunFolder.claim(file, 0)
    with pytest.raises(OffloadError, match=rf"'{file}/below'.*Not a directory"):
        RunFolder.claim(file / "below", 0)
    with pytest.raises(OffloadError, match="'/proc/nothing' can not be used"):
        RunFolder.claim(Path("/proc/nothing"), 0)


def test_a_path_without_the_right_to_write_is_named(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(OffloadError, match=rf"'{tmp_path}' can not be used.*Permission denied"):
        RunFolder.claim(tmp_path, 0)


def test_free_bytes_are_those_of_the_disk(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    assert 0 < free_bytes(tmp_path) <= status.f_blocks * status.f_frsize
    with pytest.raises(OffloadError, match="missing"):
        free_bytes(tmp_path / "missing")
