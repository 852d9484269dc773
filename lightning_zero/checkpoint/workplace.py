"""How a folder replaces another one such that a kill at any instant loses neither.

[Note: the workplace] A save works in a hidden folder next to its target. Its name does not contain
the target's, so nothing that looks for checkpoints by name finds it. It holds

 - ``new``: what is being written;
 - ``old``: what the target name stood for, from the moment the target is replaced;
 - ``trash``: what is to be deleted.

A target is replaced by two renames, of the old folder into the workplace and of the new one out of
it. Whoever comes after a kill between the two (the next save in that folder, or a reader that does
not find its checkpoint) puts the old one back.

A lock file of the same name plus ``.lock`` says whose target it is. The saver holds a lock
(``flock``) on it, which the kernel releases whenever and however the process ends: a workplace
whose lock is free is a leftover. Process numbers would lie, across hosts and containers, and after
reuse. The lock file is there before the workplace and goes after it. Whoever finds a free lock
cleans up while holding it and deletes the file last; so a lock that was obtained counts only if its
file still has a name. Where the file system knows no locks, a workplace is a leftover when
it is a day old.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from lightning_zero.checkpoint.failures import CheckpointError
from lightning_zero.checkpoint.files import sync

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_PREFIX, _LOCK = ".zero-tmp-", ".lock"
_DAY = 24 * 3600.0
_PATIENCE = 10.0  # seconds for a live save to make its two renames


class Workplace:
    """Where one process (rank 0) prepares the content of ``target``. A context manager: leaving it
    removes all that is left.

    Attributes:
        new: the empty folder to be filled.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._lock, self._handle = _new_lock(target)
        self._folder = self._lock.with_suffix("")
        self.new = self._folder / "new"
        try:
            self.new.mkdir(parents=True)
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __enter__(self) -> Workplace:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            _put_back(self._folder, self._target)
            _remove(self._folder, self._lock)
        finally:
            # explicitly: processes that were forked meanwhile hold the handle, too
            _unlock(self._handle)

    def publish(self) -> None:
        """Put ``new`` in the target's place. All in it must be durable.

        Raises:
            OSError: if it can not be done; the old target is in its place.
        """
        old = self._folder / "old"
        if os.path.lexists(self._target):
            os.rename(self._target, old)
        try:
            os.rename(self.new, self._target)
        except OSError:
            _put_back(self._folder, self._target)
            raise
        # before `old` is deleted
        sync(self._target.parent)

    def discard(self) -> None:
        """Take the target away, to be deleted when the context is left."""
        os.rename(self._target, self._folder / "trash")
        sync(self._target.parent)


def clean(parent: Path) -> None:
    """Remove what killed saves have left in a folder, and put back what they had moved aside."""
    for lock in _locks(parent):
        with _taken_over(lock) as is_leftover:
            if is_leftover:
                folder = lock.with_suffix("")
                target = _target_of(lock)
                if target is not None:
                    _put_back(folder, target)
                _remove(folder, lock)


def recover(target: Path) -> None:
    """If a killed save has moved ``target`` aside, put it back; if a live one has, wait for the new
    one. For readers: deletes nothing.
    """
    deadline = time.monotonic() + _PATIENCE
    while not os.path.lexists(target):
        is_busy = False
        for lock in _locks(target.parent):
            if _target_of(lock) != target or not os.path.lexists(lock.with_suffix("") / "old"):
                continue
            with _taken_over(lock) as is_leftover:
                is_busy = is_busy or not is_leftover
                if is_leftover:
                    _put_back(lock.with_suffix(""), target)
        if not is_busy or time.monotonic() > deadline:
            return
        time.sleep(0.02)


def _locks(parent: Path) -> list[Path]:
    return sorted(parent.glob(f"{_PREFIX}*{_LOCK}"))


def _new_lock(target: Path) -> tuple[Path, int]:
    """A lock file of our own, locked, that names the target."""
    while True:
        lock = target.parent / f"{_PREFIX}{secrets.token_hex(6)}{_LOCK}"
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            is_locked = _try_lock(handle) is not False
            if is_locked and os.fstat(handle).st_nlink:
                os.write(handle, json.dumps({"target": target.name}).encode())
                os.fsync(handle)
                return lock, handle
        except BaseException:
            lock.unlink(missing_ok=True)
            os.close(handle)
            raise
        os.close(handle)  # somebody who cleans up was faster, and has taken it for a leftover


def _target_of(lock: Path) -> Path | None:
    """None if the saver did not come to write it: it has moved nothing then."""
    try:
        return lock.parent / str(json.loads(lock.read_text())["target"])
    except (OSError, ValueError, KeyError):
        return None


@contextlib.contextmanager
def _taken_over(lock: Path) -> Iterator[bool]:
    """Whether a workplace is nobody's. If so it is ours in this context."""
    try:
        handle = os.open(lock, os.O_RDWR)
    except OSError:  # gone, or not ours to touch
        yield False
        return
    try:
        is_free = _try_lock(handle)
        state = os.fstat(handle)
        if is_free is None:
            is_free = time.time() - state.st_mtime > _DAY
        yield is_free and state.st_nlink > 0
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool | None:
    """Whether we hold the lock now; None where there are no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def _unlock(handle: int) -> None:
    with contextlib.suppress(OSError):
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def _put_back(folder: Path, target: Path) -> None:
    old = folder / "old"
    if os.path.lexists(old) and not os.path.lexists(target):
        os.rename(old, target)
        sync(target.parent)


def _remove(folder: Path, lock: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):  # left to the next one who cleans up
        return
    with contextlib.suppress(OSError):
        lock.unlink()


def require_replaceable(target: Path, *marks: str) -> None:
    """Refuse to delete a folder with something else in it.

    Args:
        target: what is to be replaced or deleted.
        *marks: files of which a checkpoint has at least one.

    Raises:
        CheckpointError: if it is a folder without any of the marks that is not empty.
    """
    if target.is_symlink() or not target.is_dir():
        return
    if not any((target / mark).exists() for mark in marks) and any(target.iterdir()):
        raise CheckpointError(f"'{target}' is a folder, but not a checkpoint; it is left alone")
