"""A local disk as an offload device."""

from __future__ import annotations

from pathlib import Path

import torch

from lightning_zero.errors import OffloadError
from lightning_zero.offload.device import OffloadDevice
from lightning_zero.offload.disk_file import DiskFile
from lightning_zero.offload.disk_slab import DiskParts, DiskSlab
from lightning_zero.offload.movers import Movers
from lightning_zero.offload.staging import StagingPool


class Disk(OffloadDevice):
    """A local disk as an offload device: one file, read and written by threads.

    Args:
        folder: where the file ``states.bin`` is made; must exist.
        staging_bytes: the budget of host memory for what is loaded or being written.
        num_threads: how many system calls are under way at the same time.
        use_direct: whether to try direct I/O.

    Raises:
        OffloadError: if the file can not be made.
        ValueError: if there are no threads.
    """

    name = "nvme"

    def __init__(
        self, folder: Path, staging_bytes: int, num_threads: int = 4, *, use_direct: bool = True
    ) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}")
        file = DiskFile(folder / "states.bin", use_direct=use_direct)
        self._parts = DiskParts(file, StagingPool(staging_bytes), Movers(num_threads))
        self.counters = self._parts.counters

    @property
    def is_direct(self) -> bool:
        """Whether direct I/O is used."""
        return self._parts.file.is_direct

    def make_slab(self, numel: int, dtype: torch.dtype, label: str) -> DiskSlab:
        """See :meth:`OffloadDevice.make_slab`."""
        if self._parts.is_closed:
            raise RuntimeError(f"the offload device '{self._parts.file.path}' is closed")
        slab = DiskSlab(self._parts, numel, dtype, label)
        with self._parts.changed:
            self._parts.slabs[slab] = None
        return slab

    def has_room(self, nbytes: int) -> bool:
        """See :meth:`OffloadDevice.has_room`."""
        return self._parts.pool.has_room(nbytes)

    def wait(self) -> None:
        """See :meth:`OffloadDevice.wait`."""
        parts = self._parts
        with parts.changed, parts.waiting():
            parts.changed.wait_for(lambda: not any(slab.is_writing for slab in parts.slabs))
            failure = next(iter(parts.failures.values()), None)
        if failure is not None:
            raise OffloadError(str(failure)) from failure

    def close(self) -> None:
        """See :meth:`OffloadDevice.close`. What is under way is cut short."""
        parts = self._parts
        with parts.changed:
            parts.is_closed = True
            slabs = list(parts.slabs)
        # Every step can be done again: the last try may have been interrupted (Ctrl-C).
        for slab in slabs:
            slab.cancel()
        for slab in slabs:
            slab.close()
        parts.movers.close()
        parts.pool.clear()
        parts.file.close()

    @property
    def resting_bytes(self) -> int:
        """See :attr:`OffloadDevice.resting_bytes`."""
        with self._parts.changed:
            return sum(slab.nbytes for slab in self._parts.slabs)

    @property
    def staging_bytes(self) -> int:
        """See :attr:`OffloadDevice.staging_bytes`."""
        return self._parts.pool.held_bytes

    @property
    def peak_staging_bytes(self) -> int:
        """See :attr:`OffloadDevice.peak_staging_bytes`."""
        return self._parts.pool.peak_bytes
