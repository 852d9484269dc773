"""Learns the order in which units are used and says which ones come next."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Schedule(Generic[T]):
    """Remembers what followed each pair of uses, in forward and in backward separately.

    Pairs instead of positions in a list, because a step may contain several forwards and backwards
    (GAN), and a model
    may take another path now and then: the prediction is right again two uses later. All ranks that
        use the same units
    in the same order predict the same, which is what makes prefetching collective.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[T | None, T | None, bool], tuple[T, bool]] = {}
        self.restart()

    def restart(self) -> None:
        """Begin a new step."""
        self._last: tuple[T | None, T | None, bool] = (None, None, False)

    def use(self, item: T, is_backward: bool) -> bool:
        """Record a use. Returns whether it differs from the last one."""
        _, current, was_backward = self._last
        if current is not None and current == item and was_backward == is_backward:
            return False
        self._next[self._last] = (item, is_backward)
        self._last = (current, item, is_backward)
        return True

    def upcoming(self) -> Iterator[T]:
        """What will probably be used next, nearest first; ends where nothing is known or a use
        repeats.
        """
        state, seen = self._last, set()
        while state in self._next and state not in seen:
            seen.add(state)
            item, is_backward = self._next[state]
            state = (state[1], item, is_backward)
            yield item
