"""Parameters of any shape, type and owner, used wherever Python lets a module use them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.models import (
    ADAM,
    SGD,
    Language,
    Regression,
    mlp,
    regression_loader,
    token_loader,
)
from tests.support.runs import DDP_UNUSED, STAGES, Case, check_parity


class TiedLanguageModel(nn.Module):
    """A first layer that is not tied, then an embedding that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.embedding = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(self.embedding(tokens))))


class Block(nn.Module):
    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.up = nn.Linear(width, 13)
        self.down = nn.Linear(13, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Module):
    """Repeated blocks with a head, so that more than one unit is found."""

    def __init__(self, count: int = 3, width: int = 7) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tied_within_a_block() -> nn.Module:
    net = Blocks()
    for block in net.blocks:
        block.gate = nn.Linear(7, 13)
        block.gate.weight = block.up.weight
        block.forward = partial(_gated, block)
    return net


def _gated(block: Any, x: Tensor) -> Tensor:
    return x + block.down(torch.tanh(block.up(x)) * torch.sigmoid(block.gate(x)))


def tied_across_blocks() -> nn.Module:
    net = Blocks()
    net.blocks[2].up.weight = net.blocks[0].up.weight
    net.blocks[1].down.bias = net.blocks[0].down.bias
    return net


def the_same_block_twice() -> nn.Module:
    net = Blocks(2)
    net.blocks.append(net.blocks[0])
    return net


class HostileShapes(nn.Module):
    """Scalar, empty, single, prime and smaller-than-the-world parameters, owned by the parent."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.single = nn.Parameter(torch.ones(1))
        self.prime = nn.Parameter(torch.randn(17))
        self.broad = nn.Parameter(torch.randn(1, 1, 7))
        self.listed = nn.ParameterList([torch.randn(n) for n in (1, 2, 3)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(2, 3, 1))})
        self.out = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scalar + self.single + self.broad[0] + self.empty.sum()
        x = x + self.prime[:7] * self.prime[7:14] + self.prime[14:].sum()
        for weight in self.listed:
            x = x + weight.mean()
        return self.out(x) + self.named["a"].sum()


class MixedDtypes(nn.Module):
    """float32, a bfloat16 layer, a float64 head, and a frozen int8 parameter.

    torch's bfloat16 kernels round once in a vector and twice in what is left of a tensor after the
    last whole vector, so that SGD depends on where a tensor ends: here nothing is left over.
    """

    def __init__(self, middle: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.first = nn.Linear(7, 16)
        self.middle = nn.Linear(16, 16, bias=False, dtype=middle)
        self.mask = nn.Parameter(torch.ones(16, dtype=torch.int8), requires_grad=False)
        self.head = nn.Linear(16, 5, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.first(x).to(self.middle.weight.dtype))
        return self.head(x.double() * self.mask)


class ComplexWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.out = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=7))


class StridedWeights(nn.Module):
    """A parameter that is not contiguous in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 13).t())
        self.out = nn.Linear(13, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.linear(x, self.weight))


class UsesAnothersWeight(nn.Module):
    """The parent computes with its children's parameters itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        x = F.linear(x, first.up.weight) + first.up.bias
        x = F.linear(x, second.up.weight.t())
        return self.out(second(first(x)))


class FunctionalCall(nn.Module):
    """Calls a child with changed parameters, as meta-learning does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        params = {name: p * 1.5 for name, p in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, params, (x,))


class HasUnused(nn.Module):
    """A layer that no rank ever uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used = Blocks()
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Penalised(Regression):
    """Adds penalties on the weights, which are read outside any forward."""

    def __init__(self, kind: str) -> None:
        super().__init__(Blocks, SGD)
        self.kind = kind

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.01 * self._penalty()

    def _penalty(self) -> Tensor:
        if self.kind == "squares":
            return torch.stack([(p**2).sum() for p in self.parameters()]).sum()
        if self.kind == "absolute_of_one":
            return self.net.blocks[1].up.weight.abs().sum()
        if self.kind == "flattened":
            return torch.cat([p.view(-1) for p in self.net.blocks.parameters()]).norm()
        return torch.nn.utils.parameters_to_vector(self.net.parameters()).pow(2).mean()


class PenaltyFirst(Penalised):
    """Reads the weights before the forward."""

    def loss(self, batch: Any) -> Tensor:
        penalty = self._penalty()
        return Regression.loss(self, batch) + 0.01 * penalty


class GradientPenalty(Regression):
    """Differentiates through a gradient with respect to the input (double backward)."""

    def __init__(self, net: Any = Blocks) -> None:
        super().__init__(net, SGD)

    def loss(self, batch: Any) -> Tensor:
        if not self.training:
            return super().loss(batch)
        x = batch[0].clone().requires_grad_()
        out = self.net(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, batch[1]) + 0.1 * slope.norm(dim=1).sub(1).pow(2).mean()


class GradientOfWeights(Regression):
    """Asks for gradients of parameters by `torch.autograd.grad`, which calls no hooks."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        grads = torch.autograd.grad(loss, list(self.net.parameters()), create_graph=True)
        return loss + 0.01 * torch.stack([g.pow(2).sum() for g in grads]).sum()


