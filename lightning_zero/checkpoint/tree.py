"""Walks through what people put into checkpoints, and leaves its types as they are."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with everything replaced that ``change`` gives something else for.

    ``change`` is asked first and returns ``NotImplemented`` for what it does not know; then dicts,
    lists, tuples and dataclasses are looked into. A container keeps its type, its order and its
    attributes (the ``_metadata`` of a state dict), and is itself if nothing in it has changed.
    """
    new = change(value)
    if new is not NotImplemented:
        return new
    if isinstance(value, dict):
        return _copied(value, value, {key: rebuilt(v, change) for key, v in dict.items(value)})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        old = dict(vars(value)) if hasattr(value, "__dict__") else {}
        fields = {name: rebuilt(v, change) for name, v in old.items()}
        if all(fields[name] is old[name] for name in old):
            return value
        made = copy.copy(value)
        for name, field in fields.items():
            object.__setattr__(made, name, field)
        return made
    if isinstance(value, list | tuple):
        items = [rebuilt(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if isinstance(value, tuple):
            return tuple.__new__(type(value), items)
        return _copied(value, dict(enumerate(value)), dict(enumerate(items)))
    return value


def _copied(value: Any, old: dict[Any, Any], new: dict[Any, Any]) -> Any:
    if all(new[key] is old[key] for key in new):
        return value
    made = copy.copy(value)
    for key, item in new.items():
        made[key] = item
    return made


def leaves(value: Any) -> list[Any]:
    """Everything in ``value`` that :func:`rebuilt` does not look into."""
    found: list[Any] = []

    def collect(item: Any) -> Any:
        is_inner = isinstance(item, dict | list | tuple) or (
            dataclasses.is_dataclass(item) and not isinstance(item, type)
        )
        if not is_inner:
            found.append(item)
        return NotImplemented

    rebuilt(value, collect)
    return found
