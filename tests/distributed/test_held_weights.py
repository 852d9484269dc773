"""Whoever holds gathered weights, or looks through module calls, finds what DDP would show there:
recomputed blocks, other people's saved-tensor hooks, views, state dicts, ``torch.func``, tracing.
"""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

import lightning_zero
from tests.support.models import SGD, Regression
from tests.support.runs import STAGES, Case, check_parity, whole

# -- recomputed blocks


class Adapted(nn.Module):
    """A frozen layer and a trained low-rank pair, as adapters have them; in either order."""

    def __init__(self, frozen_first: bool) -> None:
        super().__init__()
        self.base = nn.Linear(7, 7).requires_grad_(False)
        self.down, self.up = nn.Linear(7, 2, bias=False), nn.Linear(2, 7, bias=False)
        self.frozen_first = frozen_first

    def forward(self, x: Tensor) -> Tensor:
        if self.frozen_first:
            return torch.tanh(self.base(x) + self.up(self.down(x)))
        return torch.tanh(self.up(self.down(x)) + self.base(x))


def _layer(draw: random.Random, depth: int) -> nn.Module:
    kinds: list[Callable[[], nn.Module]] = [
        partial(Adapted, True),
        partial(Adapted, False),
        partial(nn.Linear, 7, 7),
        partial(nn.LayerNorm, 7),
        nn.Tanh,
    ]
    if depth < 2:
        kinds += [partial(Recomputed, draw.randrange(10**6), depth + 1)] * 2
    layer = draw.choice(kinds)()
    if draw.random() < 0.4:
        layer.requires_grad_(False)
    return layer


class Recomputed(nn.Module):
    """A few layers, trained and frozen in any order, some nested, each recomputed or not."""

    def __init__(self, seed: int, depth: int = 0) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.layers = nn.ModuleList(_layer(draw, depth) for _ in range(draw.randint(2, 4)))
        self.modes = [draw.choice([None, True, False, False]) for _ in self.layers]
        self.is_outermost = depth == 0
        if self.is_outermost:
            self.out = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_outermost:  # as `enable_input_require_grads` does it
            x = x.clone().requires_grad_()
        for layer, mode in zip(self.layers, self.modes, strict=True):
            x = layer(x) if mode is None else checkpoint(layer, x, use_reentrant=mode)
        return self.out(x) if self.is_outermost else x


def _adapted(frozen_first: bool, use_reentrant: bool) -> nn.Module:
    net = Recomputed(0)
    net.layers = nn.ModuleList(Adapted(frozen_first) for _ in range(3))
    net.modes = [use_reentrant] * 3
    return net


class Wrapped(nn.Module):
    """Calls layers of many kinds inside of a context."""

    def __init__(self, context: Callable[[], Any]) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 3, padding=1)
        self.norm = nn.LayerNorm(7)
        self.rnn = nn.GRU(7, 7, batch_first=True)
        self.frozen = nn.LayerNorm(7).requires_grad_(False)
        self.out = nn.Linear(7, 5)
        self.context = context

    def layers(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x.unsqueeze(1)))
        return self.out(torch.tanh(self.frozen(self.rnn(x)[0].mean(1))))

    def forward(self, x: Tensor) -> Tensor:
        with self.context():
            return self.layers(x)


def identity_hooks() -> Any:
    return saved_tensors_hooks(lambda t: t, lambda t: t)


def cloning_hooks() -> Any:
    return saved_tensors_hooks(lambda t: t.clone(), lambda t: t)


# -- views that others hold


