"""Finds out that ranks can never finish what they wait for, and stops them with a message.

[Note: how a stall is proven]
A rank that waits long is not yet a fault: another one may be loading data or writing a checkpoint.
It is a fault when *every* rank is blocked in a collective and they are not all in the same one.
Each rank therefore looks once a second whether its main thread is blocked; if it has been for half
the timeout it publishes where, and reads the others. Ranks that all wait in different places raise
:class:`RankMismatchError` with all the places. A rank that failed publishes its error; ranks that
are blocked then raise :class:`PeerFailedError` at once, quoting it.

A thread cannot raise in another one that is blocked in C++. Shutting down the sockets of the
process group makes the blocked call return with an error, which is then replaced by the
explanation.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from lightning_zero.errors import PeerFailedError, RankMismatchError, ZeroError

_POLL_SECONDS = 0.5
_SUSPICIOUS_SECONDS = 2.0
_EXIT_GRACE_SECONDS = 10.0
_READ_STALL = timedelta(seconds=6)
_SIGNAL_HANDLER = "called at signal_connector.py"
"""Where Lightning's handler of a signal waits for the other ranks."""
_REASON_SECONDS = 3.0
# How gloo, NCCL and the store say that whoever they talk to is not there.
_CONNECTION_WORDS = (
    "connection",
    "connect",
    "socket",
    "peer",
    "timed out",
    "timeout",
    "nccl",
    "gloo",
    "broken pipe",
)


def is_about_connections(error: BaseException) -> bool:
    """Whether an error says that another rank can not be reached, not that something is wrong here:
    on CUDA any earlier fault may be raised where the host waits.
    """
    text = str(error).lower()
    is_of_the_device = "cuda error" in text or "device-side assert" in text
    return isinstance(error, dist.DistBackendError) or (
        not is_of_the_device and any(words in text for words in _CONNECTION_WORDS)
    )


def is_lost_connection(error: BaseException | None) -> bool:
    """Whether a collective of torch has failed because another rank could not be reached."""
    trace = None if error is None else error.__traceback__
    if error is None or trace is None or not isinstance(error, RuntimeError):
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    is_of_torch = "torch/distributed" in trace.tb_frame.f_code.co_filename
    return is_of_torch and is_about_connections(error)


Sockets = dict[int, str]
"""File descriptors, each with the name of the socket that it stood for when it was seen."""


