"""The state of a driven optimizer as its user sees, changes, saves and loads it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_zero.engine.buffer import ParamHandle
from lightning_zero.engine.driven import overrides
from lightning_zero.engine.optimizer_state import (
    full_state,
    import_state,
    present_state,
    read_state,
    replace_state,
    shard_state,
)
from lightning_zero.engine.state_view import StateView, unviewed

if TYPE_CHECKING:
    from lightning_zero.engine.optimizer import OptimizerDriver


class UserState:
    """Stands between the state of a driver's segments and the user's optimizer.

    Attributes:
        view: what the user's optimizer has as its ``state``.
    """

    def __init__(self, driver: OptimizerDriver) -> None:
        self._driver = driver
        self.view = StateView(self)
        driver.user.state = self.view

    def handle_of(self, key: Any) -> ParamHandle | None:
        """The parameter of the module that a key of the state is; None if it is something else."""
        return self._driver.handle_of(key) if isinstance(key, Tensor) else None

    def flush(self) -> None:
        """Bring what users have changed in the state into the segments. Every rank; collective if
        they have moved entries that they have not read.
        """
        self.take_replaced()
        for key, entries in self.view.edits().items():
            handle = self.handle_of(key)
            if handle is not None:
                replace_state(self._driver, handle, {} if entries is None else dict(entries))
            elif entries is None:
                self._driver.inner.state.pop(key, None)
            else:
                self._driver.inner.state[key] = entries

    def take_replaced(self) -> None:
        """Take over a whole new ``state`` that was put into the user's optimizer. Every rank;
        collective if it holds entries of the old one that nobody has read.
        """
        state = self._driver.user.__dict__["state"]
        if state is self.view or state is self._driver.inner.state:
            return
        self.check_apart(state.items())
        self._import({key: unviewed(entries) for key, entries in state.items()})
        self._driver.user.__dict__["state"] = self.view

    def check_apart(self, items: Iterable[tuple[Any, Any]]) -> None:
        """Raise ``RuntimeError`` if two parameters have entries, or a tensor, in common."""
        owners: dict[int, ParamHandle] = {}
        for key, entries in items:
            handle = self.handle_of(key)
            if handle is None or not isinstance(entries, dict):
                continue
            tensors = [value for value in dict.values(entries) if isinstance(value, Tensor)]
            for thing in (entries, *tensors):
                other = owners.setdefault(id(thing), handle)
                if other is not handle:
                    raise RuntimeError(
                        f"In the optimizer's state the state of two parameters, '{other.fqn}' and"
                        f" '{handle.fqn}', is the same object. A step would change it twice, which"
                        " shards can not follow: put a copy in one of the places."
                    )

    def _import(self, state: Mapping[Any, dict[str, Any]]) -> None:
        self._driver.wait()
        self._driver.inner.state.clear()
        if self._driver.resting_state is not None:
            self._driver.resting_state.forget()
        import_state(self._driver, state)
        self.view.invalidate()

    def present(self) -> dict[Any, dict[str, Any] | None]:
        """What the state has an entry for: parameters of the module (None), and all else with its
        entries. Collective.
        """
        self._driver.wait()
        present: dict[Any, Any] = {handle.param: None for handle in present_state(self._driver)}
        return {**present, **self._other_state()}

    def _other_state(self) -> dict[Any, dict[str, Any]]:
        """The entries of what is no parameter of the module."""
        segments = {id(segment.param) for segment in self._driver.segments}
        return {
            key: value for key, value in self._driver.inner.state.items() if id(key) not in segments
        }

    def read(self, handle: ParamHandle) -> dict[str, Any]:
        """The full state of one parameter. Collective."""
        return read_state(self._driver, handle)

    def plain(self, *, is_wanted: bool = True) -> defaultdict[Any, Any]:
        """The full state by parameter, on the ranks that want it. Collective."""
        self.flush()
        full = full_state(self._driver, is_wanted=is_wanted)
        return self._by_user_param(full)

    def _by_user_param(self, full: Mapping[ParamHandle, dict[str, Any]]) -> defaultdict[Any, Any]:
        found: defaultdict[Any, Any] = defaultdict(dict, self._other_state())
        for group in self._driver.user.param_groups:
            for param in group["params"]:
                handle = self._driver.handle_of(param)
                if handle is not None and full.get(handle):
                    found[param] = dict(full[handle])
        return found

    def state_dict(self) -> dict[str, Any]:
        """The full state in the format of the user's class, on every rank. Collective."""
        return self._native_state_dict(self.plain())

    def to_save(self, *, is_wanted: bool, is_sharded: bool) -> dict[str, Any]:
        """What :meth:`state_dict` gives, to be saved: tensors of parameters are there on the ranks
        that want them, or stand for their shards where the format is torch's own. Collective.
        """
        if self.has_own_format("state_dict"):
            return self.state_dict()
        if not is_sharded:
            return self._native_state_dict(self.plain(is_wanted=is_wanted))
        self.flush()
        return self._native_state_dict(self._by_user_param(shard_state(self._driver)))

    def has_own_format(self, method: str) -> bool:
        """Whether code of the user's makes or reads state dicts."""
        if method == "load_state_dict":
            set_state = self._driver.plain_class.__setstate__
            if not set_state.__module__.startswith("torch.optim"):
                return True  # it is given the whole state
        hooks = [f"_optimizer_{method}_{when}_hooks" for when in ("pre", "post")]
        return overrides(self._driver.plain_class, method) or any(
            map(self._driver.user.__dict__.get, hooks)
        )

    def _native_state_dict(self, state: defaultdict[Any, Any]) -> dict[str, Any]:
        self._driver.user.__dict__["state"] = state
        try:
            found: dict[str, Any] = self._driver.plain_class.state_dict(self._driver.user)
        finally:
            self._driver.user.__dict__["state"] = self.view
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's part of a full state in the format of the user's class."""
        self.flush()
        opened = state_dict
        if not self.has_own_format("load_state_dict"):
            # nobody looks at tensors of parameters, which need not be read whole
            opened = {**state_dict, "state": _closed(state_dict["state"])}
        self._driver.user.__dict__["state"] = defaultdict(dict)
        try:
            self._driver.plain_class.load_state_dict(self._driver.user, opened)
            state = tree_map_only(_Closed, _Closed.open, dict(self._driver.user.state))
        finally:
            self._driver.user.__dict__["state"] = self.view
        self._driver.refresh()
        self._import(state)


@dataclass(frozen=True)
class _Closed:
    """A tensor that ``Optimizer.load_state_dict`` passes on as it is."""

    tensor: Tensor

    def open(self) -> Tensor:
        return self.tensor


def _closed(state: Mapping[Any, Any]) -> dict[Any, Any]:
    def close(value: Any) -> Any:
        return _Closed(value) if isinstance(value, Tensor) and value.dim() else value

    return {
        key: {name: close(value) for name, value in entries.items()}
        if isinstance(entries, Mapping)
        else entries
        for key, entries in state.items()
    }
