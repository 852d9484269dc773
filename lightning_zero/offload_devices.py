"""From the user's choice of offloading to devices that are open, or a refusal with the numbers."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info

from lightning_zero.comm.collectives import Collectives
from lightning_zero.config import MEBIBYTE, OffloadConfig
from lightning_zero.engine.memory import MemoryRow
from lightning_zero.engine.offload import Offload
from lightning_zero.engine.units import MAX_UNIT_BYTES
from lightning_zero.errors import OffloadError
from lightning_zero.offload.device import OffloadDevice
from lightning_zero.offload.disk import Disk
from lightning_zero.offload.host import HostMemory
from lightning_zero.offload.run_folder import RunFolder, free_bytes
from lightning_zero.offload.transfer import Transfers

_RESERVE = 0.02  # of a file system, for everything else
_UNITS_IN_FLIGHT = 4  # one stepped, two being read, one being written
_SHARDS_PER_UNIT = 4  # weights, gradients and Adam's two moments


class OffloadPlaces(NamedTuple):
    """Where optimizer state and parameters rest in a run: "cpu", "nvme" or None."""

    states: str | None
    params: str | None


def active_places(
    config: OffloadConfig | None,
    device: torch.device,
    *,
    is_fitting: bool,
    is_parking: bool = False,
) -> OffloadPlaces:
    """What of the user's choice applies to a run on ``device``, or, if ``is_parking``, while a run
    evaluates.
    """
    if config is None:
        return OffloadPlaces(None, None)
    chosen = OffloadPlaces(
        config.optimizer if is_fitting and is_parking == (config.during == "evaluation") else None,
        config.params if config.during != ("evaluation" if is_fitting else "training") else None,
    )
    if device.type == "cpu" and not config.force:
        return OffloadPlaces(*(None if place == "cpu" else place for place in chosen))
    return chosen


class _Machine(NamedTuple):
    """What a rank reports of the machine that it is on."""

    host: str
    memory_bytes: int
    disk: int
    free_disk_bytes: int
    error: str | None


def open_offload(
    config: OffloadConfig,
    places: OffloadPlaces,
    device: torch.device,
    collectives: Collectives,
    needed: Mapping[str, int],
) -> Offload:
    """Open the devices of a run. Collective; refused on every rank if it is on any.

    Args:
        config: the user's choice.
        places: what of it applies.
        device: where the model is computed.
        collectives: the ranks.
        needed: bytes that will rest in each place, of all ranks together.

    Raises:
        MisconfigurationException: if memory or disk are too small, or the folder can not be used;
            says how much there is and how much is needed.
    """
    folder: RunFolder | None = None
    error, path = None, Path(config.folder or ".")
    if "nvme" in places:
        try:
            folder = RunFolder.claim(path, collectives.rank)
        except (OffloadError, OSError, ValueError) as failure:
            error = str(failure)
    machines = collectives.all_gather_object(_report(path, folder, error), "the machines' memory")
    try:
        _check(machines, needed, path)
    except MisconfigurationException:
        if folder is not None:
            folder.close()
        raise
    num_local = sum(m.host == machines[collectives.rank].host for m in machines)
    devices: dict[str, OffloadDevice] = {}
    if folder is not None:
        devices["nvme"] = Disk(folder.path, config.staging_bytes // num_local)
    if "cpu" in places:
        devices["cpu"] = HostMemory(_pin_bytes(config, num_local))
    return Offload(
        None if places.states is None else devices[places.states],
        None if places.params is None else devices[places.params],
        Transfers(device, pins=bool(config.pin_memory)),
        max_unit_bytes=_max_unit_bytes(config, places, num_local, collectives.world_size),
        delay_after=None if places.states is None else config.delay_after,
        on_close=None if folder is None else folder.close,
    )


def _max_unit_bytes(
    config: OffloadConfig, places: OffloadPlaces, num_local: int, world_size: int
) -> int:
    """The size of units of which several fit in the staging memory at once."""
    if "nvme" not in places:
        return MAX_UNIT_BYTES
    per_rank = config.staging_bytes // num_local // _UNITS_IN_FLIGHT
    return min(MAX_UNIT_BYTES, per_rank * world_size // _SHARDS_PER_UNIT)


def _report(path: Path, folder: RunFolder | None, error: str | None) -> _Machine:
    disk = 0 if folder is None else os.stat(folder.path).st_dev
    free = 0 if folder is None else free_bytes(path)
    return _Machine(socket.gethostname(), _memory_bytes(), disk, free, error)


def _memory_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _pin_bytes(config: OffloadConfig, num_local: int) -> int:
    if config.pin_memory is True:
        return _memory_bytes() // 2 // num_local
    return config.pin_memory // num_local


def _check(machines: list[_Machine], needed: Mapping[str, int], path: Path) -> None:
    """Refuse what can not work, with the numbers."""
    for rank, machine in enumerate(machines):
        if machine.error is not None:
            raise MisconfigurationException(
                f"Rank {rank} can not offload to '{path}': {machine.error}"
            )
    per_rank = {place: count / len(machines) for place, count in needed.items()}
    ranks_of_host = Counter(machine.host for machine in machines)
    ranks_of_disk = Counter((machine.host, machine.disk) for machine in machines)
    for machine in machines:
        memory = per_rank.get("cpu", 0) * ranks_of_host[machine.host]
        if memory > machine.memory_bytes:
            raise MisconfigurationException(
                f"Offloading to 'cpu' needs {_readable(memory)} of host memory on"
                f" {machine.host}, which has {_readable(machine.memory_bytes)}. Use more"
                " machines, or offload to 'nvme'."
            )
        disk = per_rank.get("nvme", 0) * ranks_of_disk[machine.host, machine.disk]
        if disk > machine.free_disk_bytes * (1 - _RESERVE):
            raise MisconfigurationException(
                f"Offloading to 'nvme' needs {_readable(disk)} in '{path}' on {machine.host},"
                f" where {_readable(machine.free_disk_bytes)} are free. Free some, or pass"
                " another `nvme_path`."
            )


def _readable(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.2f} MB"


def announce(config: OffloadConfig, offload: Offload, rows: Sequence[MemoryRow]) -> None:
    """Say what will be where on a rank, before it is."""
    forecast = ", ".join(
        f"{row.kind} {row.forecast_bytes / MEBIBYTE:.1f}" for row in rows if row.forecast_bytes
    )
    parts = [f"Memory forecast of a rank in MiB: {forecast}."]
    for device in offload.devices:
        if isinstance(device, Disk):
            kind = "direct" if device.is_direct else "plain (the file system refuses direct)"
            parts.append(
                f"Files are under '{config.folder}', {kind} I/O through staging memory of"
                f" {config.staging_bytes / MEBIBYTE:.0f} MiB a machine."
            )
    rank_zero_info(" ".join(parts))


def announce_nothing(config: OffloadConfig, device: torch.device) -> None:
    """Say it where offloading to the CPU does nothing, because it is on the CPU."""
    uses_cpu = "cpu" in (config.optimizer, config.params)
    if uses_cpu and device.type == "cpu" and not config.force:
        rank_zero_info(
            "Offloading to 'cpu' does nothing here: the model is in host memory already."
            " (OffloadCallback(force=True) runs the whole path all the same.)"
        )
