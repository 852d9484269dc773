"""What an op does: reads, writes, gradients, hooks, optimizers, freezes, saves, exceptions.

An op says nothing of the strategy, and raises nothing under DDP. What it returns is compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fuzz.program import Op

if TYPE_CHECKING:
    from tests.fuzz.module import Fuzzed

OUTSIDE = ("on_train_start", "on_train_batch_start", "on_train_batch_end", "step_begin")
GRADS = ("on_before_optimizer_step", "on_before_optimizer_step", "on_after_backward")
END = ("on_train_end", "after_fit")
ANYWHERE = (*OUTSIDE, "step_end", "on_before_backward", *GRADS, *END, "in_layer")
ANYWHERE_AND_EVALUATION = (*ANYWHERE, "on_validation_epoch_start")
WRITABLE = (*OUTSIDE, *GRADS, "on_fit_start", *END)


@dataclass(frozen=True)
class Kind:
    """A kind of op: what it does, when it may come, how often it is drawn."""

    run: Callable[[Fuzzed, Op], Any]
    moments: tuple[str, ...]
    weight: float


KINDS: dict[str, Kind] = {}
Run = Callable[["Fuzzed", Op], Any]


def kind(moments: tuple[str, ...], weight: float = 1.0) -> Callable[[Run], Run]:
    """Register a function as a kind of op under its own name."""

    def register(run: Run) -> Run:
        KINDS[run.__name__] = Kind(run, moments, weight)
        return run

    return register


def _reads(**functions: Callable[[nn.Parameter], Any]) -> None:
    for name, function in functions.items():

        def run(m: Fuzzed, op: Op, function: Callable[[nn.Parameter], Any] = function) -> Any:
            with torch.no_grad():
                return function(m.param_of(op))

        KINDS[f"read_{name}"] = Kind(run, ANYWHERE_AND_EVALUATION, 0.5)


_reads(
    data=lambda p: p.data.clone(),
    detach=lambda p: p.detach() * 2,
    sum=lambda p: p.sum(),
    norm=lambda p: torch.linalg.vector_norm(p),
    numpy=lambda p: torch.from_numpy(p.detach().cpu().numpy().copy()),
    view=lambda p: p.view(-1)[1:].clone(),
    index=lambda p: p[0].clone(),
    item=lambda p: p.flatten()[0].item(),
    tolist=lambda p: p.tolist(),
    equal=lambda p: [torch.equal(p, p.clone()), bool((p == p).all())],
    stack=lambda p: torch.stack([p, p * 2]),
    transpose=lambda p: p.t().contiguous(),
    where=lambda p: torch.where(p > 0, p, -p),
    iterate=lambda p: [row.sum().item() for row in p],
    foreach=lambda p: torch._foreach_norm([p, p]),
    facts=lambda p: [tuple(p.shape), str(p.dtype), p.requires_grad, p.is_leaf, p.numel()],
    deepcopy=lambda p: copy.deepcopy(p).detach(),
    out=lambda p: torch.mul(p, 3, out=torch.empty(p.shape)),
    has_grad=lambda p: p.is_leaf and p.grad_fn is None,
)


def _writes(**functions: Callable[[nn.Parameter, float], Any]) -> None:
    for name, function in functions.items():

        def run(
            m: Fuzzed, op: Op, function: Callable[[nn.Parameter, float], Any] = function
        ) -> Any:
            with torch.no_grad():
                function(m.param_of(op), op.value)
                return m.param_of(op).detach().clone() if op.param % 2 else None

        KINDS[f"write_{name}"] = Kind(run, WRITABLE, 0.5)


def _set_data(p: nn.Parameter, value: float) -> None:
    p.data = p.data * value


def _index_assign(p: nn.Parameter, value: float) -> None:
    p[0] = value


def _init(p: nn.Parameter, value: float) -> None:
    nn.init.uniform_(p, -abs(value), abs(value), generator=torch.Generator().manual_seed(3))


def _detached_row(p: nn.Parameter, value: float) -> None:
    p.detach()[0].mul_(value)


def _data_view(p: nn.Parameter, value: float) -> None:
    p.data.view(-1)[1:].add_(value)


def _numpy_write(p: nn.Parameter, value: float) -> None:
    array = p.detach().numpy()
    array *= value


def _vector(p: nn.Parameter, value: float) -> None:
    vector = nn.utils.parameters_to_vector([p]) * value
    nn.utils.vector_to_parameters(vector, [p])


_writes(
    copy=lambda p, v: p.copy_(torch.full(p.shape, v)),
    mul=lambda p, v: p.mul_(v),
    add=lambda p, v: p.add_(torch.ones(p.shape), alpha=v),
    index=_index_assign,
    data=_set_data,
    data_mul=lambda p, v: p.data.mul_(v),
    data_view=_data_view,
    init=_init,
    clamp=lambda p, v: p.clamp_(-abs(v) / 3, abs(v) / 3),
    fill=lambda p, v: p.fill_(v),
    zero=lambda p, v: p.zero_(),
    detached_row=_detached_row,
    foreach=lambda p, v: torch._foreach_mul_([p], v),
    lerp=lambda p, v: p.lerp_(torch.zeros(p.shape), 0.1),
    masked=lambda p, v: p.masked_fill_(p > 0.2, v),
    out=lambda p, v: torch.mul(p, v, out=p),
    numpy=_numpy_write,
    vector=_vector,
)


def _gradients(**functions: Callable[[nn.Parameter, float], Any]) -> None:
    for name, function in functions.items():

        def run(
            m: Fuzzed, op: Op, function: Callable[[nn.Parameter, float], Any] = function
        ) -> Any:
            p = m.param_of(op)
            with torch.no_grad():
                return "no gradient" if p.grad is None else function(p, op.value)

        KINDS[f"grad_{name}"] = Kind(run, GRADS, 0.6)


def _replace_grad(p: nn.Parameter, value: float) -> None:
    assert p.grad is not None
    p.grad = p.grad * value


def _drop_grad(p: nn.Parameter, value: float) -> None:
    p.grad = None


def _delete_grad(p: nn.Parameter, value: float) -> None:
    del p.grad


_gradients(
    read=lambda p, v: p.grad.clone(),  # type: ignore[union-attr]
    norm=lambda p, v: p.grad.norm().item(),  # type: ignore[union-attr]
    mul=lambda p, v: (p.grad.mul_(v), None)[1],  # type: ignore[union-attr]
    data_mul=lambda p, v: (p.grad.data.mul_(v), None)[1],  # type: ignore[union-attr]
    row=lambda p, v: (p.grad[0].zero_(), None)[1],  # type: ignore[union-attr]
    assign=_replace_grad,
    none=_drop_grad,
    delete=_delete_grad,
    decay=lambda p, v: (p.grad.add_(p, alpha=0.1), None)[1],  # type: ignore[union-attr]
    clip_value=lambda p, v: nn.utils.clip_grad_value_([p], 0.01),
)


@kind(GRADS)
def grads_of_all(m: Fuzzed, op: Op) -> Any:
    return {n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None}


@kind(GRADS)
def grads_scaled(m: Fuzzed, op: Op) -> None:
    grads = [p.grad for p in m.parameters() if p.grad is not None]
    torch._foreach_mul_(grads, op.value)


@kind((*OUTSIDE, *END))
def state_dict(m: Fuzzed, op: Op) -> Any:
    return {name: value.clone() for name, value in m.net.state_dict().items() if "run" not in name}


@kind((*OUTSIDE, *GRADS, *END))
def load_scaled(m: Fuzzed, op: Op) -> Any:
    layer = m.layer_of(op)
    scaled = (
        {name: value * op.value for name, value in layer.main.state_dict().items()}
        if hasattr(layer, "main")
        else {name: value * op.value for name, value in layer.state_dict().items()}
    )
    target = layer.main if hasattr(layer, "main") else layer
    return str(target.load_state_dict(scaled))


@kind((*OUTSIDE, "step_end", *END))
def deepcopied(m: Fuzzed, op: Op) -> Any:
    copied = copy.deepcopy(m.layer_of(op))
    return [p.detach().clone() for p in copied.parameters()]


@kind((*OUTSIDE, *END))
def keep_clone(m: Fuzzed, op: Op) -> Any:
    before = m.kept.get("clone")
    m.kept["clone"] = m.param_of(op).detach().clone()
    return before


@kind(OUTSIDE)
def average(m: Fuzzed, op: Op) -> Any:
    """An exponential moving average of all weights, as many recipes keep it."""
    with torch.no_grad():
        if "average" not in m.kept:
            m.kept["average"] = [p.detach().clone() for p in m.parameters()]
        for kept, p in zip(m.kept["average"], m.parameters(), strict=True):
            kept.lerp_(p, 0.2)
    return m.kept["average"][op.param].clone()


@kind(OUTSIDE)
def swap_parameters(m: Fuzzed, op: Op) -> None:
    """Exchange two parameters of one shape through copies."""
    p = m.param_of(op)
    q = next(q for q in m.parameters() if q.shape == p.shape)
    held = p.data.clone()
    p.data.copy_(q.data)
    q.data.copy_(held)


@kind(("step_end",))
def in_loss(m: Fuzzed, op: Op) -> None:
    m.extra.append(m.param_of(op).square().sum() * 0.01)


@kind(("step_end",))
def whole_decay(m: Fuzzed, op: Op) -> None:
    m.extra.append(sum((p.square().sum() for p in m.parameters()), torch.zeros(())) * 1e-3)


@kind(("step_end",))
def input_penalty(m: Fuzzed, op: Op) -> Any:
    """A gradient penalty on the inputs, with a graph of its own."""
    grad = torch.autograd.grad(m.kept["output"].sum(), m.kept["input"], create_graph=True)[0]
    m.extra.append((grad.norm() - 1).square() * 0.1)
    return grad


@kind(("step_end",))
def input_gradient(m: Fuzzed, op: Op) -> Any:
    return torch.autograd.grad(m.kept["output"].sum(), m.kept["input"], retain_graph=True)[0]


@kind((*OUTSIDE, *END))
def used_outside(m: Fuzzed, op: Op) -> Any:
    with torch.no_grad():
        weight = m.layer_of(op).main.weight if hasattr(m.layer_of(op), "main") else m.head.weight
        return F.linear(torch.ones(1, 5), weight)


@kind(OUTSIDE, 0.5)
def freeze(m: Fuzzed, op: Op) -> None:
    m.param_of(op).requires_grad_(False)


@kind(OUTSIDE, 0.5)
def thaw(m: Fuzzed, op: Op) -> None:
    """Only what was trained at the start: DDP reduces no other."""
    frozen = ("frozen", "adapter", "adapter_swapped")
    for layer in m.net:
        if layer.kind not in frozen:
            layer.requires_grad_(True)
    m.head.requires_grad_(True)


class Raised(Exception):
    """What user code raises and catches."""


@kind(("step_begin", "step_end"))
def caught_in_call(m: Fuzzed, op: Op) -> str:
    """A module call that ends with an error, which the step survives."""

    def fail(*args: Any) -> None:
        raise Raised

    handle = m.layer_of(op).register_forward_hook(fail)
    try:
        m(torch.ones(2, 5))
    except Raised:
        return "caught"
    finally:
        handle.remove()
    return "not used"


@kind((*OUTSIDE, *GRADS, *END))
def whole_read(m: Fuzzed, op: Op) -> Any:
    from tests.support.runs import whole

    with whole(m, m.trainer):
        return [p.detach().clone() for p in m.layer_of(op).parameters()]


@kind((*OUTSIDE, *END))
def whole_write(m: Fuzzed, op: Op) -> None:
    from tests.support.runs import whole

    with whole(m, m.trainer, write=True), torch.no_grad():
        for p in m.layer_of(op).parameters():
            p.mul_(op.value)


@kind((*OUTSIDE, *END))
def evaluated(m: Fuzzed, op: Op) -> Tensor:
    """A plain call outside of any step."""
    is_training = m.training
    m.eval()
    with torch.no_grad():
        out = m(torch.ones(2, 5))
    m.train(is_training)
    return out  # type: ignore[no-any-return]
