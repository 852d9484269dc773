"""One file, whose ranges are read and written past the page cache where the system can do that."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path

from lightning_zero.errors import OffloadError
from lightning_zero.offload.memory import ALIGNMENT, map_pages

_DIRECT = getattr(os, "O_DIRECT", 0)
# How systems say that they have no direct I/O, or can not reserve room.
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


class DiskFile:
    """A new file that is gone when it is closed. Any thread may call it.

    Offsets and lengths are multiples of 4096, and so are the addresses of what is read and written.

    Args:
        path: must not exist.
        use_direct: whether to try direct I/O.

    Attributes:
        path: where it is.
        is_direct: whether direct I/O is used. Plain I/O waits for the disk, too: the page cache
            would take the memory that offloading has freed, and report failures to nobody.

    Raises:
        OffloadError: if it can not be made.
    """

    def __init__(self, path: Path, *, use_direct: bool = True) -> None:
        self.path = path
        self._ranges = _Ranges()
        self._lock = threading.Lock()
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise _failure(f"making '{path}'", error) from error
        try:
            self.is_direct = use_direct and self._switch_to_direct()
        except OSError as error:
            self.close()
            raise _failure(f"trying out '{path}'", error) from error

    def reserve(self, nbytes: int, label: str) -> int:
        """The offset of ``nbytes`` bytes that nobody else has.

        Raises:
            OffloadError: if the disk has no room for them.
        """
        with self._lock:
            end = self._ranges.end
            offset = self._ranges.take(nbytes)
            try:
                if self._ranges.end > end:
                    self._extend(offset, nbytes)
            except OSError as error:
                self._ranges.end = end
                what = f"reserving {nbytes} bytes of '{self.path}' for slab '{label}'"
                raise _failure(what, error) from error
        return offset

    def give_back(self, offset: int, nbytes: int) -> None:
        """Let others have what was reserved."""
        with self._lock:
            self._ranges.give_back(offset, nbytes)

    def read(self, into: memoryview, offset: int, label: str) -> None:
        """Fill ``into``.

        Raises:
            OffloadError: if that is not possible, or the file is too short.
        """
        self._move(into, offset, label, is_read=True)

    def write(self, data: memoryview, offset: int, label: str) -> None:
        """Write ``data``; it is to be trusted after :meth:`settle`.

        Raises:
            OffloadError: if that is not possible.
        """
        self._move(data, offset, label, is_read=False)

    def settle(self) -> None:
        """Wait until the disk has all that was written so far. Direct I/O has waited already.

        Raises:
            OffloadError: if the disk has failed to take any of it; that is said only once.
        """
        if not self.is_direct:
            try:
                getattr(os, "fdatasync", os.fsync)(self._handle)
            except OSError as error:
                raise _failure(f"writing '{self.path}'", error) from error

    def drop_cache(self, offset: int, nbytes: int) -> None:
        """Free the page cache of what has been read or has settled."""
        if not self.is_direct and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._handle, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Delete the file. Nothing may be under way. Calling it again is free."""
        with self._lock:
            handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)
            # whoever has deleted it, or made it impossible, has done what is left to do
            with contextlib.suppress(OSError):
                self.path.unlink()

    def _move(self, data: memoryview, offset: int, label: str, *, is_read: bool) -> None:
        move = os.preadv if is_read else os.pwritev
        done = 0
        while done < len(data):
            what = (
                f"{'reading' if is_read else 'writing'} slab '{label}' at byte {offset + done} of "
                f"'{self.path}'"
            )
            try:
                moved = move(self._handle, [data[done:]], offset + done)
            except OSError as error:
                raise _failure(what, error) from error
            # Direct I/O goes on where a block begins; the end of a shortened file may lie anywhere.
            progress = moved // ALIGNMENT * ALIGNMENT if self.is_direct else moved
            if not progress and done + moved < len(data):
                size = os.fstat(self._handle).st_size
                raise OffloadError(
                    f"{what} failed: {moved} of {len(data) - done} bytes were moved; the file has "
                    f"{size} bytes"
                )
            done += progress or moved

    def _switch_to_direct(self) -> bool:
        """Turn direct I/O on if it works. Only a try can tell: some file systems accept the flag
        and refuse the I/O.
        """
        if not _DIRECT:
            return False
        block = memoryview(map_pages(ALIGNMENT))
        plain = self._handle
        try:
            self._handle = os.open(self.path, os.O_RDWR | _DIRECT)
            moved = os.pwritev(self._handle, [block], 0), os.preadv(self._handle, [block], 0)
            is_direct = moved == (ALIGNMENT, ALIGNMENT)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            is_direct = False
        for handle in {plain, self._handle} - {self._handle if is_direct else plain}:
            os.close(handle)
        self._handle = self._handle if is_direct else plain
        return is_direct

    def _extend(self, offset: int, nbytes: int) -> None:
        # A disk that is too small is better found out now than in the middle of a step.
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._handle, offset, nbytes)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
            else:
                return
        os.ftruncate(self._handle, max(os.fstat(self._handle).st_size, offset + nbytes))


class _Ranges:
    """Which bytes of a file are in use.

    Attributes:
        end: the number of bytes that have been reserved of the disk.
    """

    def __init__(self) -> None:
        self.end = 0
        self._free: list[tuple[int, int]] = []  # (offset, nbytes), sorted, never adjacent

    def take(self, nbytes: int) -> int:
        """The offset of the first free range that is long enough; the file grows if there is
        none.
        """
        for index, (offset, free_bytes) in enumerate(self._free):
            if free_bytes >= nbytes:
                rest = [(offset + nbytes, free_bytes - nbytes)] if free_bytes > nbytes else []
                self._free[index : index + 1] = rest
                return offset
        offset, self.end = self.end, self.end + nbytes
        return offset

    def give_back(self, offset: int, nbytes: int) -> None:
        merged: list[tuple[int, int]] = []
        for begin, free_bytes in sorted([*self._free, *([(offset, nbytes)] if nbytes else [])]):
            if merged and sum(merged[-1]) == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + free_bytes)
            else:
                merged.append((begin, free_bytes))
        self._free = merged


def _failure(what: str, error: OSError) -> OffloadError:
    name = errno.errorcode.get(error.errno or 0, "unknown")
    return OffloadError(f"{what} failed: {error.strerror} ({name}, errno {error.errno})")
