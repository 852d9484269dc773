"""Starts one process per rank, waits with a time limit, and never leaves one behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from harness.backends import split_name
from harness.job import Job

BENCHMARKS = Path(__file__).resolve().parent.parent
LOG_CHARACTERS = 4000
GRACE_S = 10.0  # for the other ranks to end by themselves once one has failed


@dataclass(frozen=True)
class Hosts:
    """Where the ranks run."""

    world_size: int
    namespaces: tuple[str, ...] = ()
    """Network namespaces: none (this one), one for all ranks, or one per rank (each a "host")."""
    master_address: str = "127.0.0.1"
    interface: str | None = None
    """The network device of the namespaces; its byte counter belongs to the ranks alone."""

    @property
    def ranks_per_host(self) -> int:
        """Ranks that share a host, and so a network device."""
        return self.world_size // max(1, len(self.namespaces))

    def command(self, rank: int) -> list[str]:
        """The prefix that moves a process to its host."""
        if not self.namespaces:
            return []
        host = self.namespaces[rank // self.ranks_per_host]
        enter = ["ip", "netns", "exec", host]
        if len(self.namespaces) == 1:
            return enter
        # Two hosts share neither a name nor memory, whatever a backend may try.
        own = 'echo "$0" > /proc/sys/kernel/hostname && mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        return [*enter, "unshare", "--uts", "--ipc", "sh", "-c", own, host]

    def environment(self, rank: int, port: int) -> dict[str, str]:
        """The variables that torchrun would set."""
        local, per_host = rank % self.ranks_per_host, self.ranks_per_host
        device = {"GLOO_SOCKET_IFNAME": self.interface} if self.interface else {}
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(per_host),
            "GROUP_RANK": str(rank // per_host),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(port),
            **device,
        }


class Outcome(NamedTuple):
    """Either one result per rank, or why there is none."""

    ranks: list[dict[str, Any]]
    error: str | None
    """One line."""
    logs: list[str]
    """The end of what each rank printed, if it failed."""


def clean_up_when_terminated() -> None:
    """Let SIGTERM end this program as an error does: its processes and namespaces go with it."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)


@contextmanager
def private_loopback(world_size: int) -> Iterator[Hosts]:
    """A network namespace with nothing but a loopback, or the plain host where that can't be had.

    Its loopback carries the ranks' traffic only, so that its byte counter is theirs.
    """
    name = f"zerobench{os.getpid()}"
    if os.name != "posix" or os.geteuid() != 0 or shutil.which("ip") is None:
        yield Hosts(world_size)
        return
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode:
        yield Hosts(world_size)
        return
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        yield Hosts(world_size, namespaces=(name,), interface="lo")
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_backend(name: str, job: Job, hosts: Hosts) -> Outcome:
    """Run `name` in fresh processes, one per rank."""
    backend, extra = split_name(name)
    counted = hosts.interface if job.device == "cpu" else None  # NCCL doesn't use it on one host
    job = replace(job, backend=backend, interface=counted, ranks_per_interface=hosts.ranks_per_host)
    port = _free_port()
    path = os.pathsep.join(filter(None, [str(BENCHMARKS.parent), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory(prefix="zerobench") as folder:
        processes = []
        try:
            for rank in range(hosts.world_size):
                environment = {
                    **os.environ,
                    "OMP_NUM_THREADS": str(job.threads),
                    "TORCH_CPP_LOG_LEVEL": "ERROR",
                    "PYTHONPATH": path,
                    **hosts.environment(rank, port),
                    **extra,
                }
                processes.append(_start(job, hosts.command(rank), environment, folder, rank))
            error = _wait(processes, job.timeout_s)
        finally:
            _end(processes)
        if error:
            logs = [_log(folder, rank) for rank in range(hosts.world_size)]
            return Outcome([], error + _last_words(logs), [log[-LOG_CHARACTERS:] for log in logs])
        return Outcome([_read(folder, rank) for rank in range(hosts.world_size)], None, [])


def _start(
    job: Job, prefix: list[str], environment: dict[str, str], folder: str, rank: int
) -> subprocess.Popen[bytes]:
    command = [*prefix, sys.executable, str(BENCHMARKS / "worker.py"), job.to_json()]
    with open(f"{folder}/log{rank}", "wb") as log:
        return subprocess.Popen(
            [*command, f"{folder}/result{rank}"],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that a rank and what it started can be ended together
        )


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> str | None:
    deadline = time.monotonic() + timeout_s
    failed: str | None = None
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline:
            return failed or f"no end after {timeout_s:.0f} s"
        codes = [process.poll() for process in processes]
        if failed is None and any(codes):
            failed = _describe(codes)
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.05)
    codes = [process.poll() for process in processes]
    return failed or (_describe(codes) if any(codes) else None)


def _describe(codes: Sequence[int | None]) -> str:
    return ", ".join(f"rank {rank} exit code {code}" for rank, code in enumerate(codes) if code)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _log(folder: str, rank: int) -> str:
    path = Path(f"{folder}/log{rank}")
    return path.read_text(errors="replace") if path.exists() else ""


def _last_words(logs: Sequence[str]) -> str:
    """The last line that says what went wrong, of the first rank that says anything."""
    for log in logs:
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        signs = ("Error", "Exception", "Timeout (")  # the last is faulthandler's word for a hang
        errors = [line for line in lines if any(sign in line for sign in signs)]
        if lines:
            return f": {(errors or lines)[-1]}"
    return ""


def _read(folder: str, rank: int) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(Path(f"{folder}/result{rank}").read_text())
    return result
