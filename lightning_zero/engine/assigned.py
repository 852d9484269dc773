"""Tensors that user code has assigned to ``param.data``.

[Note: assigned data] After ``param.data = t`` the parameter *is* the memory of ``t``: training
moves ``t``, and what is written to ``t`` moves the parameter. Sharded, they are two memories, so
they are kept equal for as long as anybody else holds the memory of ``t``: a step is copied to it,
and a change of it (its version tells) is written to the shards at the next boundary.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.comm.collectives import Collectives
from lightning_zero.engine.buffer import ParamHandle
from lightning_zero.engine.weights import Weights


class _Assigned(NamedTuple):
    memory: Tensor
    version: int

    @property
    def is_held(self) -> bool:
        """Whether anybody but us holds the memory; ours are two uses, one of them this look."""
        return torch._C._storage_Use_Count(self.memory.untyped_storage()._cdata) > 2


class AssignedData:
    """The memory that parameters have got by assignment, kept equal to them."""

    def __init__(
        self, handles: Collection[ParamHandle], weights: Weights, collectives: Collectives
    ) -> None:
        self._handles, self._weights, self._collectives = handles, weights, collectives
        self._assigned: dict[ParamHandle, _Assigned] = {}

    def __bool__(self) -> bool:
        return bool(self._assigned)

    @torch.no_grad()
    def assign(self, handle: ParamHandle, value: Tensor) -> None:
        """The parameter has been set to ``value``, which stays the memory of its holder.

        Raises:
            RuntimeError: if ``value`` is memory of another parameter.
        """
        self._assigned.pop(handle, None)
        if not value.numel():
            return
        place = value.untyped_storage().data_ptr()
        for other in self._handles:
            if self._weights.is_in_place(other) and _begin(other.view) == place:
                if other is handle:
                    return  # its own memory
                if _overlap(other.view, value):
                    _refuse(handle, other)
        for other, assigned in self._assigned.items():
            if _begin(assigned.memory) == place and _overlap(assigned.memory, value):
                _refuse(handle, other)
        self._assigned[handle] = _Assigned(value.detach(), value._version)

    @torch.no_grad()
    def wrote(self, handle: ParamHandle, value: Tensor) -> None:
        """The parameter has got another value."""
        if handle in self._assigned:
            memory = self._assigned[handle].memory
            if memory is not value:
                memory.copy_(value)
            self._assigned[handle] = _Assigned(memory, memory._version)

    @torch.no_grad()
    def pull(self) -> None:
        """Write what others have changed in the memory to the shards."""
        for handle, (memory, version) in list(self._assigned.items()):
            if memory._version != version:
                self._weights.write(handle, memory)
                self._assigned[handle] = _Assigned(memory, memory._version)

    @torch.no_grad()
    def push(self, handles: Collection[ParamHandle]) -> None:
        """A step has changed the parameters. Collective if anything was assigned."""
        if not self._assigned:
            return
        # whether a rank still holds a tensor is its own affair: all have to gather the same ones
        held = [handle.fqn for handle, assigned in self._assigned.items() if assigned.is_held]
        everyones = self._collectives.all_gather_object(held, "what was assigned to `.data`")
        wanted = {fqn for names in everyones for fqn in names}
        self._assigned = {h: a for h, a in self._assigned.items() if h.fqn in wanted}
        for handle in self._handles:
            if handle in self._assigned and handle in handles:
                self.wrote(handle, self._weights.read(handle, is_rounded=False))


def _begin(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _overlap(a: Tensor, b: Tensor) -> bool:
    first, second = (_range(value) for value in (a, b))
    return first[0] < second[1] and second[0] < first[1]


def _range(value: Tensor) -> tuple[int, int]:
    extent = sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
    return value.data_ptr(), value.data_ptr() + (extent + 1) * value.element_size()


def _refuse(handle: ParamHandle, other: ParamHandle) -> None:
    raise RuntimeError(
        f"Parameter '{handle.fqn}' was assigned the memory of parameter '{other.fqn}': they would"
        " be one from now on, which sharded parameters can not become during a run. Assign a copy:"
        " `param.data = other.data.clone()`, or tie them before the run."
    )
