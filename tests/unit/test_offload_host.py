"""Host memory, page-locked and not."""

from __future__ import annotations

import gc

import pytest
import torch

from lightning_zero.errors import OffloadError
from lightning_zero.offload.host import HostMemory


class CountingLock:
    """Locks nothing and keeps account of it."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def lock(self, address: int, nbytes: int) -> None:
        assert address not in self.locked
        self.locked[address] = nbytes

    def unlock(self, address: int) -> None:
        del self.locked[address]


def test_only_slabs_that_ask_are_pinned_and_only_within_the_limit() -> None:
    lock = CountingLock()
    host = HostMemory(10_000, page_lock=lock)
    free = host.make_slab(100, torch.float32, "free")
    first = host.make_slab(1500, torch.float32, "first", pinned=True)
    large = host.make_slab(1500, torch.float32, "large", pinned=True)
    small = host.make_slab(1000, torch.float32, "small", pinned=True)
    empty = host.make_slab(0, torch.float32, "empty", pinned=True)
    slabs = (free, first, large, small, empty)
    assert [slab.is_pinned for slab in slabs] == [False, True, False, True, False]
    assert host.pinned_bytes == sum(lock.locked.values()) == 10_000
    assert host.resting_bytes == 4 * (100 + 1500 + 1500 + 1000)
    address = first.prepare().data_ptr()
    assert address % 4096 == 0
    assert lock.locked[address] == first.nbytes

    first.close()
    first.close()
    assert host.pinned_bytes == sum(lock.locked.values()) == 4000
    assert host.make_slab(1500, torch.float32, "again", pinned=True).is_pinned
    host.close()
    assert host.pinned_bytes == len(lock.locked) == 0


def test_pinned_slabs_hold_their_content() -> None:
    host = HostMemory(10_000, page_lock=CountingLock())
    slab = host.make_slab(100, torch.bfloat16, "weight", pinned=True)
    slab.prepare().fill_(3)
    slab.start_store()
    assert slab.load().sum() == 300
    host.close()


def test_memory_that_nobody_closes_is_unlocked_with_its_device() -> None:
    lock = CountingLock()
    host = HostMemory(10_000, page_lock=lock)
    host.make_slab(100, torch.float32, "weight", pinned=True)
    del host
    gc.collect()
    assert not lock.locked


def test_a_refused_lock_is_an_error_and_leaves_nothing() -> None:
    class Refusing(CountingLock):
        def lock(self, address: int, nbytes: int) -> None:
            raise OffloadError("no")

    host = HostMemory(10_000, page_lock=Refusing())
    with pytest.raises(OffloadError, match="no"):
        host.make_slab(100, torch.float32, "weight", pinned=True)
    assert host.resting_bytes == host.pinned_bytes == 0
    host.close()


def test_without_cuda_nothing_is_pinned() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is CUDA")
    host = HostMemory(10_000)
    assert not host.make_slab(100, torch.float32, "weight", pinned=True).is_pinned
    assert host.pinned_bytes == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_takes_the_memory_for_pinned() -> None:
    host = HostMemory(1 << 20)
    for _ in range(3):
        slab = host.make_slab(100_001, torch.float32, "weight", pinned=True)
        source = slab.prepare()
        assert source.is_pinned()
        source.copy_(torch.arange(100_001))
        target = torch.empty(100_001, device="cuda")
        target.copy_(source, non_blocking=True)
        assert torch.equal(target.cpu(), source)
        del source
        slab.close()
    host.close()
    torch.cuda.synchronize()
