"""Walks through what people put into checkpoints, and leaves its types as they are."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with everything replaced that ``change`` gives something else for.

    ``change`` is asked first and returns ``NotImplemented`` for what it does not know; then dicts,
    lists, tuples, deques and dataclasses are looked into. A container keeps its type, its order and
    its attributes (the ``_metadata`` of a state dict), and is itself if nothing in it has changed.
    What is in several places is asked about once, and in the same places again.
    """
    return _Rebuilt(change).of(value)


class _Rebuilt:
    def __init__(self, change: Callable[[Any], Any]) -> None:
        self._change = change
        self._done: dict[int, tuple[Any, Any]] = {}  # with the original: its id stays its

    def of(self, value: Any) -> Any:
        if id(value) not in self._done:
            self._done[id(value)] = (value, value)  # for what contains itself
            self._done[id(value)] = (value, self._new(value))
        return self._done[id(value)][1]

    def _new(self, value: Any) -> Any:
        new = self._change(value)
        if new is not NotImplemented:
            return new
        old = children(value)
        changed = {place: self.of(child) for place, child in old.items()}
        changed = {place: child for place, child in changed.items() if child is not old[place]}
        return with_children(value, changed) if changed else value


def children(value: Any) -> dict[Any, Any]:
    """What is in a container, by place; nothing for anything else."""
    if isinstance(value, dict):
        return dict(dict.items(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = {field.name: None for field in dataclasses.fields(value)}
        names |= getattr(value, "__dict__", {})
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    if isinstance(value, list | tuple | deque):
        return dict(enumerate(value))
    return {}


def with_children(value: Any, changed: dict[Any, Any]) -> Any:
    """A copy of a container with other things in some of its places."""
    if isinstance(value, tuple):
        items = [changed.get(place, child) for place, child in enumerate(value)]
        return tuple.__new__(type(value), items)
    made: Any = copy.copy(value)
    for place, child in changed.items():
        if dataclasses.is_dataclass(value):
            object.__setattr__(made, place, child)
        else:
            made[place] = child
    return made


def leaves(value: Any) -> list[Any]:
    """Everything in ``value`` that :func:`rebuilt` does not look into."""
    found: list[Any] = []

    def collect(item: Any) -> Any:
        if not children(item):
            found.append(item)
        return NotImplemented

    rebuilt(value, collect)
    return found
