"""Optimizer state that rests on an offload device which the optimizer can not address.

[Note: state on meta] Between its uses, what the state of a segment holds per element is a tensor
on the ``meta`` device: shape and dtype stay, and cutting a segment cuts it. Its content lies in a
slab per flat buffer, name and dtype, at the place that the segment has in the shard.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor

from lightning_zero.engine.buffer import FlatBuffer
from lightning_zero.engine.segments import Segment, is_per_element
from lightning_zero.offload.device import OffloadDevice, Slab

State = MutableMapping[Any, dict[str, Any]]


class RestingState:
    """The slabs of one optimizer's state.

    Args:
        state: the optimizer's state, by parameter.
        device: where it rests.
    """

    def __init__(self, state: State, device: OffloadDevice) -> None:
        self._state, self.device = state, device
        self._slabs: dict[FlatBuffer, dict[tuple[str, torch.dtype], Slab]] = {}
        self._contents: dict[Slab, Tensor] = {}

    def start_load(self, buffer: FlatBuffer) -> None:
        """The state of a buffer's segments will be used soon."""
        for slab in self._slabs.get(buffer, {}).values():
            slab.start_load()

    def nbytes(self, buffer: FlatBuffer) -> int:
        """Bytes that are loaded for the state of a buffer."""
        return sum(slab.nbytes for slab in self._slabs.get(buffer, {}).values())

    def load(self, buffer: FlatBuffer, segments: Iterable[Segment]) -> None:
        """Put the content in place of what is on the meta device, in all of a buffer's segments."""
        slabs = self._slabs.get(buffer, {})
        self._contents.update({slab: slab.load() for slab in slabs.values()})
        for segment in segments:
            entries = self._state.get(segment.param, {})
            for key, value in entries.items():
                if is_resting(value):
                    content = self._contents[slabs[key, value.dtype]]
                    entries[key] = content[segment.start : segment.stop]

    def store(
        self, buffer: FlatBuffer, segments: Iterable[Segment], *, is_changed: bool = True
    ) -> None:
        """Let the state of a buffer's segments, all of them, rest again."""
        slabs = self._slabs.setdefault(buffer, {})
        for segment in segments:
            entries = self._state.get(segment.param, {})
            for key, value in entries.items():
                if is_per_element(value, segment) and not is_resting(value):
                    if is_changed:
                        self._put(buffer, key, value, segment)
                    entries[key] = torch.empty_like(value, device="meta")
        for slab in slabs.values():
            if self._contents.pop(slab, None) is not None:
                if is_changed:
                    slab.start_store()
                else:
                    slab.release()

    def _put(self, buffer: FlatBuffer, key: str, value: Tensor, segment: Segment) -> None:
        slabs = self._slabs[buffer]
        slab = slabs.get((key, value.dtype))
        if slab is None:
            label = f"'{key}' of {buffer.name}"
            slab = self.device.make_slab(buffer.layout.shard_numel, value.dtype, label)
            slabs[key, value.dtype] = slab
        if slab not in self._contents:
            self._contents[slab] = slab.prepare()
        place = self._contents[slab][segment.start : segment.stop]
        if place.data_ptr() != value.data_ptr():  # the optimizer made a new tensor
            place.copy_(value)

    def forget(self) -> None:
        """Give the room of all content back; the state is empty."""
        for slabs in self._slabs.values():
            for slab in slabs.values():
                slab.close()
        self._slabs.clear()


def is_resting(value: Any) -> bool:
    """Whether an entry of the state stands for content that rests elsewhere."""
    return isinstance(value, Tensor) and value.is_meta
