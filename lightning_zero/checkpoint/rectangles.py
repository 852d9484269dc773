"""Which axis-aligned rectangles a range of a tensor's memory consists of. Pure integers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Rectangle(NamedTuple):
    """A part of a tensor that is a rectangle as well as one run of memory.

    Attributes:
        offsets, lengths: of the rectangle, in the tensor's own dimensions.
        start, stop: the same elements as a range of the tensor's memory order.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    start: int
    stop: int


def memory_order(stride: Sequence[int]) -> list[int]:
    """The dimensions of a dense tensor, the slowest in memory first."""
    return sorted(range(len(stride)), key=lambda dim: -stride[dim])


def rectangles(
    shape: Sequence[int], stride: Sequence[int], start: int, stop: int
) -> list[Rectangle]:
    """Cut elements ``start .. stop`` of a dense tensor, in memory order, into rectangles.

    As few as possible: at most ``2 * ndim - 1``, in memory order. None for an empty range.

    Args:
        shape: of the tensor.
        stride: of the tensor; tells which dimension is the slowest in memory. The tensor must fill
            its memory without holes.
        start: first element, counted in memory order.
        stop: the element after the last one.

    Raises:
        ValueError: if the range does not lie within the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"{start} .. {stop} is not a range of a tensor of shape {tuple(shape)}")
    if start == stop:
        return []
    slowest_first = memory_order(stride)
    sizes = [shape[dim] for dim in slowest_first]
    found = []
    position = start
    for box in _boxes(sizes, start, stop):
        offsets, lengths = [0] * len(shape), [0] * len(shape)
        for dim, (first, last) in zip(slowest_first, box, strict=True):
            offsets[dim], lengths[dim] = first, last - first
        size = math.prod(lengths)
        found.append(Rectangle(tuple(offsets), tuple(lengths), position, position + size))
        position += size
    return found


def _boxes(sizes: list[int], start: int, stop: int) -> Iterator[list[tuple[int, int]]]:
    """The ranges ``start < stop`` consists of, per dimension, slowest first."""
    if not sizes:
        yield []
        return
    inner = math.prod(sizes[1:])
    (first, head), (last, tail) = divmod(start, inner), divmod(stop, inner)
    if first == last:  # within one row
        yield from ([(first, first + 1), *box] for box in _boxes(sizes[1:], head, tail))
        return
    if head:  # the end of a row that begins before the range
        yield from ([(first, first + 1), *box] for box in _boxes(sizes[1:], head, inner))
        first += 1
    if first < last:
        yield [(first, last), *((0, size) for size in sizes[1:])]
    if tail:
        yield from ([(last, last + 1), *box] for box in _boxes(sizes[1:], 0, tail))
