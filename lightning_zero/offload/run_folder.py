"""The folder of one process of one run, which a later run removes if this one dies.

[Note: whose folder] Next to each folder lies a lock file of the same name plus ``.lock``, on which
the owner holds a lock (``flock``) that the kernel releases however the process ends. The lock file
is there before the folder and goes after it. Whoever gets the lock of another's file owns the
folder, and removes it while holding the lock and the lock file last. A lock counts only if its file
still has its name: otherwise somebody has cleaned up between opening and locking it.

The kernel releases a lock with the last descriptor of it. Programs that the owner starts do not
inherit descriptors; children that it forks do, so they close theirs at once. What remains: a child
that is forked without Python's knowing (by a C library, and not followed by exec) keeps the folder
from being removed until it ends. And where the file system knows no locks (some mounts of Lustre),
folders of the dead stay.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import socket
import weakref
from pathlib import Path

from lightning_zero.errors import OffloadError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_LOCK = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_MOST_ATTEMPTS = 100
# The descriptors of this process's locks, by path of the lock file.
_own_locks: dict[Path, int] = {}


class RunFolder:
    """A folder that only this process uses. It is removed by :meth:`close`, at the latest when the
    interpreter exits, or else by the next run on this host.

    Attributes:
        path: where it is.
    """

    path: Path

    def __init__(self, path: Path, lock: Path) -> None:
        self.path = path
        self._close = weakref.finalize(self, _close, path, lock, os.getpid())

    @classmethod
    def claim(cls, path: Path, rank: int) -> RunFolder:
        """Make a folder inside ``path``, and remove those whose owners on this host are dead.

        Args:
            path: made if it does not exist.
            rank: becomes part of the folder's name.

        Raises:
            OffloadError: if ``path`` can not be made or written to.
        """
        path = Path(path).absolute()
        try:
            path.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(path)
            lock = _new_lock(path, f"lightning_zero-{_host()}-{os.getpid()}-rank{rank}")
            folder = lock.with_suffix("")
            # what a dead process of the same number has left
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise OffloadError(
                f"the folder '{path}' can not be used for offloading: {error}. Give a folder on a "
                "local disk that can be written to."
            ) from error
        return cls(folder, lock)

    def close(self) -> None:
        """Remove the folder with everything in it. Calling it again is free."""
        self._close()


def free_bytes(path: Path) -> int:
    """How much an ordinary user can still write to the disk of an existing ``path``.

    Raises:
        OffloadError: if the system does not say.
    """
    try:
        status = os.statvfs(path)
    except OSError as error:
        raise OffloadError(f"asking for the free bytes of '{path}' failed: {error}") from error
    return status.f_bavail * status.f_frsize


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())


def _new_lock(folder: Path, name: str) -> Path:
    """Make and lock a lock file; the name gets a number if a live process has it.

    Two containers on one disk may have the same host name and process numbers.
    """
    for attempt in range(_MOST_ATTEMPTS):
        lock = folder / f"{name}{f'-{attempt}' if attempt else ''}{_LOCK}"
        if lock not in _own_locks:
            handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
            if _is_ours(lock, handle, without_locks=True):
                _own_locks[lock] = handle
                return lock
            os.close(handle)
    raise OSError(f"{_MOST_ATTEMPTS} lock files like '{lock}' are taken")


def _is_ours(lock: Path, handle: int, *, without_locks: bool) -> bool:
    """Whether the lock file, opened as ``handle``, is locked by us from now on.

    Args:
        lock: its path.
        handle: its descriptor.
        without_locks: the answer where the file system knows no locks.
    """
    try:
        if fcntl is None:
            return without_locks
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(handle), lock.stat())
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError as error:
        return without_locks and error.errno in _NO_LOCKS


def _remove_leftovers(folder: Path) -> None:
    # Another host's locks may not be visible from here: its folders are its own business.
    name = re.compile(rf"lightning_zero-{re.escape(_host())}-\d+-rank\d+(-\d+)?{re.escape(_LOCK)}")
    for lock in sorted(folder.iterdir()):
        # Where locks belong to processes (NFS), we would get our own and lose them.
        if lock in _own_locks or not name.fullmatch(lock.name):
            continue
        # another user's, or somebody else is removing it
        with contextlib.suppress(OSError):
            handle = os.open(lock, os.O_RDWR)
            try:
                if _is_ours(lock, handle, without_locks=False):
                    _remove(lock.with_suffix(""), lock)
            finally:
                os.close(handle)


def _remove(folder: Path, lock: Path) -> None:
    """Called by the holder of the lock."""
    shutil.rmtree(folder, ignore_errors=True)
    # What could not be removed keeps its lock file, and is found again.
    if not folder.exists():
        with contextlib.suppress(OSError):
            lock.unlink()


def _close(folder: Path, lock: Path, owner: int) -> None:
    if os.getpid() == owner:
        _remove(folder, lock)
        os.close(_own_locks.pop(lock))


def _close_locks_in_child() -> None:
    for handle in _own_locks.values():
        with contextlib.suppress(OSError):
            os.close(handle)
    _own_locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_locks_in_child)