class Square(torch.autograd.Function):
    """Gets a weight as an argument, and saves it for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ (weight * weight).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ (weight * weight), grad.t() @ x * 2 * weight


class CustomFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + Square.apply(Square.apply(x, block.up.weight), block.down.weight)
        return self.out(torch.tanh(x))


class Quantised(nn.Linear):
    """Straight-through rounding of the weight, as in quantisation-aware training."""

    def forward(self, x: Tensor) -> Tensor:
        rounded = (self.weight.detach() * 16).round() / 16
        weight = self.weight + (rounded - self.weight).detach()
        scale = self.weight.data.abs().max()
        return F.linear(x, weight, self.bias) * scale


def quantised() -> nn.Module:
    return nn.Sequential(Quantised(7, 13), nn.Tanh(), Quantised(13, 9), nn.Tanh(), Quantised(9, 5))


class Clamped(nn.Linear):
    """Changes its weight in place before it uses it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.25, 0.25)
        return super().forward(x)


def clamped() -> nn.Module:
    return nn.Sequential(Clamped(7, 13), nn.Tanh(), Clamped(13, 13), nn.Tanh(), Clamped(13, 5))


class RootParameters(Regression):
    """The LightningModule itself owns parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.log_sigma = nn.Parameter(torch.zeros(()))

    def loss(self, batch: Any) -> Tensor:
        error = F.mse_loss(self.net(batch[0]) * self.scale, batch[1])
        return error * torch.exp(-self.log_sigma) + self.log_sigma


def _regression(net: Any, optimizer: Any = ADAM, **more: Any) -> Case:
    return Case(partial(Regression, net, optimizer), **more)


CASES = {
    "blocks": _regression(Blocks),
    "tied_language_model": Case(partial(Language, TiedLanguageModel), token_loader),
    "tied_language_model_accumulated": Case(
        partial(Language, TiedLanguageModel),
        partial(token_loader, 6),
        trainer={"accumulate_grad_batches": 3},
    ),
    "tied_within_a_block": _regression(tied_within_a_block),
    "tied_across_blocks": _regression(tied_across_blocks),
    "the_same_block_twice": _regression(the_same_block_twice),
    "hostile_shapes": _regression(HostileShapes),
    "hostile_shapes_sgd": _regression(HostileShapes, SGD),
    "mixed_dtypes": _regression(MixedDtypes),
    "mixed_dtypes_sgd": _regression(MixedDtypes, SGD),
    "complex": _regression(ComplexWeights),
    "strided": _regression(StridedWeights),
    "uses_anothers_weight": _regression(UsesAnothersWeight),
    "functional_call": _regression(FunctionalCall),
    "unused_everywhere": _regression(HasUnused, reference=DDP_UNUSED),
    "unused_everywhere_accumulated": _regression(
        HasUnused,
        data=partial(regression_loader, 6),
        reference=DDP_UNUSED,
        trainer={"accumulate_grad_batches": 3},
    ),
    "penalty_squares": Case(partial(Penalised, "squares")),
    "penalty_of_one": Case(partial(Penalised, "absolute_of_one")),
    "penalty_flattened": Case(partial(Penalised, "flattened")),
    "penalty_vector": Case(partial(Penalised, "vector")),
    "penalty_before_forward": Case(partial(PenaltyFirst, "squares")),
    "gradient_penalty": Case(GradientPenalty),
    "gradient_penalty_mlp": Case(partial(GradientPenalty, mlp)),
    "gradient_of_weights": Case(GradientOfWeights),
    "custom_function": _regression(CustomFunction),
    "quantised": _regression(quantised),
    "clamped": _regression(clamped),
    "root_parameters": Case(RootParameters),
}
# On three ranks sums are only equal to rounding, which a bfloat16 layer would turn into a lot.
CASES["two_float_dtypes"] = _regression(partial(MixedDtypes, torch.float64))
ON_THREE_RANKS = [
    "blocks",
    "tied_language_model",
    "tied_across_blocks",
    "hostile_shapes",
    "two_float_dtypes",
    "uses_anothers_weight",
    "unused_everywhere",
    "penalty_squares",
]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CASES)
def test_any_parameter_trains_as_under_ddp(name: str, stage: str) -> None:
    check_parity(CASES[name], stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ON_THREE_RANKS)
def test_any_parameter_trains_as_under_ddp_on_three_ranks(name: str, stage: str) -> None:
    check_parity(CASES[name], stage, world_size=3)
