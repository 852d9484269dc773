"""Staging memory under a budget."""

from __future__ import annotations

import os
import threading
import time
import warnings

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_zero.offload.staging import StagingBuffer, StagingPool

PAGE = 4096


def resident_pages(buffer: StagingBuffer) -> int:
    """How many pages of the buffer are memory, as the kernel counts them."""
    address = buffer.tensor(1, torch.uint8).data_ptr()
    with open("/proc/self/pagemap", "rb") as table:
        table.seek(address // PAGE * 8)
        entries = torch.frombuffer(
            bytearray(table.read(buffer.capacity_bytes // PAGE * 8)), dtype=torch.int64
        )
    return int((entries < 0).sum())  # bit 63: present


def fill(buffer: StagingBuffer) -> None:
    buffer.tensor(buffer.nbytes, torch.uint8).fill_(1)


def test_buffers_are_aligned_and_rounded_up() -> None:
    pool = StagingPool(10 * PAGE)
    buffer = pool.acquire(PAGE + 1)
    assert buffer.nbytes == len(buffer.view()) == 2 * PAGE
    assert buffer.tensor(5, torch.float64).data_ptr() % PAGE == 0
    assert pool.held_bytes == 2 * PAGE


def test_a_buffer_is_used_again() -> None:
    pool = StagingPool(10 * PAGE)
    first = pool.acquire(5 * PAGE)
    pool.give_back(first)
    assert pool.acquire(5 * PAGE) is first


def test_a_smaller_use_gives_memory_back_to_the_system() -> None:
    pool = StagingPool(10 * PAGE)
    buffer = pool.acquire(10 * PAGE)
    fill(buffer)
    assert resident_pages(buffer) == 10
    pool.give_back(buffer)
    assert pool.acquire(6 * PAGE) is buffer
    assert pool.held_bytes == 6 * PAGE
    assert resident_pages(buffer) == 6
    # what was given back can be used by another
    pool.acquire(4 * PAGE)
    assert pool.held_bytes == pool.peak_bytes == 10 * PAGE
    # and grows again
    pool.give_back(buffer)
    assert pool.acquire(6 * PAGE) is buffer


def test_a_small_use_does_not_spoil_a_large_buffer() -> None:
    pool = StagingPool(11 * PAGE)
    large = pool.acquire(10 * PAGE)
    pool.give_back(large)
    assert pool.acquire(PAGE) is not large
    assert pool.acquire(10 * PAGE) is large


def test_idle_buffers_make_way() -> None:
    pool = StagingPool(10 * PAGE)
    for buffer in [pool.acquire(2 * PAGE) for _ in range(5)]:
        pool.give_back(buffer)
    assert pool.held_bytes == 10 * PAGE
    pool.acquire(7 * PAGE)
    assert pool.held_bytes <= pool.peak_bytes == 10 * PAGE


def test_acquiring_waits_for_buffers_that_come_back_and_for_no_others() -> None:
    pool = StagingPool(2 * PAGE)
    kept, written = pool.acquire(PAGE), pool.acquire(PAGE)
    pool.expect(written)
    threading.Timer(0.1, pool.give_back, [written]).start()
    begin = time.perf_counter()
    assert pool.acquire(PAGE) is written
    assert time.perf_counter() - begin > 0.05
    assert not pool.has_room(1)
    # nobody would give anything back: beyond the budget
    beyond = pool.acquire(PAGE)
    assert pool.peak_bytes == 3 * PAGE
    pool.give_back(beyond)
    assert pool.held_bytes == 2 * PAGE
    pool.give_back(kept)


def test_a_buffer_that_is_kept_after_all_is_not_waited_for() -> None:
    pool = StagingPool(PAGE)
    written = pool.acquire(PAGE)
    pool.expect(written)
    threading.Timer(0.1, pool.keep, [written]).start()
    assert pool.acquire(PAGE) is not written


def test_forked_children_do_not_see_the_memory() -> None:
    # Else the fork would make the pages copy-on-write under a read that is under way.
    buffer = StagingPool(PAGE).acquire(PAGE)
    fill(buffer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        os._exit(buffer.view()[0])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(1, 20), st.booleans()), max_size=40),
)
def test_the_budget_is_exceeded_only_by_what_is_in_use(
    budget: int, uses: list[tuple[int, bool]]
) -> None:
    pool = StagingPool(budget * PAGE)
    busy: list[StagingBuffer] = []
    most = 0
    for pages, is_returned in uses:
        busy.append(pool.acquire(pages * PAGE))
        in_use = sum(buffer.nbytes for buffer in busy)
        most = max(most, in_use)
        assert in_use <= pool.held_bytes <= max(in_use, budget * PAGE)
        if is_returned:
            pool.give_back(busy.pop(0))
    assert pool.peak_bytes <= max(most, budget * PAGE)
    for buffer in busy:
        pool.give_back(buffer)
    assert pool.held_bytes <= budget * PAGE
    pool.clear()
    assert pool.held_bytes == 0
