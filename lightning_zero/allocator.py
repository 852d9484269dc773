"""Keeps freed memory mapped on CPU, so that buffers that come and go cost no page faults.

glibc returns large blocks to the kernel as soon as they are freed, and the next block of the same
size is then faulted
in and zeroed page by page: several times slower than writing to memory that is already there.
Gathered weights and gradient buckets come and go all the time, so the thresholds are raised while a
sharded run is active.
"""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -2, -3, -4
_DEFAULT_TRIM, _DEFAULT_TOP_PAD, _DEFAULT_MMAP_MAX = 128 * 1024, 0, 65536
_DEFAULT_MMAP_THRESHOLD = 128 * 1024
_KEEP_BYTES = (1 << 31) - 1
_TOP_PAD_BYTES = 64 << 20


def _glibc() -> ctypes.CDLL | None:
    if platform.libc_ver()[0] != "glibc":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") else None


def retain_freed_memory() -> bool:
    """Make malloc keep freed blocks for reuse.

    Returns False where it is not glibc's malloc (nothing changes).
    """
    libc = _glibc()
    if libc is None:
        return False
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)
    libc.mallopt(_M_TOP_PAD, _TOP_PAD_BYTES)
    return True


def return_freed_memory() -> bool:
    """Make malloc hand large blocks back as soon as they are freed, where memory is what counts.

    Kept blocks are scattered: freed ones lie between small blocks that live on, and an aligned
    block of the same size does not fit where one was. Left alone, malloc would keep ever larger
    ones. Returns False where it is not glibc's malloc (nothing changes).
    """
    libc = _glibc()
    if libc is None:
        return False
    libc.mallopt(_M_MMAP_THRESHOLD, _DEFAULT_MMAP_THRESHOLD)
    return True


def release_freed_memory() -> None:
    """Go back to glibc's defaults and hand unused memory to the kernel."""
    libc = _glibc()
    if libc is None:
        return
    libc.mallopt(_M_MMAP_MAX, _DEFAULT_MMAP_MAX)
    libc.mallopt(_M_TRIM_THRESHOLD, _DEFAULT_TRIM)
    libc.mallopt(_M_TOP_PAD, _DEFAULT_TOP_PAD)
    libc.malloc_trim(0)
