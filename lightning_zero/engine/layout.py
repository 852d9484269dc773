"""How parameters lie in a flat buffer and who owns which piece: integers only.

A flat buffer holds parameters one after the other, each starting at a multiple of ``alignment``
elements, and is cut into ``world_size`` equal shards. Five tensors of 5, 3, 6, 0 and 1 elements,
alignment 4, three ranks::

    offset  0         8    12          20   24       (numel = 3 shards of 8)
            aaaaa...  bbb. cccccc..    e... ....     '.' = gap or padding, always zero in gradients
    shards  |--- rank 0 --|--- rank 1 ---|--- rank 2 ---|

A parameter may lie in several shards and a shard may hold pieces of several parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Slot(NamedTuple):
    """The place of one parameter, in elements of the flat buffer."""

    offset: int
    numel: int

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.offset + self.numel


class Piece(NamedTuple):
    """The part of a slot that one rank owns, in elements of the flat buffer; ``start <= stop``."""

    rank: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements of the piece."""
        return self.stop - self.start


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class FlatLayout:
    """Slots of parameters in a flat buffer that is cut into equal shards.

    Raises:
        ValueError: if slots overlap, are unaligned or out of bounds.
    """

    slots: tuple[Slot, ...]
    shard_numel: int
    world_size: int
    alignment: int

    def __post_init__(self) -> None:
        end = 0
        for slot in self.slots:
            if slot.offset < end or slot.numel < 0:
                raise ValueError(f"Slot {slot} overlaps the one before it, which ends at {end}.")
            if slot.offset % self.alignment:
                raise ValueError(f"Slot {slot} does not start at a multiple of {self.alignment}.")
            end = slot.stop
        if end > self.numel:
            raise ValueError(f"The slots end at {end}, but the buffer holds {self.numel} elements.")

    @classmethod
    def build(cls, numels: Sequence[int], world_size: int, alignment: int = 1) -> FlatLayout:
        """Lay out parameters of ``numels`` elements in the given order.

        Args:
            numels: elements of each parameter; zero is allowed.
            world_size: number of shards, at least 1.
            alignment: every slot and every shard starts at a multiple of this many elements.
        """
        if world_size < 1 or alignment < 1:
            raise ValueError(
                f"world_size and alignment must be at least 1, got {world_size} and {alignment}."
            )
        slots, end = [], 0
        for numel in numels:
            slots.append(Slot(end, numel))
            end = round_up(end + numel, alignment)
        return cls(tuple(slots), round_up(-(-end // world_size), alignment), world_size, alignment)

    @property
    def numel(self) -> int:
        """Elements of the whole flat buffer, padding included."""
        return self.shard_numel * self.world_size

    def shard_range(self, rank: int) -> range:
        """The elements of the flat buffer that ``rank`` owns."""
        return range(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def piece(self, slot_index: int, rank: int) -> Piece:
        """The part of a slot that ``rank`` owns; empty (start == stop) where it owns none."""
        slot, shard = self.slots[slot_index], self.shard_range(rank)
        start = min(max(slot.offset, shard.start), slot.stop)
        return Piece(rank, start, max(min(slot.stop, shard.stop), start))

    def pieces(self, slot_index: int) -> tuple[Piece, ...]:
        """All non-empty pieces of a slot, in rank order; together they are the slot."""
        slot = self.slots[slot_index]
        if not slot.numel:
            return ()
        first, last = slot.offset // self.shard_numel, (slot.stop - 1) // self.shard_numel
        return tuple(self.piece(slot_index, rank) for rank in range(first, last + 1))

    def gaps(self) -> list[range]:
        """The elements that belong to no slot."""
        gaps, end = [], 0
        for slot in self.slots:
            if slot.offset > end:
                gaps.append(range(end, slot.offset))
            end = slot.stop
        if end < self.numel:
            gaps.append(range(end, self.numel))
        return gaps
