"""Modules that reach around their own calls, recomputed and under saved-tensor hooks of others.

What they compute with under stage 3 is what DDP computes with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.support.models import SGD, Regression, mlp
from tests.support.runs import Case, check_parity

# -- modules


class Attention(nn.Module):
    """Uses the weights of its projection without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(7, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1) * torch.ones(3, 1)
        return self.inner(x, x, x, need_weights=False)[0].sum(1)


class UsesChild(nn.Module):
    """Reads the parameters of its children, which it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.conv = nn.Conv1d(1, 1, 3)
        self.conv.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x, (7,), self.norm.weight, self.norm.bias)
        return F.conv1d(x.unsqueeze(1), self.conv.weight, self.conv.bias, padding=1).squeeze(1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(7, 7, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.unsqueeze(1))[0].squeeze(1)  # type: ignore[no-any-return]


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(7, 7))
        self.second = parametrizations.weight_norm(nn.Conv1d(1, 1, 3, padding=1))
        self.third = parametrizations.orthogonal(nn.Linear(7, 7))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x).unsqueeze(1)).squeeze(1))  # type: ignore[no-any-return]


class OldWeightNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.utils.weight_norm(nn.Linear(7, 7))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


class Tied(nn.Module):
    """One weight in three modules, frozen in none; products keep the parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(7), nn.LayerNorm(7)
        self.second.weight = self.first.weight
        self.scale = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * self.scale  # type: ignore[no-any-return]


class Adapter(nn.Module):
    """Adapted as PEFT does it: a frozen base in a module with pairs in dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(7, 7).requires_grad_(False)
        self.norm = nn.LayerNorm(7).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(7, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 7, bias=False)})
        self.magnitude = nn.ParameterDict({"default": nn.Parameter(torch.rand(7) + 0.5)})

    def forward(self, x: Tensor) -> Tensor:
        y = self.base_layer(self.norm(x))
        low = self.lora_B["default"](self.lora_A["default"](x))
        merged = (
            self.base_layer.weight + self.lora_B["default"].weight @ self.lora_A["default"].weight
        )
        norm = merged.norm(dim=1).detach()
        return (y + low) * (self.magnitude["default"] / norm)  # type: ignore[no-any-return]


class OwnScale(nn.Module):
    """Installs hooks inside of its own call and uses its own parameters there."""

    def __init__(self, context: Callable[[], Any], frozen: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(7) + 0.5, requires_grad=not frozen)
        self.context = context

    def forward(self, x: Tensor) -> Tensor:
        with self.context():
            return torch.tanh(x * self.scale) * self.scale


class RecomputesItself(nn.Module):
    """Recomputes a function of its own that uses its parameters, as vision transformers do."""

    def __init__(self, use_reentrant: bool, frozen: bool) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(7), nn.Linear(7, 7)
        self.gamma = nn.Parameter(torch.rand(7) + 0.5, requires_grad=not frozen)
        self.use_reentrant = use_reentrant

    def part(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(self.norm(x)) * self.gamma) * self.gamma

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.part, x, use_reentrant=self.use_reentrant)


class CalledTwice(nn.Module):
    """Uses a weight twice in each of two calls, which autograd adds in the order of its uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Tied()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(x)))  # type: ignore[no-any-return]


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "attention": Attention,
    "uses_child": UsesChild,
    "recurrent": Recurrent,
    "parametrized": Parametrized,
    "old_weight_norm": OldWeightNorm,
    "tied": Tied,
    "called_twice": CalledTwice,
    "adapter": Adapter,
    "encoder": partial(nn.TransformerEncoderLayer, 7, 1, 9, 0.0, batch_first=True),
}

# -- what is around them


def identity_hooks() -> Any:
    return saved_tensors_hooks(lambda t: t, lambda t: t)


@contextmanager
def nested_hooks() -> Iterator[None]:
    with save_on_cpu(), identity_hooks():
        yield


class Around(nn.Module):
    """A block between two layers, called in a context or recomputed."""

    def __init__(self, block: Callable[[], nn.Module], way: str) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(7, 7), block()
        # larger than what is before them, so that the window has no place for the block
        self.rest = mlp(7, 23, 23, 23, 5)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.way in ("reentrant", "recomputed"):
            x = checkpoint(self.block, x, use_reentrant=self.way == "reentrant")
        elif self.way == "recomputed_in_hooks":
            with save_on_cpu():
                x = checkpoint(self.block, x, use_reentrant=False)
        else:
            context: Any = {
                "plain": nullcontext,
                "identity": identity_hooks,
                "nested": nested_hooks,
                "on_cpu": save_on_cpu,
            }[self.way]
            with context():
                x = self.block(x)
        return self.rest(x)


class Hooked(Regression):
    """A whole step inside of hooks, entered where no module call is under way."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with identity_hooks():
            return self.loss(batch)


class Opens(nn.Linear):
    """Installs hooks in its call that stay when it has ended."""

    def __init__(self) -> None:
        super().__init__(7, 7)
        self.num_packed = 0
        self.hooks: Any = None

    def forward(self, x: Tensor) -> Tensor:
        def pack(tensor: Tensor) -> Tensor:
            self.num_packed += 1
            return tensor

        self.hooks = saved_tensors_hooks(pack, lambda tensor: tensor)
        self.hooks.__enter__()
        return super().forward(x)


class Closes(nn.LayerNorm):
    """Takes away the hooks that another module has installed."""

    def __init__(self, opener: Opens) -> None:
        super().__init__(7)
        self.opener = [opener]

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.opener[0].hooks.__exit__()
        return x


class Spanning(Regression):
    """Counts what hooks see that are there from inside of one call to inside of another."""

    def __init__(self) -> None:
        opener = Opens()
        super().__init__(lambda: nn.Sequential(opener, mlp(7, 7, 7), Closes(opener), mlp()), SGD)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.note("packed", self.net[0].num_packed)
        return loss


WAYS = ("identity", "nested", "reentrant", "recomputed", "recomputed_in_hooks")


def _case(block: Callable[[], nn.Module], way: str) -> Case:
    return Case(partial(Regression, partial(Around, block, way), SGD))


CASES = {
    **{f"{name}-identity": _case(block, "identity") for name, block in BLOCKS.items()},
    **{f"{name}-recomputed": _case(block, "recomputed") for name, block in BLOCKS.items()},
    **{f"uses_child-{way}": _case(UsesChild, way) for way in WAYS},
    "adapter-nested": _case(Adapter, "nested"),
    "adapter-reentrant": _case(Adapter, "reentrant"),
    "uses_child-step": Case(partial(Hooked, partial(Around, UsesChild, "plain"), SGD)),
    **{
        f"recomputes_itself-{use_reentrant}": _case(
            partial(RecomputesItself, use_reentrant, use_reentrant), "plain"
        )
        for use_reentrant in (True, False)
    },
    "own_scale": _case(partial(OwnScale, identity_hooks, False), "plain"),
    "own_scale_frozen": _case(partial(OwnScale, save_on_cpu, True), "plain"),
    "own_scale_recomputed": _case(partial(OwnScale, identity_hooks, True), "recomputed"),
    "spanning": Case(Spanning),
}


@pytest.mark.parametrize("name", CASES)
def test_modules_that_reach_around_their_calls_train_as_under_ddp(name: str) -> None:
    check_parity(CASES[name], "zero3")
