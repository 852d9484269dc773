"""Families of optimizers that public libraries have, in their smallest forms: which are sharded."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.engine.probe import (
    check_element_wise,
    check_steps_in_parts,
    state_bytes_per_element,
)


class Base(Optimizer):
    """Plain descent; its subclasses say what else they do with a gradient."""

    def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.begin(group)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.update(p, group), alpha=group["lr"])
        return loss

    def begin(self, group: dict[str, Any]) -> None:
        group["step"] = group.get("step", 0) + 1

    def update(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        return p.grad


# -- those that need whole tensors


class BlockQuantiser(Base):
    """Keeps its momentum in 8 bits from 4,096 elements on, in blocks that begin with the tensor."""

    def update(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[p]
        if p.numel() < 4096:
            state.setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad, 0.1)
            return state["momentum"]
        count = -(-p.numel() // 256)
        codes = state.setdefault("codes", torch.zeros(count * 256, dtype=torch.int8))
        scale = state.setdefault("scale", torch.zeros(count))
        full = codes.view(count, 256) * scale[:, None]
        full.view(-1)[: p.numel()].lerp_(p.grad.reshape(-1), 0.1)
        scale.copy_(full.abs().amax(1) / 127)
        codes.view(count, 256).copy_((full / scale[:, None].clamp_min(1e-20)).round())
        return full.view(-1)[: p.numel()].view_as(p)


class QuantisesBySize(Base):
    """Rounds what is at least 16,384 elements long: the pieces are shorter."""

    def update(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad.bfloat16().float() if p.numel() >= 16_384 else p.grad


class LateMixer(Base):
    """Centres the gradient in every k-th step only."""

    def update(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad - p.grad.mean() if group["step"] % group["k"] == 0 else p.grad


class NormAfterWarmup(Base):
    """A norm that scales nothing before it is large, computed all the time."""

    def update(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad / max(1.0, float(p.grad.norm()) * 1e-9)


class ChannelProjection(Base):
    """Projects rows of 2-D weights; other tensors are left alone."""

    def update(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        if p.dim() < 2:
            return p.grad
        return p.grad - p * (p * p.grad).sum(1, keepdim=True)


class Neighbours(Base):
    """No reduction, no broadcasting: takes from the next element."""

    def update(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        update = p.grad.clone()
        update.view(-1)[1:] += p.grad.view(-1)[:-1]
        return update


class Distance(Base):
    """Learns its rate from a number over all parameters (d-adaptation), in its groups."""

    def begin(self, group: dict[str, Any]) -> None:
        total = sum(sum(map(float, p.grad.abs().view(-1)[:3])) for p in group["params"])
        group["total"] = group.get("total", 0.0) + total


class CountsParameters(Base):
    """Its rate depends on how many parameters it has stepped before."""

    count = 0

    def update(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        self.count += 1
        return p.grad / self.count


class RandomRate(Base):
    """One number by chance for all: ranks draw different ones."""

    def update(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad * (1 + 0.0 * random.random())


class FirstParameter(Base):
    """Looks at its first parameter, and a rank may have none."""

    def begin(self, group: dict[str, Any]) -> None:
        assert group["params"][0].dtype == torch.float32


class Outside(Base):
    """Keeps its momentum in a list."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.momenta: list[Tensor] = []

    def update(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        self.momenta.append(torch.zeros_like(p))
        return p.grad


class Listed(Base):
    """Keeps several momenta in one entry of its state."""

    def update(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        momenta = self.state[p].setdefault("momenta", [torch.zeros_like(p), torch.zeros_like(p)])
        return momenta[0].add_(p.grad)


class FlatState(Base):
    """Keeps its momentum as a vector, which no ordinary state dict of the parameter fits."""

    def update(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        momentum = self.state[p].setdefault("momentum", torch.zeros(p.numel()))
        return momentum.mul_(0.9).add_(p.grad.reshape(-1)).view_as(p)


class WeightDecayByNorm(Base):
    """Is element-wise without weight decay, which a schedule may bring."""

    def update(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad + p.norm() * group["weight_decay"] if group["weight_decay"] else p.grad


class MixesItsMatrices(Base):
    """Does what its groups say: two kinds of parameters."""

    def update(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad / p.grad.norm() if group["is_matrix"] else p.grad


class FollowsLoss(Base):
    """Its rate depends on the loss, of which every rank has its own."""

    def step(self, closure: Any = None) -> Any:
        self.loss = float(closure())
        return super().step()

    def update(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad * self.loss


class AroundClosure(Base):
    """Moves the weights to where the gradient is wanted."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(1.01)
        return super().step(closure)


class LookAhead(Optimizer):
    """Around another optimizer, with whose groups it works."""

    def __init__(self, inner: Optimizer) -> None:
        self.optimizer, self.defaults = inner, inner.defaults
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def two_groups(own: list[nn.Parameter]) -> Optimizer:
    options = [{"params": own[:1], "is_matrix": False}, {"params": own[1:], "is_matrix": True}]
    return MixesItsMatrices(options)


_REFUSED: dict[str, tuple[Callable[[list[nn.Parameter]], Optimizer], str]] = {
    "block quantiser": (BlockQuantiser, r"mixes the elements of a tensor \('mul'\)"),
    "quantises by size": (QuantisesBySize, r"depends on other elements, on the loss or on chance"),
    "late mixer": (lambda p: LateMixer(p, k=40), r"mixes the elements of a tensor \('mean'\)"),
    "very late mixer": (lambda p: LateMixer(p, k=200), r"'mean'"),
    "norm after warm-up": (NormAfterWarmup, r"mixes the elements of a tensor \('linalg_vec"),
    "channel projection": (ChannelProjection, r"mixes the elements of a tensor \('sum'\)"),
    "neighbours": (Neighbours, r"depends on other elements"),
    "d-adaptation": (Distance, r"'total' of its group 0 depends on which elements"),
    "counts parameters": (CountsParameters, r"depends on"),
    "random rate": (RandomRate, r"draws random numbers"),
    "first parameter": (
        FirstParameter,
        r"fails on a rank that has no elements of a group \(IndexError: list index",
    ),
    "momentum in a list": (Outside, r"keeps a tensor .* in its attribute 'momenta'"),
    "state of lists": (Listed, r"'momenta' in its state is a list of tensors"),
    "flat state": (
        FlatState,
        r"'momentum' in its state has shape \(20480,\) .* for a parameter of shape \(160, 128\)",
    ),
    "weight decay by norm": (lambda p: WeightDecayByNorm(p, weight_decay=0.0), r"mixes"),
    "only its second group": (two_groups, r"mixes the elements of a tensor"),
    "follows the loss": (FollowsLoss, r"depends on"),
    "around the closure": (AroundClosure, r"changes the parameters before it calls the closure"),
    "look-ahead": (
        lambda p: LookAhead(torch.optim.SGD(p, lr=0.1)),
        r"wraps another optimizer \(SGD, its attribute 'optimizer'\).*Pass the SGD itself",
    ),
}


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(5))]


@pytest.mark.parametrize(("make", "reason"), _REFUSED.values(), ids=list(_REFUSED))
def test_what_needs_whole_tensors_is_refused_with_its_reason(make: Any, reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        check_element_wise(make(parameters()))


# -- element-wise ones that are hard to try


class NeedsTraining(Base):
    """Steps after `train()` only, as schedule-free optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, train_mode=False)

    def train(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = True

    def begin(self, group: dict[str, Any]) -> None:
        if not group["train_mode"]:
            raise RuntimeError("call train() first")


class NeedsBackward(Base):
    """Raises in a step before any backward."""

    def update(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad

    def begin(self, group: dict[str, Any]) -> None:
        if any(p.grad is None for p in group["params"]):
            raise RuntimeError("no backward has run")


class NeedsClosure(Base):
    """Takes its loss from the closure."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        assert loss is not None
        return loss


class Rectified(Base):
    """Does not move in its first steps."""

    def update(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad if group["step"] > 5 else torch.zeros_like(p)


class InitialState(Base):
    """Its constructor makes the state that its step takes for granted."""

    def __init__(self, params: Any, *, initial: float) -> None:
        super().__init__(params, initial=initial)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] = torch.full_like(p, initial)

    def update(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad / self.state[p]["sum"].addcmul_(p.grad, p.grad).sqrt()


class ByGroup(Base):
    """Has an attribute with one entry per group."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr, weight_decay=0.0)
        self.base_rates = [group["lr"] for group in self.param_groups]

    def update(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        (index,) = (i for i, other in enumerate(self.param_groups) if other is group)
        return p.grad * self.base_rates[index]


class OwnEntry(Base):
    """Counts in an entry of its state that belongs to no parameter."""

    def begin(self, group: dict[str, Any]) -> None:
        self.state["k"] = self.state.get("k", 0) + 1

    def update(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad / self.state["k"]


class Unusual(Base):
    """A required argument that nothing keeps, a lock and a method of the module as attributes."""

    def __init__(self, params: Any, module: nn.Module, name: str) -> None:
        super().__init__(params)
        self.lock, self.module, self.forward, self.title = (
            threading.Lock(),
            module,
            module.forward,
            name,
        )


class Momentum(Base):
    """Has state in groups that ask for it."""

    def update(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        if not group["momentum"]:
            return p.grad
        return self.state[p].setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(p.grad)


def momentum_in_one_group(own: list[nn.Parameter]) -> Optimizer:
    return Momentum([{"params": own[:1], "momentum": 0.0}, {"params": own[1:], "momentum": 0.9}])


_ACCEPTED: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "needs train()": NeedsTraining,
    "needs a backward": NeedsBackward,
    "needs a closure": NeedsClosure,
    "rectified": Rectified,
    "initial state": lambda p: InitialState(p, initial=0.5),
    "by group": lambda p: ByGroup([{"params": p[:1]}, {"params": p[1:]}], lr=0.2),
    "unusual": lambda p: Unusual(p, nn.Linear(2, 2), "x"),
    "an entry of its own": OwnEntry,
    "no rate yet": lambda p: Base(p, lr=0.0),
    "rate as a tensor": lambda p: Base(p, lr=torch.tensor(1e-9)),  # type: ignore[arg-type]
    "momentum in one group": momentum_in_one_group,
}


@pytest.mark.parametrize("make", _ACCEPTED.values(), ids=list(_ACCEPTED))
def test_what_is_element_wise_is_accepted_and_left_as_it_was(make: Any) -> None:
    own = parameters()
    optimizer = make(own)
    before = [p.detach().clone() for p in own]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    attributes = {k: v for k, v in optimizer.__dict__.items() if k not in ("state", "param_groups")}
    state = {p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    torch.manual_seed(5)
    random.seed(5)
    drawn, chance = torch.get_rng_state(), random.getstate()

    check_element_wise(optimizer)

    assert torch.equal(torch.get_rng_state(), drawn)
    assert random.getstate() == chance
    assert all(torch.equal(p, old) and p.grad is None for p, old in zip(own, before, strict=True))
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == groups
    kept = {k: v for k, v in optimizer.__dict__.items() if k not in ("state", "param_groups")}
    assert kept == attributes
    assert optimizer.state.keys() == state.keys()
    for param, entries in state.items():
        assert all(torch.equal(optimizer.state[param][k], v) for k, v in entries.items())


def test_hooks_of_the_users_object_do_not_run_in_the_trial() -> None:
    optimizer = Base(parameters())
    calls: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.0)  # wraps `step`
    check_element_wise(optimizer)
    assert not calls
    assert scheduler.last_epoch == 0


def test_a_trial_that_fails_says_what_was_tried_and_what_happened() -> None:
    class Fails(Base):
        def update(self, p: Tensor, group: dict[str, Any]) -> Tensor:
            raise RuntimeError("needs the moon")

    message = (
        r"could not be tried on small tensors.*What was tried: a step of a copy of it, with its own"
        r" groups, after a backward \(with empty state on cpu: RuntimeError: needs the moon; with"
    )
    with pytest.raises(NotImplementedError, match=message):
        check_element_wise(Fails(parameters()))


def test_half_precision_is_tried_where_the_user_has_it() -> None:
    class RoundsByChance(Base):
        def update(self, p: Tensor, group: dict[str, Any]) -> Tensor:
            return p.grad + (torch.rand_like(p) if p.dtype == torch.bfloat16 else 0.0)

    check_element_wise(RoundsByChance(parameters()))
    with pytest.raises(NotImplementedError, match="'rand_like'"):
        check_element_wise(RoundsByChance([nn.Parameter(torch.randn(4).bfloat16())]))


# -- offloading


def test_state_per_element_is_that_of_the_group() -> None:
    optimizer = momentum_in_one_group(parameters())
    assert state_bytes_per_element(optimizer, torch.float32, 0) == 0
    assert state_bytes_per_element(optimizer, torch.float32, 1) == 4
    assert state_bytes_per_element(optimizer, torch.float64, 1) == 8
    assert state_bytes_per_element(InitialState(parameters(), initial=0.5), torch.float32) == 4
    assert state_bytes_per_element(optimizer, torch.int64) == 0


def test_what_a_first_step_adds_to_a_group_counts_once_for_all_parts() -> None:
    check_steps_in_parts(Rectified(parameters()))  # its groups have no `step` before


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (NeedsClosure, "without a closure, it raised TypeError"),
        (_ACCEPTED["by group"], "keeps something of a step neither in its groups|raised"),
    ],
)
def test_what_can_not_be_stepped_in_parts_is_not_offloaded(make: Any, reason: str) -> None:
    class OtherGroups(ByGroup):
        def update(self, p: Tensor, group: dict[str, Any]) -> Tensor:
            return p.grad * self.base_rates[len(self.param_groups) - 1]

    optimizer = make(parameters())
    if isinstance(optimizer, ByGroup):
        optimizer = OtherGroups(
            [{"params": [p], "lr": i + 1.0} for i, p in enumerate(parameters())], 1
        )
    with pytest.raises(NotImplementedError, match=reason):
        check_steps_in_parts(optimizer)
