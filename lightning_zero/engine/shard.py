"""One rank's slice of something flat (weights, gradients), wherever it rests between its uses."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_zero.engine.runner import WaitClock
from lightning_zero.offload.device import Slab
from lightning_zero.pending import Pending


class Shard(abc.ABC):
    """A 1-D tensor that is used inside of :meth:`use` and :meth:`fill` only.

    Attributes:
        dtype: of the elements.
        numel: number of elements.
        step: the optimizer step that is using it in the background; every other use waits for it.
        version: counts the uses that may have changed it.
    """

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.numel, self.dtype = numel, dtype
        self.step = Pending()
        self.version = 0

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes that it takes where the model computes; 0 if it rests elsewhere."""

    @abc.abstractmethod
    def start_load(self) -> None:
        """It will be used soon."""

    @abc.abstractmethod
    def open(self, *, is_filled: bool = False) -> Tensor:
        """The tensor, until :meth:`close`, for the step itself; ``is_filled``: the caller
        overwrites all of it.
        """

    @abc.abstractmethod
    def close(self, *, is_changed: bool) -> None:
        """The tensor is not used any more. Unless it ``is_changed``, changes of it may be lost."""

    @abc.abstractmethod
    def free(self) -> None:
        """Give the memory back, for good."""

    @contextlib.contextmanager
    def use(self, *, write: bool = False) -> Iterator[Tensor]:
        """The content, in the memory of the device or of the host; ``write``: it is going to be
        changed.
        """
        self.step.wait()
        tensor = self.open()
        try:
            yield tensor
        finally:
            self.close(is_changed=write)

    @contextlib.contextmanager
    def fill(self) -> Iterator[Tensor]:
        """A tensor with undefined content, all of which is going to be written."""
        self.step.wait()
        tensor = self.open(is_filled=True)
        try:
            yield tensor
        finally:
            self.close(is_changed=True)


class HeldShard(Shard):
    """A shard that is always in the memory of the device that computes the model."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.numel(), tensor.dtype)
        self.tensor = tensor

    @property
    def nbytes(self) -> int:
        """See the base class."""
        return self.tensor.numel() * self.tensor.element_size()

    def start_load(self) -> None:
        """See the base class."""

    def open(self, *, is_filled: bool = False) -> Tensor:
        """See the base class."""
        return self.tensor

    def close(self, *, is_changed: bool) -> None:
        """See the base class."""
        self.version += is_changed

    def free(self) -> None:
        """See the base class."""
        self.tensor = self.tensor.new_empty(0)


class RestingShard(Shard):
    """A shard that rests in a slab of an offload device. Uses may be nested."""

    def __init__(self, slab: Slab, waits: WaitClock) -> None:
        super().__init__(slab.numel, slab.dtype)
        self.slab, self._waits = slab, waits
        self._tensor: Tensor | None = None
        self._num_uses = 0
        self._is_changed = False

    @property
    def nbytes(self) -> int:
        """See the base class."""
        return 0

    @contextlib.contextmanager
    def use(self, *, write: bool = False) -> Iterator[Tensor]:
        """See the base class."""
        self.step.wait()
        with self._waits.waiting():
            tensor = self.open()
        try:
            yield tensor
        finally:
            self.close(is_changed=write)

    def start_load(self) -> None:
        """See the base class. Does nothing while a step is using it."""
        if self.step.is_done:
            self.slab.start_load()

    def open(self, *, is_filled: bool = False) -> Tensor:
        """See the base class."""
        if self._tensor is None:
            self._tensor = self.slab.prepare() if is_filled else self.slab.load()
        self._num_uses += 1
        return self._tensor

    def close(self, *, is_changed: bool) -> None:
        """See the base class."""
        self.version += is_changed
        self._is_changed |= is_changed
        self._num_uses -= 1
        if self._num_uses:
            return
        self._tensor = None
        is_changed, self._is_changed = self._is_changed, False
        if is_changed:
            self.slab.start_store()
        else:
            self.slab.release()

    def free(self) -> None:
        """See the base class."""
        self.slab.close()