class _Multiply(torch.autograd.Function):
    """Keeps a view of the weight on ``ctx``, as products with packed weights do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.transposed = weight.detach().t()
        ctx.save_for_backward(x)
        return x @ ctx.transposed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        return gradient @ ctx.transposed.t(), gradient.t() @ x


class KeepsViews(nn.Linear):
    """Hides views of its weight where nobody looks, and uses them after the call."""

    def forward(self, x: Tensor) -> Tensor:
        view = self.weight.detach()
        self.hidden = [self.weight.t()], lambda: view
        return _Multiply.apply(x, self.weight) + self.bias  # type: ignore[no-any-return]


class UsesHidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = KeepsViews(7, 7), KeepsViews(7, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
        (views, closure) = self.first.hidden
        return y + (views[0].sum() + closure().square().sum()) * 1e-3


class HoldsWhat(Regression):
    """Takes things out of `full_params` and looks at them when it has been left."""

    def on_train_batch_end(self, *_: Any) -> None:
        def walk() -> Iterator[Tensor]:
            for parameter in self.net.parameters():
                yield parameter.detach()

        error: BaseException | None = None
        with whole(self.net, self.trainer):
            state = self.net.state_dict()
            views = [p.data.t() for p in self.net.parameters()]
            arrays = [p.detach().numpy() for p in self.net.parameters()]
            walked = list(walk())
            try:
                self.net[0](torch.ones(2, 3))
            except RuntimeError as raised:
                error = raised
        self.net(torch.ones(2, 7))  # gathers other memory
        sums: list[Tensor] = []
        thread = threading.Thread(target=lambda: sums.extend(v.sum() for v in views))
        thread.start()
        thread.join()
        assert error is not None
        assert error.__traceback__ is not None
        for value in [*state.values(), *map(torch.as_tensor, arrays), *walked, *sums]:
            self.note("held", value)


class UsesThemInFullParams(Regression):
    """A graph over plain parameters whose backward comes when they are sharded again."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with whole(self.net, self.trainer):
            hidden = F.layer_norm(x, (7,), self.net[0].weight, self.net[0].bias)
        return F.mse_loss(self.net[1](hidden), y)


# -- transforms


def _plain(module: Regression) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.net.named_parameters()}


def _loss_of(module: Regression, params: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(functional_call(module.net, params, (x,)), y)


def input_gradient(module: Regression, x: Tensor, y: Tensor) -> Tensor:
    return grad(lambda z: module.net(z).square().sum())(x).square().mean()


def mapped(module: Regression, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(vmap(module.net)(x), y)


def jacobian(module: Regression, x: Tensor, y: Tensor) -> Tensor:
    return jacrev(module.net)(x[0]).square().mean()


def forward_mode(module: Regression, x: Tensor, y: Tensor) -> Tensor:
    return jvp(module.net, (x,), (torch.ones_like(x),))[1].square().mean()


def parameter_gradients(module: Regression, x: Tensor, y: Tensor) -> Tensor:
    found = grad(partial(_loss_of, module))(dict(module.net.named_parameters()), x, y)
    return torch.stack([g.square().sum() for g in found.values()]).sum()


def per_sample(module: Regression, x: Tensor, y: Tensor) -> Tensor:
    each = vmap(grad(partial(_loss_of, module)), in_dims=(None, 0, 0))(_plain(module), x, y)
    module.note("per sample", torch.stack([g.square().sum() for g in each.values()]))
    return x.new_zeros(())


def captured(module: Regression, x: Tensor, y: Tensor) -> Tensor:
    weight = module.net[0].weight
    return grad(lambda z: (z @ weight.t()).square().sum())(x).square().mean()


def all_inside_full_params(module: Regression, x: Tensor, y: Tensor) -> Tensor:
    with whole(module.net, module.trainer):
        first, second = input_gradient(module, x, y), parameter_gradients(module, x, y)
        per_sample(module, x, y)
        return first + second + mapped(module, x, y) + forward_mode(module, x, y)


def script_a_copy(module: Regression, x: Tensor, y: Tensor) -> Tensor:
    copied = copy.deepcopy(module.net)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in copied.modules())
    module.note("scripted", torch.jit.script(copied)(x))
    return x.new_zeros(())


def trace(module: Regression, x: Tensor, y: Tensor) -> Tensor:
    with whole(module.net, module.trainer):
        module.note("traced", torch.jit.trace(module.net, x)(x))
        module.note("exported", torch.export.export(module.net, (x,)).module()(x))
    return x.new_zeros(())


class Transforming(Regression):
    def __init__(self, term: Callable[[Regression, Tensor, Tensor], Tensor]) -> None:
        super().__init__(_mixed_net)
        self.term = term

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + self.term(self, *batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.enable_grad():
            self.note("validation", self.term(self, *batch))


def _mixed_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(7, 13), nn.LayerNorm(13), nn.Tanh(), nn.Linear(13, 5))


def _norm_net() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 5))


# -- writes that count no version up


