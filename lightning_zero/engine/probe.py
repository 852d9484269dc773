"""Finds out whether an optimizer may be sharded: whether it treats every element alike.

Sharding cuts tensors at arbitrary places. That changes nothing for an optimizer whose update of an
element depends on that element's own weight, gradient and state only. Others (LBFGS, LAMB,
Adafactor, Muon, ...) need whole parameters, and would finish with other numbers without a word.
Which is which is not in an optimizer's name, so it is tried out: a few steps on small tensors,
whole and cut to pieces, have to give the same.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.engine.optimizer import inner_optimizer
from lightning_zero.engine.stepping import hyper_parameters

_ELEMENT_WISE = frozenset(
    {
        "SGD",
        "Adam",
        "AdamW",
        "NAdam",
        "RAdam",
        "Adamax",
        "Adagrad",
        "Adadelta",
        "RMSprop",
        "Rprop",
        "ASGD",
    }
)
_NOT_ELEMENT_WISE = frozenset({"LBFGS", "Adafactor", "Muon", "SparseAdam"})
_SHAPES = ((4, 6), (5,))
_CUTS = (7, 20)  # through the middle of a row, and of the second tensor
_STEPS = 3
_ADVICE = (
    "Use an element-wise optimizer (SGD, Adam, AdamW, RMSprop, Adagrad, ... or your own), or train"
    " with strategy='ddp'."
)


def check_element_wise(user: Optimizer) -> None:
    """Raise ``NotImplementedError`` unless ``user`` may be sharded. Leaves it unchanged."""
    plain = type(user)
    name = plain.__name__
    if plain.__module__.startswith("torch.optim"):
        if name in _ELEMENT_WISE:
            return
        if name in _NOT_ELEMENT_WISE:
            raise NotImplementedError(
                f"The optimizer {name} needs whole parameters, but ZeRO shards them. {_ADVICE}"
            )
    try:
        reason = _difference(user)
    except Exception as error:
        raise NotImplementedError(
            f"The optimizer {name} could not be tried on small tensors ({type(error).__name__}:"
            f" {error}), so it is not known"
            f" whether it treats every element alike. {_ADVICE}"
        ) from error
    if reason is not None:
        raise NotImplementedError(f"The optimizer {name} can not be sharded: {reason}. {_ADVICE}")


def _difference(user: Optimizer) -> str | None:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in _SHAPES]
    grads = [[torch.randn(shape, generator=generator) for shape in _SHAPES] for _ in range(_STEPS)]
    whole, calls = _run(user, start, grads)
    if torch.equal(whole, _flat(start)):
        return "its step does not change the parameters it is given"
    if calls != _STEPS:
        return f"its step calls the closure {calls // _STEPS} times instead of once"
    pieces = []
    for piece, piece_grads in zip(
        _cut(_flat(start)), zip(*[_cut(_flat(g)) for g in grads], strict=True), strict=True
    ):
        result, _ = _run(user, [piece], [[grad] for grad in piece_grads])
        pieces.append(result)
    if not torch.allclose(torch.cat(pieces), whole, rtol=1e-5, atol=1e-7):
        return "its update of one element depends on other elements, or on chance"
    return None


def check_steps_in_parts(user: Optimizer) -> None:
    """Raise ``NotImplementedError`` unless the parameters of ``user`` may be stepped in several
    calls, as is done with what rests elsewhere. Leaves it unchanged.
    """
    if type(user).__module__.startswith("torch.optim"):
        return
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in _SHAPES]
    grads = [[torch.randn(shape, generator=generator) for shape in _SHAPES] for _ in range(_STEPS)]
    whole, _ = _run(user, start, grads)
    params = [nn.Parameter(t.clone()) for t in start]
    optimizer = _small_optimizer(user, params)
    for step_grads in grads:
        (group,) = optimizer.param_groups
        before = hyper_parameters(group)
        for param, grad in zip(params, step_grads, strict=True):
            group.update(hyper_parameters(before), params=[param])
            param.grad = grad.clone()
            optimizer.step()
            param.grad = None
    if not torch.equal(_flat([p.detach() for p in params]), whole):
        raise NotImplementedError(
            f"The optimizer {type(user).__name__} can not be offloaded: its parameters are stepped"
            " in several calls, and it keeps something of a step neither in its groups nor in the"
            " state of its parameters. Keep it in `param_groups`, or do not offload the optimizer."
        )


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def _cut(flat: Tensor) -> tuple[Tensor, ...]:
    return torch.tensor_split(flat, _CUTS)


def _run(user: Optimizer, start: list[Tensor], grads: list[list[Tensor]]) -> tuple[Tensor, int]:
    """The parameters after some steps, and how often the closure was called."""
    params = [nn.Parameter(t.clone()) for t in start]
    optimizer = _small_optimizer(user, params)
    calls = 0

    def closure() -> float:
        nonlocal calls
        calls += 1
        return 0.0

    for step_grads in grads:
        for param, grad in zip(params, step_grads, strict=True):
            param.grad = grad.clone()
        optimizer.step(closure)
    return _flat([p.detach() for p in params]), calls


def _small_optimizer(user: Optimizer, params: list[nn.Parameter]) -> Optimizer:
    options = {
        key: copy.deepcopy(value) for key, value in user.param_groups[0].items() if key != "params"
    }
    if "lr" in options:
        options["lr"] = 0.1  # a schedule may begin with 0
    accepted = inspect.signature(type(user).__init__).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    try:
        return type(user)(
            params, **{k: v for k, v in options.items() if takes_all or k in accepted}
        )
    except TypeError:
        inner: Any = inner_optimizer(user)
        inner.param_groups = [{**options, "params": params}]
        return inner  # type: ignore[no-any-return]


def state_bytes_per_element(user: Optimizer, dtype: torch.dtype) -> int:
    """Bytes of state that an element-wise optimizer keeps for each element of a parameter of
    ``dtype``.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0  # it never has a gradient
    param = nn.Parameter(torch.zeros(_SHAPES[0], dtype=dtype))
    param.grad = torch.ones_like(param)
    optimizer = _small_optimizer(user, [param])
    optimizer.step()
    per_element = [
        v
        for v in optimizer.state[param].values()
        if isinstance(v, Tensor) and v.shape == param.shape
    ]
    return sum(v.element_size() for v in per_element)
