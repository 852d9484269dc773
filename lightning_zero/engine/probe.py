"""Finds out whether an optimizer may be sharded: whether it treats every element alike.

Sharding cuts tensors at arbitrary places and joins what is left of neighbours. That changes nothing
for an optimizer whose update of an element depends on that element's own weight, gradient and state
only. Others (LBFGS, LAMB, Adafactor, Muon, 8-bit Adam, ...) need whole parameters, and would finish
with other numbers without a word.
So it is tried out ([Note: the trial]).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.engine.optimizer_copy import nested_optimizers, nothing_happens
from lightning_zero.engine.stepping import hyper_parameters
from lightning_zero.engine.trial import (
    RefusedError,
    Side,
    Trial,
    gradients,
    noise,
    num_trial_steps,
    same,
)

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

_HALF = frozenset({torch.float16, torch.bfloat16})
_FEW_STEPS = 12
_PARTS = ((4, 6), (5,))
_SIZED = (64, 96)
_ADVICE = (
    "Use an element-wise optimizer (SGD, Adam, AdamW, RMSprop, Adagrad, ... or your own), or train"
    " with strategy='ddp'."
)


def check_element_wise(user: Optimizer, device: torch.device | None = None) -> None:
    """Raise ``NotImplementedError`` unless ``user`` may be sharded. Leaves it unchanged.

    Args:
        user: the optimizer.
        device: where it will step, if that is not the CPU; tried there if it can't be on the CPU.
    """
    plain = type(user)
    name = plain.__name__
    if plain.__module__.startswith("torch.optim"):
        if name in _ELEMENT_WISE:
            return
        if name in _NOT_ELEMENT_WISE:
            raise NotImplementedError(
                f"The optimizer {name} needs whole parameters, but ZeRO shards them. {_ADVICE}"
            )
    _check_owns_its_step(user)
    failures: list[str] = []
    for where in dict.fromkeys((torch.device("cpu"), device or torch.device("cpu"))):
        for constructs_state in (False, True):
            try:
                _try_all(user, where, constructs_state=constructs_state)
            except RefusedError as reason:
                raise NotImplementedError(
                    f"The optimizer {name} can not be sharded: {reason}. {_ADVICE}"
                ) from None
            except Exception as error:
                state = "its constructor's state" if constructs_state else "empty state"
                failures.append(f"with {state} on {where.type}: {type(error).__name__}: {error}")
            else:
                return
    raise NotImplementedError(
        f"The optimizer {name} could not be tried on small tensors, so it is not known whether it"
        " treats every element alike. What was tried: a step of a copy of it, with its own groups,"
        f" after a backward ({'; '.join(failures)}). {_ADVICE}"
    )


def _check_owns_its_step(user: Optimizer) -> None:
    for attribute, inner in nested_optimizers(user).items():
        kind = type(inner).__name__
        raise NotImplementedError(
            f"The optimizer {type(user).__name__} can not be sharded: it wraps another optimizer"
            f" ({kind}, its attribute '{attribute}'), whose state would have to be sharded with its"
            f" own. Pass the {kind} itself, or write both as one class that keeps its tensors in"
            f" its own `state`. {_ADVICE}"
        )


def _try_all(user: Optimizer, device: torch.device, *, constructs_state: bool) -> None:
    trial = Trial(user, device, constructs_state=constructs_state)
    trial.run(num_trial_steps(user))
    if any(group.get("weight_decay") == 0 for group in user.param_groups):
        trial.run(_FEW_STEPS, {"weight_decay": 0.1})  # schedules of it begin with 0
    own = {param.dtype for group in user.param_groups for param in group["params"]}
    for dtype in sorted(own & _HALF, key=str):  # some round by chance, or keep what is lost
        trial.run(_FEW_STEPS, dtype=dtype)


def check_steps_in_parts(user: Optimizer) -> None:
    """Raise ``NotImplementedError`` unless the parameters of ``user`` may be stepped in several
    calls, as is done with what rests elsewhere. Leaves it unchanged.
    """
    if type(user).__module__.startswith("torch.optim"):
        return
    name, advice = type(user).__name__, "Do not offload the optimizer, or use one of torch.optim."
    try:
        is_same = _steps_in_parts(user)
    except Exception as error:
        raise NotImplementedError(
            f"The optimizer {name} can not be offloaded: stepped in parts and without a closure, it"
            f" raised {type(error).__name__}: {error}. {advice}"
        ) from error
    if not is_same:
        raise NotImplementedError(
            f"The optimizer {name} can not be offloaded: its parameters are stepped"
            " in several calls, and it keeps something of a step neither in its groups nor in the"
            f" state of its parameters. Keep it in `param_groups`. {advice}"
        )


def _steps_in_parts(user: Optimizer) -> bool:
    cpu = torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    start = [[noise(shape, generator) for shape in _PARTS] for _ in user.param_groups]
    with nothing_happens(cpu):
        whole, parts = (_with_state(user, start) for _ in range(2))
        for step in range(_FEW_STEPS):
            grads = gradients(step, whole, generator)
            whole.step(grads)
            _step_parts(parts, grads)
        return all(same(whole.flat(i), parts.flat(i)) for i in range(len(start)))


def _step_parts(side: Side, grads: Sequence[Sequence[Tensor]]) -> None:
    """One step, part by part and group by group, each with the options of before the step."""
    groups = side.optimizer.param_groups
    for index, group in enumerate(groups):
        before = hyper_parameters(group)
        for param, grad in zip(side.params[index], grads[index], strict=True):
            param.grad = grad.clone()
            changed = {**hyper_parameters(before), "params": [param]}
            side.optimizer.param_groups = [changed]
            side.optimizer.step()
            group.update(hyper_parameters(changed))
            param.grad = None
    side.optimizer.param_groups = groups


def _with_state(user: Optimizer, start: Sequence[Sequence[Tensor]]) -> Side:
    """A side that can step: some optimizers need the state that their constructor makes."""
    side = Side(user, start, constructs_state=False)
    try:
        side.step([[torch.ones_like(t) for t in own] for own in start])
    except Exception:
        return Side(user, start, constructs_state=True)
    return Side(user, start, constructs_state=False)


def state_bytes_per_element(user: Optimizer, dtype: torch.dtype, group: int = 0) -> int:
    """Bytes of state that an element-wise optimizer keeps for each element of a parameter of
    ``dtype`` in one of its groups.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0  # it never has a gradient
    if not inspect.isfunction(type(user).step):
        return 0  # a double in its place, which counts its calls
    start = [
        [torch.zeros(_SIZED, dtype=dtype)] if index == group else []
        for index in range(len(user.param_groups))
    ]
    with nothing_happens(torch.device("cpu")):
        try:
            side = _with_state(user, start)
            for _ in range(2):
                side.step([[torch.ones_like(t) for t in own] for own in start])
        except Exception:
            return 0  # one that can not be sharded, on one rank: nobody knows
        return sum(v.element_size() for v in side.flat_state(group).values())
