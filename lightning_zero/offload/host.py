"""Tensors that rest in host memory, page-locked up to a limit."""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch import Tensor

from lightning_zero.errors import OffloadError
from lightning_zero.offload.device import OffloadCounters, OffloadDevice, Slab
from lightning_zero.offload.memory import map_pages, tensor_on


class PageLock(Protocol):
    """Keeps host memory in place, so that an accelerator can copy from and to it by itself."""

    def lock(self, address: int, nbytes: int) -> None:
        """Lock the pages of ``nbytes`` bytes from a page's beginning on.

        Raises:
            OffloadError: if the system refuses.
        """

    def unlock(self, address: int) -> None:
        """Undo :meth:`lock`."""


class CudaPageLock:
    """Page-locking by the CUDA driver."""

    def lock(self, address: int, nbytes: int) -> None:
        """See :class:`PageLock`."""
        status = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
        if status:
            raise OffloadError(
                f"page-locking {nbytes} bytes of host memory failed with CUDA error {status}; "
                "lower pin_bytes"
            )

    def unlock(self, address: int) -> None:
        """See :class:`PageLock`."""
        torch.cuda.synchronize()  # copies that are under way use the memory
        torch.cuda.cudart().cudaHostUnregister(address)


class HostMemory(OffloadDevice):
    """Host memory as an offload device: slabs are ordinary CPU tensors.

    Args:
        pin_bytes: how many bytes may be page-locked, if there is CUDA.
        page_lock: how they are locked; by CUDA unless a test says otherwise.

    Attributes:
        pinned_bytes: how many are.
    """

    name = "cpu"

    def __init__(self, pin_bytes: int = 0, *, page_lock: PageLock | None = None) -> None:
        self.counters = OffloadCounters()
        self.pinned_bytes = 0
        self._pin_bytes = pin_bytes
        if page_lock is None and pin_bytes and torch.cuda.is_available():
            page_lock = CudaPageLock()
        self._page_lock = page_lock
        # in the order in which they were made
        self._slabs: dict[HostSlab, None] = {}
        self._is_closed = False

    def make_slab(
        self, numel: int, dtype: torch.dtype, label: str, *, pinned: bool = False
    ) -> HostSlab:
        """See :meth:`OffloadDevice.make_slab`.

        Args:
            numel: its number of elements.
            dtype: of its elements.
            label: what messages call it.
            pinned: whether it is page-locked, if the limit allows that.
        """
        if self._is_closed:
            raise RuntimeError("the offload device 'cpu' is closed")
        nbytes = numel * dtype.itemsize
        is_pinned = pinned and 0 < nbytes <= self._pin_bytes - self.pinned_bytes
        slab = HostSlab(self, numel, dtype, label, self._page_lock if is_pinned else None)
        self._slabs[slab] = None
        self.pinned_bytes += nbytes if slab.is_pinned else 0
        return slab

    def has_room(self, nbytes: int) -> bool:
        """See :meth:`OffloadDevice.has_room`: always, for nothing is staged."""
        return True

    def wait(self) -> None:
        """See :meth:`OffloadDevice.wait`: nothing is ever under way."""

    def close(self) -> None:
        """See :meth:`OffloadDevice.close`."""
        self._is_closed = True
        for slab in list(self._slabs):
            slab.close()

    @property
    def resting_bytes(self) -> int:
        """See :attr:`OffloadDevice.resting_bytes`."""
        return sum(slab.nbytes for slab in self._slabs)

    @property
    def staging_bytes(self) -> int:
        """See :attr:`OffloadDevice.staging_bytes`."""
        return 0

    @property
    def peak_staging_bytes(self) -> int:
        """See :attr:`OffloadDevice.peak_staging_bytes`."""
        return 0

    def _forget(self, slab: HostSlab) -> None:
        del self._slabs[slab]
        self.pinned_bytes -= slab.nbytes if slab.is_pinned else 0


class HostSlab(Slab):
    """A tensor in host memory.

    Attributes:
        is_pinned: whether it is page-locked.
    """

    is_addressable = True

    def __init__(
        self,
        device: HostMemory,
        numel: int,
        dtype: torch.dtype,
        label: str,
        page_lock: PageLock | None,
    ) -> None:
        super().__init__(numel, dtype, label)
        self._device = device
        self._tensor: Tensor | None
        self._is_prepared = self._is_stored = False
        self._unlock: weakref.finalize[..., HostSlab] | None = None
        if page_lock is None:
            self._tensor = torch.empty(numel, dtype=dtype)
        else:
            # Not `pin_memory`: its allocator rounds sizes up to powers of two and keeps the memory.
            self._tensor = tensor_on(map_pages(self.nbytes), numel, dtype)
            address = self._tensor.data_ptr()
            page_lock.lock(address, self.nbytes)
            # Also for a slab that nobody closes: the driver would take the address for locked when
            # it is used again.
            self._unlock = weakref.finalize(self, page_lock.unlock, address)
            self._unlock.atexit = False  # CUDA may be gone by then

    @property
    def is_pinned(self) -> bool:
        """Whether it is page-locked."""
        return self._unlock is not None

    def start_load(self) -> None:
        """See :meth:`Slab.start_load`."""
        self._open_tensor()
        if not (self._is_stored or self._is_prepared):
            raise self._never_stored()

    def load(self) -> Tensor:
        """See :meth:`Slab.load`."""
        self.start_load()
        return self._open_tensor()

    def prepare(self) -> Tensor:
        """See :meth:`Slab.prepare`."""
        self._is_prepared = True
        return self._open_tensor()

    def start_store(self) -> None:
        """See :meth:`Slab.start_store`: what was written to the tensor is there already."""
        self.start_load()
        self._is_stored = True

    def release(self) -> None:
        """See :meth:`Slab.release`."""
        self._is_prepared = False

    def close(self) -> None:
        """See :meth:`Slab.close`."""
        if self._tensor is not None:
            self._device._forget(self)
            if self._unlock is not None:
                self._unlock()
            self._tensor = None

    def _open_tensor(self) -> Tensor:
        if self._tensor is None:
            raise self._closed()
        return self._tensor