def open_sockets() -> Sockets:
    """The sockets of this process (Linux; elsewhere none)."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:"):
                    found[int(name)] = target
    return found


def _shut_down(sockets: Sockets, spared_port: int | None) -> None:
    for descriptor, target in sockets.items():
        with contextlib.suppress(OSError):
            copy = os.dup(descriptor)
            if os.readlink(f"/proc/self/fd/{copy}") != target:
                os.close(copy)  # the number has been given to something else
                continue
            sock = socket.socket(fileno=copy)
            try:
                ports = {sock.getpeername()[1], sock.getsockname()[1]}
                if spared_port not in ports:
                    sock.shutdown(socket.SHUT_RDWR)
            finally:
                sock.close()


def _collective_frame(frame: FrameType | None) -> str | None:
    """Where the innermost frame is a call into torch.distributed: the call and who made it."""
    if frame is None or not frame.f_code.co_filename.endswith("distributed_c10d.py"):
        return None
    name = frame.f_code.co_name
    while frame is not None and "torch/distributed" in frame.f_code.co_filename:
        if frame.f_code.co_name != "wrapper":  # the one that logs and times collectives
            name = frame.f_code.co_name
        frame = frame.f_back
    where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else "unknown"
    return f"torch.distributed.{name} called at {where}"


class StallWatch:
    """Watches the main thread of this rank and talks to the watches of the other ranks through the
    store.

    Args:
        rank: this rank.
        world_size: number of ranks.
        timeout: how long all ranks may be blocked in different operations.
        sockets: what to shut down in order to wake the main thread.
    """

    def __init__(self, rank: int, world_size: int, timeout: timedelta, sockets: Sockets) -> None:
        self._rank, self._world_size, self.timeout = rank, world_size, timeout
        self._sockets = sockets
        self._label: str | None = None
        self._is_read = False
        self._since = 0.0
        self._run = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: c10d.Store | None = None
        self._is_ending = False
        self.reason: ZeroError | None = None

    # -- the watched thread

    @contextlib.contextmanager
    def waiting(self, label: str, *, is_read: bool = False) -> Iterator[None]:
        """Mark that the main thread waits for ``label``; errors inside are explained."""
        self._label, self._is_read, self._since = label, is_read, time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if not is_about_connections(error):
                raise
            explained = self.explain(error, label)
            raise explained from (None if explained is self.reason else error)
        finally:
            self._label = None

    def explain(self, error: BaseException, label: str) -> BaseException:
        """The error to raise in place of a broken connection."""
        reason = self.await_reason()
        if reason is not None:
            return reason
        return PeerFailedError(
            f"Rank {self._rank} lost another rank while it waited for {label}: {error}"
        )

    def await_reason(self) -> ZeroError | None:
        """Why a connection broke, as soon as this watch or another rank's knows; None if nobody
        says.
        """
        deadline = time.monotonic() + _REASON_SECONDS
        while self.reason is None and time.monotonic() < deadline:
            with contextlib.suppress(RuntimeError, ValueError):
                if self._store is not None and self._learn():
                    break
            time.sleep(_POLL_SECONDS / 10)
        return self.reason

    # -- life cycle

    def watch_sockets(self, sockets: Sockets) -> None:
        """Know of more sockets."""
        self._sockets.update(sockets)

    def start(self, store: c10d.Store) -> None:
        """Begin to watch. Every rank, as often as the others."""
        self._run += 1
        self.reason = None
        self._is_ending = False
        if self._store is None:  # one connection serves all runs
            clone = getattr(store, "clone", None)
            with contextlib.suppress(RuntimeError, NotImplementedError):
                store = clone() if clone is not None else store
            self._store = store
        self._stop.clear()
        self._thread = threading.Thread(
            target=self._watch, name="lightning_zero-watch", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; safe to call twice."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
        self._thread = None

    def report_failure(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed, unless one has said so before."""
        if self._store is None or isinstance(error, (PeerFailedError, RankMismatchError)):
            return
        text = f"rank {self._rank}: {type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(self._key("failed"), "", text)

    def ask_all(
        self, error: BaseException | None, state: dict[str, Any], patience: float
    ) -> list[dict[str, Any]] | None:
        """The states of all ranks, by rank, if each asks within ``patience`` seconds. Once in a
        run: from now on this rank is not interrupted because others have failed.
        """
        self._is_ending = True
        if error is not None:
            self.report_failure(error)
        if self._store is None:
            return None
        keys = [self._key(f"ending/{rank}") for rank in range(self._world_size)]
        deadline = time.monotonic() + patience
        with contextlib.suppress(RuntimeError, ValueError):
            self._store.set(keys[self._rank], json.dumps(state))
            while not self._store.check(keys):
                if time.monotonic() > deadline:
                    return None
                time.sleep(_POLL_SECONDS / 10)
            return [json.loads(self._store.get(key)) for key in keys]
        return None

    # -- the watching thread

    def _key(self, name: str) -> str:
        return f"lightning_zero/{self._run}/{name}"

    def _watch(self) -> None:
        suspicions = alarms = 0
        blocked_at: tuple[str, float] | None = None
        published = False
        while not self._stop.wait(_POLL_SECONDS):
            place = self._blocked_place()
            if place is None or blocked_at is None or blocked_at[0] != place:
                blocked_at = (place, time.monotonic()) if place is not None else None
            seconds = time.monotonic() - blocked_at[1] if blocked_at else 0.0
            try:
                # once may be chance: a rank that is about to fail by itself is let to
                alarms = alarms + 1 if place is not None and self._peer_failed() else 0
                if alarms >= 2:
                    return self._interrupt()
                if place is None or seconds < _SUSPICIOUS_SECONDS:
                    suspicions = 0
                    if published:
                        published = self._publish(None, 0.0)
                    continue
                published = self._publish(place, seconds)
                mismatch = self._mismatch(place, seconds)
                suspicions = suspicions + 1 if mismatch is not None else 0
                if suspicions >= 3:
                    assert self._store is not None
                    self._store.set(self._key("mismatch"), str(mismatch))
                    return self._interrupt()
            except (
                RuntimeError,
                ValueError,
            ):  # the store is gone: the run is over or rank 0 has left
                return None
        return None

    def _blocked_place(self) -> str | None:
        label, since = self._label, self._since
        if label is not None and time.monotonic() - since > _POLL_SECONDS:
            return label
        main = threading.main_thread().ident
        return _collective_frame(sys._current_frames().get(main)) if main is not None else None

    def _publish(self, place: str | None, seconds: float) -> bool:
        assert self._store is not None
        state = {"place": place, "seconds": seconds, "is_read": self._is_read}
        self._store.set(self._key(f"waiting/{self._rank}"), json.dumps(state))
        return place is not None

    def _peer_failed(self) -> bool:
        return not self._is_ending and self._failure_of_a_peer() is not None

    def _failure_of_a_peer(self) -> str | None:
        assert self._store is not None
        if not self._store.check([self._key("failed")]):
            return None
        text = self._store.get(self._key("failed")).decode()
        return None if text.startswith(f"rank {self._rank}:") else text

    def _learn(self) -> bool:
        """Take the reason that some rank has published, if there is one."""
        assert self._store is not None
        text = self._failure_of_a_peer()
        if text is not None:
            self.reason = PeerFailedError(
                f"Rank {self._rank} stops because another rank failed. {text}"
            )
        elif self._store.check([self._key("mismatch")]):
            self.reason = RankMismatchError(self._store.get(self._key("mismatch")).decode())
        return self.reason is not None

    def _mismatch(self, place: str, seconds: float) -> RankMismatchError | None:
        assert self._store is not None
        places = {self._rank: place}
        longest, is_read = seconds, self._is_read
        for rank in set(range(self._world_size)) - {self._rank}:
            key = self._key(f"waiting/{rank}")
            is_known = self._store.check([key])
            state: dict[str, Any] = {"place": None}
            if is_known:
                state = json.loads(self._store.get(key))
            if state["place"] is None:
                return None
            places[rank] = state["place"]
            longest, is_read = min(longest, state["seconds"]), is_read or state["is_read"]
        limit = min(self.timeout, _READ_STALL) if is_read else self.timeout
        signalled = [rank for rank, where in sorted(places.items()) if _SIGNAL_HANDLER in where]
        if signalled and len(signalled) < self._world_size:
            names = " and ".join(f"rank {rank}" for rank in signalled)
            return RankMismatchError(
                f"A signal (SIGTERM) has ended the run: {names} received it, and the other ranks"
                " did not, so that they can not end together. Send it to all ranks, or to the"
                " process that launched them: then a checkpoint is saved where one was asked for."
            )
        if len(set(places.values())) == 1 or longest < limit.total_seconds() / 2:
            return None
        lines = "; ".join(f"rank {rank} waits for {places[rank]}" for rank in sorted(places))
        return RankMismatchError(
            f"The ranks wait for different operations and none can finish: {lines}. Every rank has"
            " to train on the same number of batches; under stage 3 it also has to use the same"
            " modules and read the same parameters in the same order. Where ranks take different"
            " paths, wrap the code in `lightning_zero.full_params(module)` or use stage 2."
        )

    def _interrupt(self) -> None:
        """Wake the main thread; if it does not wake up, leave."""
        if self.reason is None and not self._learn():
            return
        master_port = os.environ.get("MASTER_PORT", "")
        _shut_down(self._sockets, int(master_port) if master_port.isdigit() else None)
        self._abort_device_groups()
        deadline = time.monotonic() + _EXIT_GRACE_SECONDS
        while time.monotonic() < deadline:
            if self._stop.wait(_POLL_SECONDS) or self._blocked_place() is None:
                return
        print(f"lightning_zero: {self.reason}", file=sys.stderr, flush=True)
        os._exit(1)

    @staticmethod
    def _abort_device_groups() -> None:
        abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
        if abort is not None and dist.is_initialized() and dist.get_backend() == "nccl":
            with contextlib.suppress(RuntimeError):
                abort()
