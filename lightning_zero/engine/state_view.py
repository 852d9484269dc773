"""``optimizer.state`` as its user sees it: full tensors by parameter.

[Note: the state that users see] The state lives with the segments, in pieces. Whoever looks up
``optimizer.state[p]`` gets the full entries of that parameter in memory of their own. The first
look after a step, and the first at each parameter, is collective, as a read of the parameter is.
What is changed in it, in place, by new entries, by ``del`` or ``clear``, or by a whole new
``state``, goes into the segments before they are used the next time. Every rank has to make the
same changes, as it does under DDP. Entries may be moved to another parameter, but not be shared by
two. Entries that are held across a step are looked up anew when they are used; a tensor of theirs
that is changed after a later step is an old copy, and refused.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.engine.buffer import ParamHandle

if TYPE_CHECKING:
    from lightning_zero.engine.user_state import UserState

_READS = ("__contains__", "__iter__", "__len__", "__eq__", "__ne__", "__repr__", "__reversed__")
_MORE_READS = ("get", "keys", "values", "items", "copy", "__or__", "__ror__", "__getitem__")
_WRITES = (
    "__setitem__",
    "__delitem__",
    "__ior__",
    "clear",
    "pop",
    "popitem",
    "setdefault",
    "update",
)


class _HandedOut(NamedTuple):
    """A tensor that users may hold, with its version when it was made or last written back."""

    handle: ParamHandle
    key: str
    value: Tensor
    version: int


class ParamState(dict[str, Any]):
    """The entries of one parameter, read when they are looked at."""

    def __init__(self, view: StateView, handle: ParamHandle) -> None:
        super().__init__()
        self._view, self._handle = view, handle
        self.is_read = False

    def is_of(self, handle: ParamHandle | None) -> bool:
        """Whether it was made for this parameter; users may have moved it to another one."""
        return self._handle is handle

    def refresh(self) -> None:
        """Have what the segments hold. Collective, once after a step."""
        if not self.is_read:
            self.is_read = True
            dict.update(self, self._view.read(self._handle))

    def forget(self) -> None:
        """What was read is old."""
        self.is_read = False
        dict.clear(self)

    def __reduce_ex__(self, proto: Any) -> Any:
        self.refresh()
        return dict, (dict(dict.items(self)),)


class StateView(defaultdict[Any, Any]):
    """Stands in for the ``state`` of a driven optimizer."""

    def __init__(self, state: UserState) -> None:
        super().__init__(dict)
        self._state = state
        self._is_listed = False
        self._listed: set[Any] = set()
        self._handed_out: list[_HandedOut] = []

    def refresh(self) -> None:
        """Have a key for every parameter that has state. Collective, once after a step."""
        if self._is_listed:
            return
        self._state.take_replaced()
        self._is_listed = True
        present = self._state.present()
        held = {key: value for key, value in dict.items(self) if isinstance(value, ParamState)}
        dict.clear(self)
        for key, entries in present.items():
            handle = self._state.handle_of(key)
            if handle is not None:
                known = held.get(key)
                is_known = known is not None and known.is_of(handle)
                entries = known if is_known else ParamState(self, handle)
            dict.__setitem__(self, key, entries)
        self._listed = set(present)

    def read(self, handle: ParamHandle) -> dict[str, Any]:
        """The full entries of a parameter, to be handed out. Collective."""
        entries = self._state.read(handle)
        self._handed_out += [
            _HandedOut(handle, key, value, value._version)
            for key, value in entries.items()
            if isinstance(value, Tensor)
        ]
        return entries

    def edits(self) -> dict[Any, dict[str, Any] | None]:
        """By parameter (or other key) what its state is now, as far as users may have changed it;
        None if it has been deleted. Collective if entries that nobody has read were moved.
        """
        self._refuse_old_changes()
        if not self._is_listed:
            return {}
        found: dict[Any, dict[str, Any] | None] = dict.fromkeys(self._listed - set(dict.keys(self)))
        for key, value in dict.items(self):
            is_own = isinstance(value, ParamState) and value.is_of(self._state.handle_of(key))
            if not is_own or value.is_read:
                found[key] = value
        self._state.check_apart(dict.items(self))
        self._listed = set(dict.keys(self))
        # read before anything is written: what was moved comes from where it was
        return {key: unviewed(value) for key, value in found.items()}

    def invalidate(self) -> None:
        """The state has changed, or is about to: what was handed out is old."""
        self._is_listed = False
        for value in dict.values(self):
            if isinstance(value, ParamState):
                value.forget()

    def _refuse_old_changes(self) -> None:
        kept: list[_HandedOut] = []
        current = {
            id(value)
            for entries in dict.values(self)
            if isinstance(entries, ParamState)
            for value in dict.values(entries)
        }
        for handed in self._handed_out:
            handle, key, value, version = handed
            if id(value) in current:  # written back in any case
                kept.append(_HandedOut(handle, key, value, value._version))
                continue
            if value._version != version:
                raise RuntimeError(
                    f"'{key}' of the optimizer state of parameter '{handle.fqn}' was changed"
                    " through a tensor that was taken before the last step, which is a copy. Look"
                    " it up anew: optimizer.state[parameter]."
                )
            del handed
            # our own uses are three (the tuple in the list, `value`, the argument) and two
            uses = torch._C._storage_Use_Count(value.untyped_storage()._cdata)
            if sys.getrefcount(value) > 3 or uses > 2:
                kept.append(_HandedOut(handle, key, value, version))
        self._handed_out = kept

    def __reduce_ex__(self, proto: Any) -> Any:
        return _plain, (self._state.plain(),)


def unviewed(entries: Any) -> Any:
    """Entries as a plain dictionary. Collective if nobody has read them."""
    return dict(entries.items()) if isinstance(entries, ParamState) else entries


def _plain(state: Mapping[Any, Any]) -> defaultdict[Any, Any]:
    return defaultdict(dict, state)


def _after_refresh(base: Any, name: str) -> Callable[..., Any]:
    method = getattr(base, name)

    def refreshed(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.refresh()
        return method(self, *args, **kwargs)

    return refreshed


for _name in (*_READS, *_MORE_READS, *_WRITES):
    setattr(ParamState, _name, _after_refresh(dict, _name))
    if _name != "__getitem__":
        setattr(StateView, _name, _after_refresh(dict, _name))
StateView.__getitem__ = _after_refresh(defaultdict, "__getitem__")  # type: ignore[method-assign]
