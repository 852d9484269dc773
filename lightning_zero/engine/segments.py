"""Contiguous pieces of shards that an optimizer sees as its parameters, and what happens to its
state when they are cut.

An element-wise optimizer treats every element alike, so neighbouring parameters of one group are
stepped as one tensor. They have to be told apart when only some of them have a gradient
(``grad=None`` leaves a parameter alone, momentum and step count included): then the segment is cut
for good, and its state with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.engine.buffer import FlatBuffer
from lightning_zero.engine.shard import HeldShard


@dataclass(eq=False)
class Segment:
    """Elements ``start .. stop`` of a shard, belonging to consecutive parameters of one optimizer
    group.

    Attributes:
        group: index of the optimizer's parameter group.
        buffer: the flat buffer.
        slots: indices of the parameters in the buffer, those with a piece in this shard.
        param: what the inner optimizer steps, a view of the shard.
    """

    group: int
    buffer: FlatBuffer
    slots: tuple[int, ...]
    start: int
    stop: int
    param: nn.Parameter


def make_segment(
    group: int, buffer: FlatBuffer, slots: Iterable[int], pieces: dict[int, tuple[int, int]]
) -> Segment:
    """The segment from the first to the last of ``slots``; gaps between them belong to it."""
    slots = tuple(slots)
    start, stop = pieces[slots[0]][0], pieces[slots[-1]][1]
    is_trainable = buffer.dtype.is_floating_point or buffer.dtype.is_complex
    # what rests elsewhere is put in for each step
    held = buffer.shard.tensor[start:stop] if isinstance(buffer.shard, HeldShard) else None
    data = torch.empty(0, dtype=buffer.shard.dtype) if held is None else held
    param = nn.Parameter(data, requires_grad=is_trainable)
    return Segment(group, buffer, slots, start, stop, param)


def own_slot_pieces(buffer: FlatBuffer) -> dict[int, tuple[int, int]]:
    """The slots with a piece in this rank's shard, as element ranges of the shard."""
    return {
        handle.index: (start, stop) for handle, start, stop in buffer.own_pieces() if start < stop
    }


def runs(slots: Iterable[int], key: dict[int, Any]) -> list[list[int]]:
    """Cut a sequence of slots wherever a slot is missing in between or the key changes."""
    found: list[list[int]] = []
    for slot in slots:
        if found and found[-1][-1] == slot - 1 and key[slot] == key[found[-1][-1]]:
            found[-1].append(slot)
        else:
            found.append([slot])
    return found


def is_per_element(value: Any, segment: Segment) -> bool:
    """Whether an entry of the optimizer's state has one number per element of the segment."""
    return (
        isinstance(value, Tensor)
        and value.dim() == 1
        and value.numel() == segment.stop - segment.start
    )


def cut_state(state: dict[str, Any], segment: Segment, start: int, stop: int) -> dict[str, Any]:
    """The state of elements ``start ..

    stop`` of the shard, taken from that of a segment that contains them.
    """
    cut = {}
    for key, value in state.items():
        if is_per_element(value, segment):
            cut[key] = value[start - segment.start : stop - segment.start]
        elif isinstance(value, Tensor):
            if value.numel() > 1:
                raise NotImplementedError(
                    f"The optimizer keeps '{key}' of shape {tuple(value.shape)} for"
                    f" {segment.stop - segment.start} elements."
                    " Only optimizers that treat every element alike can be sharded."
                )
            cut[key] = value.clone()
        else:
            cut[key] = value
    return cut


def same_value(left: Any, right: Any) -> bool:
    """Whether two entries of optimizer state that are not per element agree."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return type(left) is type(right) and bool(left == right)
