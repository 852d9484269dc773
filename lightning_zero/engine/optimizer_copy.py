"""Copies of the user's optimizer over tensors of our own, on which its step is tried.

A copy has the class, the attributes and the groups of the original, and shares nothing with it that
a step changes. It is no new instance: constructors take arguments that nobody keeps, and what was
set on the object later belongs to it, too.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import random
import sys
import types
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_LEAST_LR = 1e-2
_NOT_COPIED = frozenset({"state", "param_groups", "step"})  # schedulers leave a `step` there


def optimizer_over(
    user: Optimizer,
    params: Sequence[Sequence[nn.Parameter]],
    changes: Mapping[str, Any] = MappingProxyType({}),
    *,
    constructs_state: bool = False,
) -> Optimizer:
    """A copy of ``user`` with other parameters in its groups, without state and hooks.

    Args:
        user: the user's optimizer, left unchanged.
        params: the parameters of each of its groups.
        changes: options that differ from those of the groups that have them.
        constructs_state: give it the state that the constructor makes for such parameters.
    """
    trial: Optimizer = object.__new__(type(user))
    trial.state = defaultdict(dict)
    trial.param_groups = []
    memo: dict[int, Any] = {
        id(user): trial,
        id(user.state): trial.state,
        id(user.param_groups): trial.param_groups,
    }
    for theirs, own in zip(user.param_groups, params, strict=True):
        for i, param in enumerate(theirs["params"] if own else ()):
            memo[id(param)] = own[min(i, len(own) - 1)]
    for theirs, own in zip(user.param_groups, params, strict=True):
        options = {k: _copied(v, memo) for k, v in theirs.items() if k != "params"}
        options = {**_moving(options), **{k: v for k, v in changes.items() if k in options}}
        group = {**options, "params": list(own)}
        memo[id(theirs)] = group
        trial.param_groups.append(group)
    for key, value in user.__dict__.items():
        if key.startswith("_optimizer_") and isinstance(value, OrderedDict):
            trial.__dict__[key] = OrderedDict()  # hooks
        elif key not in _NOT_COPIED:
            trial.__dict__[key] = _copied(value, memo)
    if constructs_state:
        trial.state.update(_constructed(user, trial.param_groups).state)
    begin_training = getattr(trial, "train", None)
    if callable(begin_training):  # schedule-free optimizers refuse to step before
        begin_training()
    return trial


def _moving(options: dict[str, Any]) -> dict[str, Any]:
    """Options with a learning rate that moves the weights: a schedule may begin with 0."""
    rate = options.get("lr")
    if isinstance(rate, int | float) and rate < _LEAST_LR:
        return {**options, "lr": _LEAST_LR}
    if isinstance(rate, Tensor) and rate.numel() == 1 and float(rate) < _LEAST_LR:
        return {**options, "lr": torch.full_like(rate, _LEAST_LR)}
    return options


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, nn.Module) or (
        isinstance(value, types.MethodType) and id(value.__self__) not in memo
    ):
        return value  # behind it may be the whole trainer
    if type(value) in (list, tuple, set):
        return type(value)(_copied(v, memo) for v in value)
    if type(value) in (dict, OrderedDict):
        return type(value)((_copied(k, memo), _copied(v, memo)) for k, v in value.items())
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a lock, a file, a generator: shared
        return value


def _constructed(user: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """A new instance over the same groups, with arguments found in the user's object."""
    known = {**user.__dict__, **user.param_groups[0], **user.defaults, **groups[0]}
    accepted = list(inspect.signature(type(user).__init__).parameters.values())[2:]
    arguments = {
        p.name: known[p.name]
        for p in accepted
        if p.name in known and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }
    if any(p.kind is p.VAR_KEYWORD for p in accepted):
        arguments = {**user.defaults, **arguments}
    return type(user)([dict(group) for group in groups], **arguments)


def nested_optimizers(user: Optimizer) -> dict[str, Optimizer]:
    """Other optimizers that ``user`` keeps as attributes, by their names."""
    found = {}
    for name, value in user.__dict__.items():
        entries = value.values() if isinstance(value, dict) else value
        if not isinstance(value, list | tuple | dict):
            entries = [value]
        inner = [v for v in entries if isinstance(v, Optimizer) and v is not user]
        if inner:
            found[name] = inner[0]
    return found


class Randomness:
    """Whether random numbers were drawn inside of :func:`nothing_happens`."""

    is_used = False


@contextlib.contextmanager
def nothing_happens(device: torch.device) -> Iterator[Randomness]:
    """Inside, random states may be used: they are put back, and warnings are not shown."""
    used = Randomness()
    numpy = sys.modules.get("numpy")
    cuda = [device] if device.type == "cuda" else []
    with (
        warnings.catch_warnings(),
        torch.random.fork_rng(cuda),
        torch.enable_grad(),
        contextlib.ExitStack() as stack,
    ):
        warnings.simplefilter("ignore")
        if "torch._dynamo" in sys.modules:  # a compiled step would be compiled for every shape
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        before = (random.getstate(), numpy and numpy.random.get_state(), torch.get_rng_state())
        try:
            yield used
        finally:
            used.is_used = (
                random.getstate() != before[0]
                or not torch.equal(torch.get_rng_state(), before[2])
                or (numpy is not None and _numpy_moved(numpy, before[1]))
            )
            random.setstate(before[0])
            if numpy is not None:
                numpy.random.set_state(before[1])


def _numpy_moved(numpy: Any, before: Any) -> bool:
    now = numpy.random.get_state()
    return bool(now[2] != before[2] or (now[1] != before[1]).any())