class OwnFused(Regression):
    """Steps a fused optimizer that the strategy does not know."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.automatic_optimization = False

    def configure_optimizers(self) -> None:
        return None

    def on_fit_start(self) -> None:
        self.own = torch.optim.AdamW(self.net.parameters(), lr=1e-2, fused=self.fused)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.own.zero_grad()
        self.manual_backward(loss)
        self.own.step()
        return loss


def _regression(net: Callable[[], nn.Module]) -> Case:
    return Case(partial(Regression, net, SGD))


CASES = {
    "adapted_first": _regression(partial(_adapted, True, False)),
    "adapted_first_reentrant": _regression(partial(_adapted, True, True)),
    "adapted_last": _regression(partial(_adapted, False, False)),
    "adapted_last_reentrant": _regression(partial(_adapted, False, True)),
    **{f"recomputed_{seed}": _regression(partial(Recomputed, seed)) for seed in range(12)},
    "saves_on_cpu": _regression(partial(Wrapped, save_on_cpu)),
    "identity_hooks": _regression(partial(Wrapped, identity_hooks)),
    "cloning_hooks": _regression(partial(Wrapped, cloning_hooks)),
    "hidden_views": _regression(UsesHidden),
    "holds_what_full_params_gave": Case(HoldsWhat),
    "graph_of_full_params": Case(partial(UsesThemInFullParams, _norm_net)),
    **{
        f"transform_{term.__name__}": Case(partial(Transforming, term))
        for term in (
            input_gradient,
            mapped,
            jacobian,
            forward_mode,
            parameter_gradients,
            per_sample,
            captured,
            all_inside_full_params,
            script_a_copy,
            trace,
        )
    },
    "own_fused_optimizer": Case(partial(OwnFused, True)),
    "own_optimizer": Case(partial(OwnFused, False)),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CASES)
def test_what_others_hold_is_what_ddp_shows(name: str, stage: str) -> None:
    check_parity(CASES[name], stage)


class TransformsInForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        slope = grad(lambda z: super(TransformsInForward, self).forward(z).square().sum())(x)
        return super().forward(x) + slope.mean()


def _transforming_net() -> nn.Sequential:
    return nn.Sequential(TransformsInForward(7, 7), nn.Tanh(), nn.Linear(7, 5))


class InFullParams(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with whole(self.net, self.trainer):
            return self.loss(batch)


IN_FORWARD = {
    "in_full_params": Case(partial(InFullParams, _transforming_net)),
    "sharded": Case(
        partial(Regression, _transforming_net),
        stage_3_refusal=r"forward of TransformsInForward.*full_params",
    ),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", IN_FORWARD)
def test_transforms_in_a_forward_work_or_say_what_to_do(name: str, stage: str) -> None:
    check_parity(IN_FORWARD[name], stage)


class Records(Regression):
    def __init__(self, tool: str) -> None:
        super().__init__()
        self.tool = tool

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.tool == "trace":
            torch.jit.trace(self.net, batch[0])
        elif self.tool == "export":
            torch.export.export(self.net, (batch[0],))
        else:
            torch.jit.script(self.net)
        return self.loss(batch)


REFUSED = {
    "trace": Case(partial(Records, "trace"), stage_3_refusal=r"torch\.jit\.trace.*full_params"),
    "export": Case(partial(Records, "export"), stage_3_refusal=r"torch\.export.*full_params"),
}


@pytest.mark.parametrize("tool", REFUSED)
def test_what_records_sharded_weights_is_told_to_use_full_params(tool: str) -> None:
    check_parity(REFUSED[tool], "zero3")


@pytest.mark.parametrize("stage", STAGES)
def test_a_module_in_training_is_not_scripted_and_its_copy_is(stage: str) -> None:
    from tests.support.distributed import run_on_ranks

    for text in run_on_ranks(_script, 2, stage):
        assert "copy.deepcopy(module)" in text


def _script(stage: str) -> str:
    from tests.support.models import regression_loader
    from tests.support.runs import make_trainer

    class Scripts(pl.Callback):
        text = ""

        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            try:
                torch.jit.script(pl_module.net)
            except AttributeError as error:
                self.text = str(error)

    callback = Scripts()
    assert lightning_zero.__version__
    make_trainer(stage, callbacks=[callback]).fit(Regression(), regression_loader())
    return callback.text
