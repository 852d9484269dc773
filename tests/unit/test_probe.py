"""Which optimizers may be sharded is found out by trying."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.engine.probe import (
    check_element_wise,
    check_steps_in_parts,
    state_bytes_per_element,
)


class Lion(Optimizer):
    """Element-wise, home-made, with a constructor of its own."""

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    p.sub_((momentum + p.grad).sign(), alpha=group["lr"])
                    momentum.lerp_(p.grad, 1 - group["beta"])
        return loss


class WithRequiredArgument(Lion):
    """Can not be built from its groups alone."""

    def __init__(self, params: Any, model_name: str, *, lr: float) -> None:
        super().__init__(params, lr)
        self.model_name = model_name


class TrustRatio(Lion):
    """Scales by the norm of the whole parameter, as LAMB does."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (p.norm() / p.grad.norm()), alpha=group["lr"])
        return loss


class NormOfAll(Lion):
    """Scales by the norm over all parameters."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.sub_(p.grad / norm, alpha=0.1)
        return loss


class Noisy(Lion):
    """Adds noise: no two cuts give the same."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        for p in self.param_groups[0]["params"]:
            p.add_(torch.randn_like(p), alpha=0.1)
        return loss


class Sharpness(Lion):
    """Calls the closure twice, as SAM does."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        assert closure is not None
        closure()
        return super().step(closure)


class Wrapper(Lion):
    """Hands the step to another optimizer that it holds."""

    def __init__(self, params: Any, inner: Optimizer) -> None:
        super().__init__(params)
        self.inner = inner

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        return self.inner.step(closure)  # type: ignore[arg-type]


def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(3, 4))]


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.SGD,
        torch.optim.AdamW,
        torch.optim.Rprop,
        Lion,
        lambda p: WithRequiredArgument(p, "x", lr=0.1),
        lambda p: Lion(p, lr=0.0),
    ],
)
def test_element_wise_optimizers_are_accepted_and_left_alone(make: Any) -> None:
    own = params()
    before = own[0].detach().clone()
    optimizer = make(own)
    check_element_wise(optimizer)
    assert torch.equal(own[0], before)
    assert not optimizer.state


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (torch.optim.LBFGS, "LBFGS needs whole parameters"),
        (torch.optim.Adafactor, "Adafactor needs whole parameters"),
        (
            TrustRatio,
            r"TrustRatio can not be sharded: its step mixes the elements of a tensor \('linalg_v",
        ),
        (NormOfAll, "mixes the elements of a tensor"),
        (Noisy, r"mixes the elements of a tensor \('randn_like'\)"),
        (Sharpness, "calls the closure 2 times"),
        (lambda p: Wrapper(p, torch.optim.SGD(p)), r"wraps another optimizer \(SGD, .*'inner'\)"),
    ],
)
def test_other_optimizers_are_refused_with_the_reason_and_the_way_out(
    make: Any, reason: str
) -> None:
    with pytest.raises(NotImplementedError, match=reason + r"[\s\S]*Use an element-wise optimizer"):
        check_element_wise(make(params()))


def test_the_state_per_element_is_measured() -> None:
    def bytes_of(make: Any, **options: Any) -> int:
        return state_bytes_per_element(make(params(), **options), torch.float32)

    assert bytes_of(torch.optim.SGD) == 0
    assert bytes_of(torch.optim.SGD, momentum=0.9) == 4
    assert bytes_of(torch.optim.AdamW) == 8
    assert bytes_of(torch.optim.AdamW, amsgrad=True) == 12
    assert bytes_of(Lion) == 4


class Warmup(Lion):
    """Its rate depends on how often it has stepped, which it counts in its groups."""

    def __init__(self, params: Any, count: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            group["count"] = count

    def next_rate(self, group: dict[str, Any]) -> float:
        group["count"] += 1
        return float(group["lr"] / group["count"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        for group in self.param_groups:
            rate = self.next_rate(group)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=rate)
        return loss


class WarmupOfItself(Warmup):
    """The same, counted in an attribute."""

    calls = 0

    def next_rate(self, group: dict[str, Any]) -> float:
        self.calls += 1
        return float(group["lr"] / self.calls)


@pytest.mark.parametrize("count", [0, torch.zeros(())], ids=["number", "tensor"])
def test_an_optimizer_that_counts_in_its_groups_may_be_stepped_in_parts(count: Any) -> None:
    optimizer = Warmup([nn.Parameter(torch.ones(3))], count)
    check_steps_in_parts(optimizer)
    assert optimizer.param_groups[0]["count"] == 0


def test_an_optimizer_that_counts_in_itself_is_not_offloaded() -> None:
    optimizer = WarmupOfItself([nn.Parameter(torch.ones(3))], 0)
    check_element_wise(optimizer)
    with pytest.raises(NotImplementedError, match="WarmupOfItself can not be offloaded"):
        check_steps_in_parts(optimizer)
