"""The layout is pure integers, so it is tried for many world sizes without processes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_zero.engine.layout import FlatLayout, Slot

NUMELS = st.lists(st.one_of(st.integers(0, 70), st.sampled_from([0, 1, 64, 997])), max_size=30)


@given(numels=NUMELS, world_size=st.integers(1, 64), alignment=st.sampled_from([1, 2, 16, 32]))
def test_shards_partition_the_buffer_and_pieces_partition_each_slot(
    numels: list[int], world_size: int, alignment: int
) -> None:
    layout = FlatLayout.build(numels, world_size, alignment)
    covered = [e for rank in range(world_size) for e in layout.shard_range(rank)]
    assert covered == list(range(layout.numel))
    for index, slot in enumerate(layout.slots):
        assert slot.numel == numels[index]
        owned = [e for piece in layout.pieces(index) for e in range(piece.start, piece.stop)]
        assert owned == list(range(slot.offset, slot.stop))
        for rank in range(world_size):
            piece = layout.piece(index, rank)
            expected = [e for e in layout.shard_range(rank) if slot.offset <= e < slot.stop]
            assert list(range(piece.start, piece.stop)) == expected


@given(numels=NUMELS, world_size=st.integers(1, 64), alignment=st.sampled_from([1, 16, 32]))
def test_slots_and_shards_are_aligned_and_padding_is_bounded(
    numels: list[int], world_size: int, alignment: int
) -> None:
    layout = FlatLayout.build(numels, world_size, alignment)
    assert all(slot.offset % alignment == 0 for slot in layout.slots)
    assert layout.shard_numel % alignment == 0
    assert layout.numel - sum(numels) < alignment * (len(numels) + world_size) + world_size


@given(numels=NUMELS, world_size=st.integers(1, 8))
def test_gaps_are_what_no_slot_covers(numels: list[int], world_size: int) -> None:
    layout = FlatLayout.build(numels, world_size, 16)
    in_slots = {e for slot in layout.slots for e in range(slot.offset, slot.stop)}
    in_gaps = {e for gap in layout.gaps() for e in gap}
    assert in_gaps == set(range(layout.numel)) - in_slots


def test_an_empty_layout_has_no_elements() -> None:
    assert FlatLayout.build([], 3).numel == 0
    assert FlatLayout.build([0, 0], 3, 16).pieces(1) == ()


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ((Slot(0, 5), Slot(4, 2)), "overlaps"),
        ((Slot(0, 5), Slot(6, 2)), "multiple of 4"),
        ((Slot(0, 50),), "holds 8 elements"),
    ],
)
def test_a_wrong_layout_is_refused(slots: tuple[Slot, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlatLayout(slots, shard_numel=4, world_size=2, alignment=4)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        FlatLayout.build([1], 0)
