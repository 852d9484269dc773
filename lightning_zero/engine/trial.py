"""The trial of an optimizer: copies of it step small tensors, whole and cut, and must agree.

[Note: the trial] Which optimizer treats every element alike is not in its name, so it is tried out:
copies of the user's object step small tensors, whole as under DDP and cut as ours will be, and
everything has to be the same to the last bit: weights, state, and the numbers that it keeps in its
groups and attributes. Pieces end at multiples of 128 bytes, so that no kernel rounds them
differently. Meanwhile :class:`MixingWatch` looks for operations that mix elements without an effect
yet. What remains unseen is a change after more steps than the trial has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.engine.mixing import MixingFoundError, MixingWatch
from lightning_zero.engine.optimizer_copy import nothing_happens, optimizer_over

# More than 4,096 elements, from where on optimizers quantise; every number of dimensions; all
# multiples of 128 bytes, in half precision, too.
_SHAPES: tuple[tuple[int, ...], ...] = ((160, 128), (32, 48), (8, 4, 4, 3), (128,))
_SMALL_SHAPES: tuple[tuple[int, ...], ...] = ((64,),)
_CUTS = (4288, 20480 + 832)  # at no end of a row, or of a block of 128 elements or more
_LEAST_STEPS, _MOST_STEPS = 48, 256
_CLOSE_LOOK = 4
"""After each of the first steps and every so many all is compared."""
_PERIODIC = (2, _MOST_STEPS - 8)
"""Whole numbers in this range among the options may be periods, which the trial must outlast."""


class RefusedError(Exception):
    """Why an optimizer can not be sharded, in words that follow "because"."""


class Side:
    """A copy of the optimizer and what it steps: tensors as they are, or one rank's pieces."""

    def __init__(
        self,
        user: Optimizer,
        start: Sequence[Sequence[Tensor]],
        changes: Mapping[str, Any] = MappingProxyType({}),
        *,
        constructs_state: bool,
    ) -> None:
        self.params = [[nn.Parameter(t.clone()) for t in tensors] for tensors in start]
        self.optimizer = optimizer_over(
            user, self.params, changes, constructs_state=constructs_state
        )
        self.num_calls = 0
        self.loss = 1.0

    def step(self, grads: Sequence[Sequence[Tensor]], watch: MixingWatch | None = None) -> None:
        """One step as Lightning makes it: the closure that it is given runs the backward."""
        self.num_calls = 0
        before = [self.flat(index) for index in range(len(self.params))]

        def closure() -> Tensor:
            if watch is not None:
                watch.is_on = False
            if not all(same(self.flat(i), own) for i, own in enumerate(before)):
                raise RefusedError("its step changes the parameters before it calls the closure")
            with torch.enable_grad():  # as Lightning's closure does
                loss = self._backward(grads)
            if watch is not None:
                watch.is_on = True
            return loss

        with watch or contextlib.nullcontext(), contextlib.suppress(MixingFoundError):
            self.optimizer.step(closure=closure)  # type: ignore[arg-type]
        if watch is not None and watch.found is not None:
            raise RefusedError(f"its step mixes the elements of a tensor ('{watch.found}')")
        if self.num_calls != 1:
            raise RefusedError(f"its step calls the closure {self.num_calls} times instead of once")

    def _backward(self, grads: Sequence[Sequence[Tensor]]) -> Tensor:
        """Give the parameters these gradients by a backward, whose hooks run."""
        self.num_calls += 1
        params = [param for own in self.params for param in own]
        for param in params:
            param.grad = None
        if params:
            torch.autograd.backward(params, [grad.clone() for own in grads for grad in own])
        return torch.tensor(self.loss)

    def flat(self, index: int) -> Tensor:
        """The parameters of a group, one after the other."""
        return _flat([p.detach() for p in self.params[index]])

    def flat_state(self, index: int) -> dict[str, Tensor]:
        """What the state holds for each element of a group, one after the other, by its key."""
        found: dict[str, list[Tensor]] = {}
        for param in self.params[index]:
            for key, value in self.optimizer.state.get(param, {}).items():
                if isinstance(value, Tensor) and value.numel() == param.numel():
                    found.setdefault(key, []).append(value.detach())
        return {key: _flat(parts) for key, parts in found.items()}

    def scalars_of(self, param: nn.Parameter) -> dict[str, Any]:
        """What the state holds for a parameter as one."""
        return {
            key: value
            for key, value in self.optimizer.state.get(param, {}).items()
            if not isinstance(value, Tensor) or value.numel() != param.numel()
        }

    def numbers(self) -> dict[str, Any]:
        """What it keeps in its groups and attributes, by where that is."""
        found: dict[str, Any] = {}
        for index, group in enumerate(self.optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    _collect(value, f"'{key}' of its group {index}", found)
        for name, entry in self.optimizer.state.items():
            if not isinstance(name, Tensor):
                _collect(entry, f"'{name}' in its state", found)
        for key, value in self.optimizer.__dict__.items():
            if key not in ("state", "param_groups", "defaults"):
                _collect(value, f"its attribute '{key}'", found)
        return found


class Trial:
    """Trials of one optimizer.

    Args:
        user: the optimizer, left unchanged.
        device: where its copies step.
        constructs_state: whether they begin with the state that the constructor makes.
    """

    def __init__(self, user: Optimizer, device: torch.device, *, constructs_state: bool) -> None:
        self._user, self._device, self._constructs_state = user, device, constructs_state

    def run(
        self,
        num_steps: int,
        changes: Mapping[str, Any] = MappingProxyType({}),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Step copies whole and cut; raise :class:`RefusedError` if that makes a difference.

        Args:
            num_steps: how many steps.
            changes: options that differ from the user's, in the groups that have them.
            dtype: of the parameters.
        """
        generator = torch.Generator().manual_seed(0)
        start = [
            [(0.5 * noise(shape, generator)).to(self._device, dtype) for shape in shapes]
            for shapes in _shapes_of_groups(self._user)
        ]
        with nothing_happens(self._device) as randomness:
            whole, *ranks = (
                Side(self._user, own, changes, constructs_state=self._constructs_state)
                for own in (start, *_cut(start))
            )
            for number, rank in enumerate(ranks):
                rank.loss += number  # each rank has its own
            watch = MixingWatch()
            for step in range(1, num_steps + 1):
                grads = gradients(step, whole, generator)
                whole.step(grads, watch)
                for rank, pieces in zip(ranks, _cut(grads), strict=True):
                    _step_rank(rank, pieces)
                if step <= _CLOSE_LOOK or step % _CLOSE_LOOK == 0 or step == num_steps:
                    _compare(whole, ranks, step)
        if randomness.is_used:
            raise RefusedError("its step draws random numbers, so its update depends on chance")
        if all(same(whole.flat(i), _flat(own)) for i, own in enumerate(start)):
            raise RefusedError(
                f"its step does not change the parameters it is given, in {num_steps} steps"
            )


def _step_rank(rank: Side, grads: Sequence[Sequence[Tensor]]) -> None:
    try:
        rank.step(grads)
    except RefusedError:
        raise
    except Exception as error:
        if any(rank.params):
            raise
        raise RefusedError(
            "its step fails on a rank that has no elements of a group"
            f" ({type(error).__name__}: {error})"
        ) from error


def _kind(group: dict[str, Any]) -> Any:
    """Groups of one kind differ in the size of their options alone."""
    return tuple(
        (key, bool(value) if isinstance(value, float) else repr(value))
        for key, value in group.items()
        if key != "params" and not isinstance(value, Tensor)
    )


def _shapes_of_groups(user: Optimizer) -> list[tuple[tuple[int, ...], ...]]:
    """All shapes for the first group of a kind, a small tensor for the others."""
    kinds: set[Any] = set()
    shapes = []
    for kind in map(_kind, user.param_groups):
        shapes.append(_SMALL_SHAPES if kind in kinds else _SHAPES)
        kinds.add(kind)
    return shapes


def num_trial_steps(user: Optimizer) -> int:
    """How many steps show what happens every few steps, as far as options tell."""
    options = [v for g in user.param_groups for k, v in g.items() if k != "params"]
    options += list(user.__dict__.values())
    periods = [v for v in options if type(v) is int and _PERIODIC[0] <= v <= _PERIODIC[1]]
    return max(_LEAST_STEPS, max(periods, default=0) + 8)


def noise(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Normal numbers."""
    return torch.randn(tuple(shape), generator=generator)


def gradients(step: int, whole: Side, generator: torch.Generator) -> list[list[Tensor]]:
    """Gradients of many sizes, by turns of noise, of a slope and of rows that are not used."""
    size = 10.0 ** (step % 5 - 3)
    made: list[list[Tensor]] = []
    for params in whole.params:
        made.append([])
        for param in params:
            grad = (size * noise(param.shape, generator)).to(param)
            if step % 3 == 1:
                grad += 0.1 * param.detach() + 0.01
            if step % 4 == 3:
                grad[: param.shape[0] // 2] = 0
            made[-1].append(grad)
    return made


def _compare(whole: Side, ranks: Sequence[Side], num_steps: int) -> None:
    after = f"after {num_steps} steps"
    for side in (whole, *ranks):
        _check_state(side)
    for index in range(len(whole.params)):
        if not same(whole.flat(index), torch.cat([rank.flat(index) for rank in ranks])):
            raise RefusedError(
                "its update of one element depends on other elements, on the loss or on chance"
                f" (found {after} of tensors that were cut)"
            )
        states = [rank.flat_state(index) for rank in ranks]
        for key, value in whole.flat_state(index).items():
            if not same(value, torch.cat([s[key] for s in states if key in s])):
                raise RefusedError(
                    f"'{key}' in its state depends on other elements, on the loss or on chance"
                    f" (found {after})"
                )
        _compare_scalars(whole, ranks, index)
    numbers = whole.numbers()
    for rank in ranks:
        others = rank.numbers()
        for where in {**numbers, **others}:
            if where.startswith("its attribute") and not any(rank.params):
                continue  # nothing is stepped by it
            if not same(numbers.get(where), others.get(where)):
                raise RefusedError(f"{where} depends on which elements it is given (found {after})")


def _compare_scalars(whole: Side, ranks: Sequence[Side], index: int) -> None:
    first = whole.scalars_of(whole.params[index][0])
    for side in (whole, *ranks):
        for param in side.params[index]:
            others = side.scalars_of(param)
            for key in {**first, **others}:
                if not same(first.get(key), others.get(key)):
                    raise RefusedError(f"'{key}' in its state depends on the whole of a parameter")


def _check_state(side: Side) -> None:
    """What is kept for a parameter is one number for each of its elements, or one for all."""
    params = {param for own in side.params for param in own}
    for param, entries in side.optimizer.state.items():
        if param not in params:
            if _holds_tensors(entries):
                raise RefusedError(f"it keeps tensors in its state for {param!r}, no parameter")
            continue
        for key, value in entries.items():
            if isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter):
                raise RefusedError(f"'{key}' in its state is a {type(value).__name__}")
            if isinstance(value, Tensor) and value.shape != param.shape and value.numel() != 1:
                raise RefusedError(
                    f"'{key}' in its state has shape {tuple(value.shape)} and dtype {value.dtype}"
                    f" for a parameter of shape {tuple(param.shape)}: not one number per element"
                )
            if not isinstance(value, Tensor) and _holds_tensors(value):
                raise RefusedError(f"'{key}' in its state is a {type(value).__name__} of tensors")
    shapes = {param.shape for param in params}
    for where, value in side.numbers().items():
        if isinstance(value, Tensor) and value.shape in shapes and value.numel() > 1:
            raise RefusedError(
                f"it keeps a tensor of a parameter's shape in {where}, not in its state"
            )


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_tensors, value))
    return isinstance(value, Tensor) and value.numel() > 1


def _collect(value: Any, where: str, found: dict[str, Any]) -> None:
    if isinstance(value, nn.Parameter):
        return
    if isinstance(value, dict):
        for entry in value.values():
            _collect(entry, where, found)
    elif isinstance(value, list | tuple):
        for number, entry in enumerate(value):
            _collect(entry, f"{where} ({number})" if number else where, found)
    elif isinstance(value, bool | int | float | complex | str | Tensor):
        found[where] = value


def same(left: Any, right: Any) -> bool:
    """Whether two tensors or other values are the same, NaN included."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.shape == right.shape and (
            torch.equal(left, right)
            or bool(((left == right) | ((left != left) & (right != right))).all())
        )
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return False
    return type(left) is type(right) and bool(left == right or left != left)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors]) if tensors else torch.empty(0)


def _cut(tensors: Sequence[Sequence[Tensor]]) -> list[list[list[Tensor]]]:
    """By rank and group, the pieces of tensors that lie one after the other."""
    by_group = [torch.tensor_split(_flat(own), _CUTS) for own in tensors]
    cut = [[[piece] for piece in pieces] for pieces in zip(*by_group, strict=True)]
    return [*cut, [[] for _ in tensors]]  # a rank may have nothing
