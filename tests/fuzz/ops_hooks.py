"""Ops on hooks and on the optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tests.fuzz.ops import GRADS, OUTSIDE, kind
from tests.fuzz.program import Op

if TYPE_CHECKING:
    from tests.fuzz.module import Fuzzed

EARLY = ("on_fit_start", *OUTSIDE)


def _hold(m: Fuzzed, handle: Any) -> None:
    m.kept.setdefault("hooks", []).append(handle)


@kind(EARLY)
def hook_forward(m: Fuzzed, op: Op) -> None:
    value = op.value

    def scale(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * value

    _hold(m, m.layer_of(op).register_forward_hook(scale))


@kind(EARLY)
def hook_forward_pre(m: Fuzzed, op: Op) -> None:
    value = op.value

    def scale(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (args[0] * value,)

    _hold(m, m.layer_of(op).register_forward_pre_hook(scale))


@kind(EARLY)
def hook_reads_weight(m: Fuzzed, op: Op) -> None:
    """A forward hook that looks at the weights of its module."""

    def look(module: nn.Module, args: Any, output: Any) -> None:
        p = next(module.parameters())
        m.note("seen by a hook", p.detach().sum())

    _hold(m, m.layer_of(op).register_forward_hook(look))


@kind(EARLY)
def hook_full_backward(m: Fuzzed, op: Op) -> None:
    def look(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        m.note("seen in backward", grad_output[0])

    _hold(m, m.layer_of(op).register_full_backward_hook(look))


@kind((*OUTSIDE, *GRADS))
def hook_removed(m: Fuzzed, op: Op) -> int:
    held = m.kept.get("hooks", [])
    if held:
        held.pop().remove()
    return len(held)


def _optimizer(m: Fuzzed, op: Op) -> Any:
    optimizers = m.optimizers(use_pl_optimizer=False)
    return optimizers[op.param % len(optimizers)] if isinstance(optimizers, list) else optimizers


@kind((*OUTSIDE, *GRADS))
def optimizer_lr(m: Fuzzed, op: Op) -> list[float]:
    groups = _optimizer(m, op).param_groups
    groups[op.layer % len(groups)]["lr"] *= abs(op.value)
    return [float(group["lr"]) for group in groups]


@kind((*OUTSIDE, *GRADS))
def optimizer_decay(m: Fuzzed, op: Op) -> None:
    for group in _optimizer(m, op).param_groups:
        group["weight_decay"] = abs(op.value) * 0.1


@kind((*OUTSIDE, *GRADS, "on_train_end"))
def optimizer_facts(m: Fuzzed, op: Op) -> Any:
    optimizer = _optimizer(m, op)
    groups = [[tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups]
    return [type(optimizer).__name__, groups]


@kind(("on_train_batch_end", "on_train_batch_start"))
def optimizer_state_dict(m: Fuzzed, op: Op) -> Any:
    """What is saved of the optimizer's state."""
    state = _optimizer(m, op).state_dict()["state"]
    return {
        f"{index} {name}": value.clone() if isinstance(value, Tensor) else value
        for index, entries in sorted(state.items())
        for name, value in sorted(entries.items())
    }


@kind(("on_train_batch_end", "on_train_batch_start"))
def optimizer_round_trip(m: Fuzzed, op: Op) -> None:
    optimizer = _optimizer(m, op)
    optimizer.load_state_dict(optimizer.state_dict())


@kind(("on_train_batch_end", "on_train_batch_start"))
def optimizer_state_read(m: Fuzzed, op: Op) -> Any:
    entries = _optimizer(m, op).state.get(m.param_of(op), {})
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in sorted(entries.items())}


@kind(("on_train_batch_end", "on_train_batch_start"))
def optimizer_state_scaled(m: Fuzzed, op: Op) -> int:
    entries = _optimizer(m, op).state.get(m.param_of(op), {})
    tensors = [v for v in entries.values() if isinstance(v, Tensor) and v.dim() > 0]
    for value in tensors:
        value.mul_(abs(op.value))
    return len(tensors)


@kind(("on_train_batch_end", "on_train_batch_start"))
def optimizer_state_replaced(m: Fuzzed, op: Op) -> None:
    entries = _optimizer(m, op).state.get(m.param_of(op), {})
    for name, value in list(entries.items()):
        if isinstance(value, Tensor) and value.dim() > 0:
            entries[name] = torch.zeros_like(value)


@kind(("on_train_batch_end", "on_train_batch_start"))
def optimizer_state_dropped(m: Fuzzed, op: Op) -> bool:
    return _optimizer(m, op).state.pop(m.param_of(op), None) is not None


@kind(("on_train_batch_end",), 0.5)
def optimizer_state_cleared(m: Fuzzed, op: Op) -> None:
    _optimizer(m, op).state.clear()


@kind(EARLY)
def optimizer_hook(m: Fuzzed, op: Op) -> None:
    """A hook of the optimizer that is called after each step."""

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        m.note("seen after a step", m.head.weight.detach().sum())

    _hold(m, _optimizer(m, op).register_step_post_hook(after))


@kind(("on_train_batch_start", "on_train_batch_end"), 0.5)
def optimizer_group_moved(m: Fuzzed, op: Op) -> int:
    """Take a parameter out of its group and put it into a group of its own."""
    optimizer, p = _optimizer(m, op), m.param_of(op)
    for group in optimizer.param_groups:
        if any(q is p for q in group["params"]) and len(group["params"]) > 1:
            group["params"] = [q for q in group["params"] if q is not p]
            optimizer.add_param_group({"params": [p], "lr": 0.01})
            break
    return len(optimizer.param_groups)


@kind(EARLY)
def hook_tensor(m: Fuzzed, op: Op) -> None:
    """A hook on a parameter that scales its gradient."""
    p, value = m.param_of(op), op.value
    if p.requires_grad:
        _hold(m, p.register_hook(lambda grad: grad * value))


@kind(EARLY)
def hook_accumulated(m: Fuzzed, op: Op) -> None:
    """A hook that changes the gradient once it has been accumulated, before DDP's."""
    p, value = m.param_of(op), op.value
    if p.requires_grad:

        def scale(param: Tensor) -> None:
            if param.grad is not None:
                param.grad.mul_(value)

        _hold(m, p.register_post_accumulate_grad_hook(scale))
