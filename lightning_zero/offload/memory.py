"""Page-aligned host memory that tensors can view."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

# What direct I/O wants of addresses, offsets and lengths, on any disk of today.
ALIGNMENT = 4096
# From <linux/mman.h>; the mmap module does not name it.
_MADV_WIPEONFORK = 18


def round_up(nbytes: int) -> int:
    """The next multiple of :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def map_pages(nbytes: int) -> mmap.mmap:
    """Anonymous memory of at least ``nbytes`` bytes, zero, which costs nothing until it is touched.

    It is freed with the last tensor and memoryview on it.
    """
    private = (
        {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    )
    pages = mmap.mmap(-1, max(round_up(nbytes), ALIGNMENT), **private)
    # One fault per 2 MiB and not per 4 KiB: faults cost more than a fast disk.
    _advise(pages, getattr(mmap, "MADV_HUGEPAGE", None))
    return pages


def hide_from_children(pages: mmap.mmap) -> None:
    """Let forked processes (workers of a DataLoader) see zeros in place of these pages.

    Else a fork makes them copy-on-write, and on kernels before 6.3 the disk may then read into the
    copy that this process does not see any more.
    """
    _advise(pages, _MADV_WIPEONFORK)


def drop_pages(pages: mmap.mmap, start: int) -> None:
    """Give the memory from byte ``start`` on back to the system. Used again, it is zero."""
    if start < len(pages):
        _advise(pages, getattr(mmap, "MADV_DONTNEED", None), start)


def tensor_on(pages: mmap.mmap, numel: int, dtype: torch.dtype) -> Tensor:
    """The first bytes as a tensor, which keeps the pages alive."""
    if not numel:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(pages, dtype=torch.uint8, count=numel * dtype.itemsize).view(dtype)


def _advise(pages: mmap.mmap, advice: int | None, start: int = 0) -> None:
    if advice is not None:
        # advice that this kernel does not know is none that anything depends on
        with contextlib.suppress(OSError):
            pages.madvise(advice, start)
