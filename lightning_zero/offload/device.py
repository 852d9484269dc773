"""The contract of a place where tensors rest outside of the accelerator.

[Note: life of a slab] What a slab goes through, with the calls that move it:

    resting --start_load--> reading --> loaded --start_store--> writing --> resting
       |                                   ^
       +-------------prepare---------------+ --release--> resting (what was there before)

``load`` waits until the slab is loaded and ``wait`` until nothing is being written. Host memory is
loaded all the time: there the calls cost nothing and only keep the order honest.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class OffloadCounters:
    """What a device has moved so far. Figures only grow.

    Attributes:
        read_bytes: content that came from the disk to the host.
        written_bytes: content that went from the host to the disk.
        read_seconds: the time each read took from its first to its last byte, summed. Reads at the
            same time count each.
        written_seconds: the same of the writes.
        waited_seconds: the time for which callers were blocked, for content or staging memory.
    """

    read_bytes: int = 0
    written_bytes: int = 0
    read_seconds: float = 0.0
    written_seconds: float = 0.0
    waited_seconds: float = 0.0


class Slab(abc.ABC):
    """A 1-D tensor that rests on an offload device. See [Note: life of a slab].

    Different slabs may be used by different threads, one slab by one thread at a time. After
    ``close`` of the slab or of its device every method but ``close`` and ``release`` raises
    ``RuntimeError``.

    Attributes:
        label: what messages call it.
        numel: its number of elements.
        dtype: of its elements.
        is_addressable: whether its content is used where it rests; otherwise it has to be loaded.
    """

    is_addressable: bool

    def __init__(self, numel: int, dtype: torch.dtype, label: str) -> None:
        if numel < 0:
            raise ValueError(f"slab '{label}' can not have {numel} elements")
        self.numel, self.dtype, self.label = numel, dtype, label

    @property
    def nbytes(self) -> int:
        """The size of its content."""
        return self.numel * self.dtype.itemsize

    @abc.abstractmethod
    def start_load(self) -> None:
        """Begin to read. Does nothing if the slab is loaded or being read, or is addressable.

        May block until other slabs have been written, if staging memory has run out.

        Raises:
            RuntimeError: if it was never stored.
            OffloadError: if its last write failed.
        """

    @abc.abstractmethod
    def load(self) -> Tensor:
        """The content, in host memory; valid until ``start_store`` or ``release``. Waits for it,
        and starts to read if nobody has.

        Raises:
            RuntimeError: if it was never stored.
            OffloadError: if it can not be read, or its last write failed.
        """

    @abc.abstractmethod
    def prepare(self) -> Tensor:
        """Host memory for content that the caller overwrites completely. Nothing is read."""

    @abc.abstractmethod
    def start_store(self) -> None:
        """Begin to write what was loaded or prepared. The tensor must not be touched any more.

        A failure is raised by later loads of this slab, until it has been stored again, and by
        ``wait`` of the device.

        Raises:
            RuntimeError: if it is neither loaded nor prepared.
        """

    @abc.abstractmethod
    def release(self) -> None:
        """Forget what was loaded or prepared, and not written to: what was stored before stays.
        Does nothing if nothing is loaded.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Give memory and file range back. Calling it again is free."""

    def _never_stored(self) -> RuntimeError:
        return RuntimeError(f"slab '{self.label}' can not be loaded: nothing was ever stored in it")

    def _not_loaded(self) -> RuntimeError:
        return RuntimeError(f"slab '{self.label}' can not be stored: it is not loaded or prepared")

    def _closed(self) -> RuntimeError:
        return RuntimeError(f"slab '{self.label}' is closed")


class OffloadDevice(abc.ABC):
    """A place where tensors rest.

    Attributes:
        name: ``"cpu"`` or ``"nvme"``.
        counters: what has been moved so far.
    """

    name: str
    counters: OffloadCounters

    @abc.abstractmethod
    def make_slab(self, numel: int, dtype: torch.dtype, label: str) -> Slab:
        """Room for a tensor of ``numel`` elements, which may be none.

        Raises:
            OffloadError: if there is no room for it.
        """

    @abc.abstractmethod
    def has_room(self, nbytes: int) -> bool:
        """Whether ``nbytes`` more can be loaded now within the staging budget."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Wait until all writes have ended.

        Raises:
            OffloadError: the first failure of those slabs whose content is lost by one.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Give everything back, whatever has failed before. Calling it again is free."""

    @property
    @abc.abstractmethod
    def resting_bytes(self) -> int:
        """The content of all open slabs."""

    @property
    @abc.abstractmethod
    def staging_bytes(self) -> int:
        """Host memory that is held to load slabs, in use or kept for the next ones."""

    @property
    @abc.abstractmethod
    def peak_staging_bytes(self) -> int:
        """The most that :attr:`staging_bytes` has been."""
