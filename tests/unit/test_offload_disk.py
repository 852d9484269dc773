"""Disks that fail, are slow, full or taken away."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

import lightning_zero
from lightning_zero.errors import OffloadError
from lightning_zero.offload import movers
from lightning_zero.offload.device import Slab
from lightning_zero.offload.disk import Disk

MIB = 1 << 20
SIZES = [1, 5000, 300_000]
Move = Callable[[int, Sequence[memoryview], int], int]


@pytest.fixture(params=["direct", "plain"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    device = Disk(tmp_path, 8 * MIB, use_direct=request.param == "direct")
    yield device
    device.close()
    assert not list(tmp_path.iterdir())
    assert not threads()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("zero-offload")]


def store(slab: Slab, value: float) -> None:
    slab.prepare().fill_(value)
    slab.start_store()


def holds(slab: Slab, value: float) -> bool:
    is_right = bool((slab.load() == value).all())
    slab.release()
    return is_right


def test_direct_io_is_found_out_by_trying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev = os.pwritev
    flag = getattr(os, "O_DIRECT", 0)

    def refuse(handle: int, data: Sequence[memoryview], offset: int) -> int:
        import fcntl

        if fcntl.fcntl(handle, fcntl.F_GETFL) & flag:
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwritev(handle, data, offset)

    monkeypatch.setattr(os, "pwritev", refuse)
    device = Disk(tmp_path, MIB)
    try:
        assert not device.is_direct
        slab = device.make_slab(5000, torch.float32, "moment")
        store(slab, 3)
        device.wait()
        assert holds(slab, 3)
    finally:
        device.close()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs")
def test_tmpfs_is_a_disk_too(tmp_path: Path) -> None:
    folder = Path("/dev/shm") / f"lightning_zero_test_{os.getpid()}"
    folder.mkdir()
    try:
        device = Disk(folder, MIB)
        slab = device.make_slab(100_000, torch.float32, "moment")
        store(slab, 3)
        device.wait()
        assert holds(slab, 3)
        device.close()
    finally:
        folder.rmdir()


def test_a_second_disk_in_a_folder_is_refused(disk: Disk, tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match=r"making '.*states.bin' failed: .*EEXIST"):
        Disk(tmp_path, MIB)


def test_the_file_does_not_grow_when_ranges_are_used_again(disk: Disk, tmp_path: Path) -> None:
    slabs = [disk.make_slab(numel, torch.float32, f"{numel}") for numel in SIZES]
    size = (tmp_path / "states.bin").stat().st_size
    assert size % 4096 == 0
    for slab in slabs[1:]:
        slab.close()
    # two freed neighbours are one range
    again = disk.make_slab(sum(SIZES[1:]), torch.float32, "again")
    store(again, 2)
    store(slabs[0], 1)
    assert holds(again, 2)
    assert holds(slabs[0], 1)
    assert (tmp_path / "states.bin").stat().st_size == size


def test_counters_are_the_bytes_of_the_content(disk: Disk) -> None:
    slabs = [disk.make_slab(numel, torch.bfloat16, f"{numel}") for numel in SIZES]
    for slab in slabs:
        store(slab, 1)
    disk.wait()
    for slab in slabs:
        for _ in range(2):
            slab.load()
        slab.release()
        store(slab, 2)
    disk.wait()
    counters = disk.counters
    assert counters.read_bytes == 2 * sum(SIZES)
    assert counters.written_bytes == 2 * 2 * sum(SIZES)
    assert counters.read_seconds > 0
    assert counters.written_seconds > 0
    assert counters.waited_seconds > 0


def test_what_is_being_written_is_loaded_without_a_read(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    slow_down(monkeypatch, "pwritev", go)
    slab = disk.make_slab(5000, torch.float32, "moment")
    store(slab, 1)
    slab.start_load()
    threading.Timer(0.05, go.set).start()
    assert holds(slab, 1)
    assert disk.counters.read_bytes == 0
    assert holds(slab, 1)
    assert disk.counters.read_bytes == slab.nbytes


def slow_down(monkeypatch: pytest.MonkeyPatch, name: str, go: threading.Event) -> None:
    """Let reads or writes wait for an event."""
    move: Move = getattr(os, name)

    def wait_and_move(handle: int, data: Sequence[memoryview], offset: int) -> int:
        assert go.wait(20)
        return move(handle, data, offset)

    monkeypatch.setattr(os, name, wait_and_move)


def test_a_slab_is_read_while_another_one_is_written(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, written = (disk.make_slab(5000, torch.float32, name) for name in ("read", "written"))
    store(read, 1)
    disk.wait()
    go = threading.Event()
    slow_down(monkeypatch, "pwritev", go)
    store(written, 2)
    assert holds(read, 1)
    go.set()
    assert holds(written, 2)


def test_content_is_right_after_many_rounds_of_two_threads(tmp_path: Path) -> None:
    device = Disk(tmp_path, 600 * 1024)
    slabs = [device.make_slab(50_000 + 7 * i, torch.float32, f"{i}") for i in range(8)]
    errors: list[BaseException] = []

    def work(own: list[Slab]) -> None:
        try:
            for slab in own:
                store(slab, 0)
            for turn in range(30):
                for slab, following in zip(own, own[1:] + own[:1], strict=True):
                    following.start_load()
                    tensor = slab.load()
                    assert (tensor == turn).all()
                    tensor.add_(1)
                    slab.start_store()
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(slabs[i::2],)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    device.wait()
    device.close()
    assert not errors


def test_the_budget_is_kept_if_the_working_set_fits(disk: Disk) -> None:
    slabs = [disk.make_slab(MIB // 4 * (1 + i % 3), torch.float32, f"{i}") for i in range(12)]
    for slab in slabs:
        store(slab, 0)
    # at most 3 + 3 MiB in use; writes that are under way are waited for
    for _ in range(3):
        for slab, following in zip(slabs, slabs[1:] + slabs[:1], strict=True):
            following.start_load()
            slab.load().add_(1)
            slab.start_store()
    disk.wait()
    assert all(holds(slab, 3) for slab in slabs)
    assert disk.peak_staging_bytes <= 8 * MIB
    assert disk.has_room(8 * MIB)
    assert not disk.has_room(8 * MIB + 1)


def test_a_slab_beyond_the_budget_does_not_block(disk: Disk) -> None:
    slab = disk.make_slab(3 * MIB, torch.float32, "large")
    assert not disk.has_room(slab.nbytes)
    store(slab, 1)
    assert holds(slab, 1)
    assert disk.peak_staging_bytes == slab.nbytes
    assert disk.staging_bytes == 0


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_short_counts_are_continued(disk: Disk, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    move: Move = getattr(os, name)
    most = 4096 if disk.is_direct else 1000

    def move_less(handle: int, data: Sequence[memoryview], offset: int) -> int:
        return move(handle, [data[0][:most]], offset)

    monkeypatch.setattr(os, name, move_less)
    slab = disk.make_slab(12_345, torch.int32, "moment")
    slab.prepare().copy_(torch.arange(12_345))
    slab.start_store()
    disk.wait()
    assert torch.equal(slab.load(), torch.arange(12_345, dtype=torch.int32))


def test_a_failed_write_is_never_read_back(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slab, other = (disk.make_slab(5000, torch.float32, name) for name in ("moment", "other"))
    for each in (slab, other):
        store(each, 1)
    disk.wait()

    def fail(handle: int, data: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        store(slab, 2)
        slab.start_load()  # chained to the write
        message = (
            rf"writing slab 'moment' at byte 0 of '{tmp_path}/states.bin' failed: "
            r"No space left on device \(ENOSPC, errno 28\)"
        )
        with pytest.raises(OffloadError, match=message):
            disk.wait()
    for _ in range(2):
        with pytest.raises(OffloadError, match=r"'moment' is lost: .*ENOSPC"):
            slab.load()
        with pytest.raises(OffloadError, match=r"'moment' is lost: .*ENOSPC"):
            slab.start_load()
        with pytest.raises(OffloadError, match=message):
            disk.wait()
    assert holds(other, 1)
    store(slab, 3)
    disk.wait()
    assert holds(slab, 3)
    assert disk.staging_bytes <= 8 * MIB


def test_a_write_that_fails_in_the_middle_of_a_slab_fails_the_slab(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(movers, "CHUNK_BYTES", 64 << 10)
    slab = disk.make_slab(MIB, torch.float32, "moment")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB + 8192, hard))
        store(slab, 2)
        with pytest.raises(OffloadError, match=r"'moment' at byte .*EFBIG"):
            disk.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(OffloadError, match="EFBIG"):
        slab.load()


def test_a_disk_without_room_refuses_the_slab(disk: Disk) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
        with pytest.raises(OffloadError, match=r"reserving 4194304 bytes .*'moment'.*EFBIG"):
            disk.make_slab(MIB, torch.float32, "moment")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    slab = disk.make_slab(MIB, torch.float32, "moment")
    store(slab, 2)
    assert holds(slab, 2)


def test_disks_that_can_not_reserve_are_extended(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    slab = disk.make_slab(5000, torch.float32, "moment")
    assert (tmp_path / "states.bin").stat().st_size >= slab.nbytes
    store(slab, 2)
    disk.wait()
    assert holds(slab, 2)


def test_plain_io_hears_of_writes_that_fail_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Disk(tmp_path, MIB, use_direct=False)
    slabs = [device.make_slab(5000, torch.float32, f"{i}") for i in range(2)]
    both_wait, calls = threading.Barrier(2), iter([True, False])

    def fail_once(handle: int) -> None:
        both_wait.wait(20)
        if next(calls):
            raise OSError(errno.EIO, "Input/output error")
        time.sleep(0.2)

    monkeypatch.setattr(os, "fdatasync", fail_once)
    for slab in slabs:
        store(slab, 1)
    with pytest.raises(OffloadError, match="EIO"):
        device.wait()
    # nobody knows whose bytes are lost
    for slab in slabs:
        with pytest.raises(OffloadError, match="EIO"):
            slab.load()
    device.close()


@pytest.mark.parametrize("size", [0, 8192, 8192 + 100])
def test_a_truncated_file_is_not_garbage(disk: Disk, tmp_path: Path, size: int) -> None:
    slab = disk.make_slab(5000, torch.float32, "moment")
    store(slab, 1)
    disk.wait()
    os.truncate(tmp_path / "states.bin", size)
    for _ in range(2):
        slab.start_load()
        with pytest.raises(
            OffloadError, match=rf"reading slab 'moment' at byte .*; the file has {size} bytes"
        ):
            slab.load()
    assert disk.has_room(8 * MIB)


def test_a_failed_read_can_be_tried_again(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    slab = disk.make_slab(5000, torch.float32, "moment")
    store(slab, 1)
    disk.wait()

    def fail(handle: int, data: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        with pytest.raises(OffloadError, match=r"reading slab 'moment' .*\(EIO, errno 5\)"):
            slab.load()
    disk.wait()  # nothing is lost
    assert holds(slab, 1)


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_closing_ends_what_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(movers, "CHUNK_BYTES", 64 << 10)
    device = Disk(tmp_path, 64 * MIB)
    slabs = [device.make_slab(MIB, torch.float32, f"{i}") for i in range(8)]
    for slab in slabs:
        store(slab, 1)
    device.wait()
    move: Move = getattr(os, name)

    def move_slowly(handle: int, data: Sequence[memoryview], offset: int) -> int:
        time.sleep(0.05)
        return move(handle, data, offset)

    monkeypatch.setattr(os, name, move_slowly)
    for slab in slabs:
        slab.start_load() if name == "preadv" else store(slab, 2)
    begin = time.perf_counter()
    device.close()
    assert time.perf_counter() - begin < 5  # all of it would take 6 s
    assert not threads()
    assert not list(tmp_path.iterdir())
    assert device.staging_bytes == 0


def test_closing_ends_the_waits_of_other_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Disk(tmp_path, 10 * 4096)
    read, written, waiting = (device.make_slab(5000, torch.float32, name) for name in "abc")
    for slab in (read, written):
        store(slab, 1)
    device.wait()
    go = threading.Event()
    slow_down(monkeypatch, "preadv", go)
    slow_down(monkeypatch, "pwritev", go)
    read.start_load()
    store(written, 2)
    errors: list[BaseException] = []

    def use(call: Callable[[], object]) -> None:
        try:
            call()
        except RuntimeError as error:
            errors.append(error)

    users = [threading.Thread(target=use, args=(call,)) for call in (read.load, waiting.prepare)]
    for user in users:
        user.start()
    time.sleep(0.1)
    threading.Timer(0.1, go.set).start()
    device.close()
    for user in users:
        user.join(10)
        assert not user.is_alive()
    assert ["closed" in str(error) for error in errors] == [True, True]
    assert device.staging_bytes == 0


def test_closing_can_be_interrupted_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Disk(tmp_path, MIB)
    store(device.make_slab(5000, torch.float32, "moment"), 1)

    def interrupt(self: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(movers.Movers, "close", interrupt)
        with pytest.raises(KeyboardInterrupt):
            device.close()
    device.close()
    assert not threads()
    assert not list(tmp_path.iterdir())


def test_a_disk_needs_threads(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_threads"):
        Disk(tmp_path, MIB, num_threads=0)


def test_a_file_that_somebody_deleted_does_not_stop_closing(disk: Disk, tmp_path: Path) -> None:
    slab = disk.make_slab(5000, torch.float32, "moment")
    store(slab, 1)
    (tmp_path / "states.bin").unlink()
    disk.wait()
    assert holds(slab, 1)


INTERRUPTED = """
import os, signal, sys, time, types
from pathlib import Path
# ignored signals are inherited: from `nohup`, or from a shell that has put the tests aside
signal.signal(signal.SIGINT, signal.default_int_handler)
package = types.ModuleType("lightning_zero")  # without Lightning, which takes seconds
package.__path__ = [sys.argv[1]]
sys.modules["lightning_zero"] = package
import torch
from lightning_zero.offload.disk import Disk
disk = Disk(Path(sys.argv[2]), 1 << 20)
slab = disk.make_slab(5000, torch.float32, "moment")
slab.prepare().zero_()
os.pwritev = lambda *arguments: time.sleep(600)
slab.start_store()
print("ready", flush=True)
slab.load()
"""


def test_an_interrupted_process_ends_although_the_disk_hangs(tmp_path: Path) -> None:
    package = str(Path(lightning_zero.__file__).parent)
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, package, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, messages = process.communicate(timeout=15)
    finally:
        process.kill()  # whatever happens: the next test finds nothing of it
    assert "KeyboardInterrupt" in messages
    assert process.returncode in (1, 130, -signal.SIGINT)
