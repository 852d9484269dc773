"""Ranges of memory as rectangles."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_zero.checkpoint.rectangles import Rectangle, rectangles


@st.composite
def tensors_with_range(draw: st.DrawFn) -> tuple[torch.Tensor, int, int]:
    """A dense tensor that counts its elements in memory order, and a range of it."""
    sizes = draw(st.lists(st.integers(0, 5), max_size=5))
    order = draw(st.permutations(range(len(sizes))))
    numel = math.prod(sizes)
    tensor = torch.arange(numel).reshape(sizes).permute(order)
    start, stop = sorted((draw(st.integers(0, numel)), draw(st.integers(0, numel))))
    return tensor, start, stop


def elements(tensor: torch.Tensor, rectangle: Rectangle) -> list[int]:
    for dim, (offset, length) in enumerate(zip(rectangle.offsets, rectangle.lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return sorted(tensor.reshape(-1).tolist())


@given(tensors_with_range())
def test_the_rectangles_are_the_range(case: tuple[torch.Tensor, int, int]) -> None:
    tensor, start, stop = case
    found = rectangles(tuple(tensor.shape), tensor.stride(), start, stop)
    for rectangle in found:
        assert elements(tensor, rectangle) == list(range(rectangle.start, rectangle.stop))
    edges = [start, *(r.stop for r in found)]
    assert [r.start for r in found] == edges[:-1]
    assert edges[-1] == stop
    assert all(a < b for a, b in pairwise(edges))
    assert len(found) <= max(1, 2 * tensor.dim() - 1)


@given(tensors_with_range())
def test_fewer_rectangles_would_not_do(case: tuple[torch.Tensor, int, int]) -> None:
    tensor, start, stop = case
    if stop - start > 60:
        stop = start + 60
    places = {}
    flat = tensor.reshape(-1).tolist()
    for index in range(tensor.numel()):
        places[flat[index]] = torch.unravel_index(torch.tensor(index), tensor.shape or (1,))

    def is_rectangle(first: int, last: int) -> bool:
        axes = zip(*([int(i) for i in places[n]] for n in range(first, last)), strict=True)
        return math.prod(max(axis) - min(axis) + 1 for axis in axes) == last - first

    fewest = {start: 0}
    for last in range(start + 1, stop + 1):
        fewest[last] = 1 + min(
            fewest[first] for first in range(start, last) if is_rectangle(first, last)
        )
    found = rectangles(tuple(tensor.shape), tensor.stride(), start, stop)
    assert len(found) == fewest[stop]


def test_scalars_and_empty_tensors() -> None:
    assert rectangles((), (), 0, 1) == [Rectangle((), (), 0, 1)]
    assert rectangles((), (), 0, 0) == []
    assert rectangles((0, 3), (3, 1), 0, 0) == []


def test_channels_last_is_cut_along_its_rows_of_pixels() -> None:
    weight = torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last)
    (half,) = rectangles((2, 3, 4, 4), weight.stride(), 0, 48)
    assert half == Rectangle((0, 0, 0, 0), (1, 3, 4, 4), 0, 48)
    row, pixel, part = rectangles((2, 3, 4, 4), weight.stride(), 0, 12 + 3 + 1)
    assert (row.offsets, row.lengths) == ((0, 0, 0, 0), (1, 3, 1, 4))
    assert (pixel.offsets, pixel.lengths) == ((0, 0, 1, 0), (1, 3, 1, 1))
    assert (part.offsets, part.lengths) == ((0, 0, 1, 1), (1, 1, 1, 1))


def test_a_range_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="not a range"):
        rectangles((2, 2), (2, 1), 0, 5)
