"""Nested containers, walked and copied such that types, order and attributes stay."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any, cast


def children(value: Any) -> list[tuple[Any, Any]]:
    """The places in a container, and what is there; none of anything else."""
    if isinstance(value, dict):
        return list(dict.items(value))
    if isinstance(value, list | tuple | deque):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return [(f.name, getattr(value, f.name)) for f in fields if hasattr(value, f.name)]
    return []


def mapped(value: Any, replace: Callable[[Any], Any]) -> Any:
    """A copy in which leaves are replaced.

    A container in which nothing is replaced stays itself. Where an object is in several places,
    its copy is as well.

    Args:
        value: anything; inside of dictionaries, lists, tuples, deques and dataclasses leaves are
            found.
        replace: gives what takes the place of anything, or the same; it is asked for containers,
            too, and what it replaces is not looked into.
    """
    return _Mapped(replace).of(value)


class _Mapped:
    def __init__(self, replace: Callable[[Any], Any]) -> None:
        self._replace = replace
        self._done: dict[int, tuple[Any, Any]] = {}  # with the original, so that its id stays its

    def of(self, value: Any) -> Any:
        if id(value) not in self._done:
            self._done[id(value)] = (value, value)  # what contains itself ends here
            self._done[id(value)] = (value, self._new(value))
        return self._done[id(value)][1]

    def _new(self, value: Any) -> Any:
        other = self._replace(value)
        if other is not value:
            return other
        changed = {}
        for place, child in children(value):
            new = self.of(child)
            if new is not child:
                changed[place] = new
        return with_children(value, changed) if changed else value


def with_children(value: Any, changed: dict[Any, Any]) -> Any:
    """A copy of a container with other things in some of its places."""
    if isinstance(value, tuple):
        items = [changed.get(place, child) for place, child in enumerate(value)]
        return tuple.__new__(type(value), items)
    result = copy.copy(value)
    if hasattr(value, "__dict__") and isinstance(value, dict):
        result.__dict__.update(value.__dict__)  # copies of OrderedDict may lack its attributes
    for place, child in changed.items():
        if dataclasses.is_dataclass(result):
            object.__setattr__(result, place, child)
        else:
            cast(Any, result)[place] = child
    return result
