"""fp16 loss scaling: gradients are the true ones wherever they are seen, clipped or used."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.distributed.test_loss_scaling import (
    MOMENTUM,
    Faults,
    Faulty,
    Step,
    assert_unchanged,
    batch,
    compared,
    fit,
    last_rank,
    lightnings,
    scaled,
)
from tests.support import models
from tests.support.compare import assert_same
from tests.support.distributed import distributed, run_on_ranks
from tests.support.models import ADAM, SGD, OptimizerFactory, Recording, mlp
from tests.support.runs import DDP, STAGES, StrategyLike, fine_strategy, full_state

FUSED: OptimizerFactory = partial(torch.optim.AdamW, lr=1e-2, fused=True)


def gradients_by_hand(net: nn.Module, index: int, scale: float, is_half: bool) -> list[Tensor]:
    """The average over the ranks, without sharding and scaler: divided in the dtype in which it
    was computed, by what does not round, and added up in fp32.
    """
    world_size = models.world_size()
    share = 2 ** math.ceil(math.log2(world_size))
    net = copy.deepcopy(net)
    if is_half:
        net.half()
    by_rank = []
    for rank in range(world_size):
        x, y, _ = batch(rank, index)
        with torch.autocast("cpu", torch.float16, cache_enabled=False):
            loss = F.mse_loss(net(x).float(), y)
        by_rank.append(torch.autograd.grad(loss * scale, list(net.parameters())))
    sums = [sum((g / share).float() for g in grads) for grads in zip(*by_rank, strict=True)]
    return [total * (share / world_size) / scale for total in sums]


def net_before(steps: list[Step], index: int, module: nn.Module, prefix: str = "net.") -> nn.Module:
    """A part of the module with the weights that it had before a step."""
    net = copy.deepcopy(module.get_submodule(prefix.removesuffix(".")))
    if index > 0:
        load_part(net, steps[index - 1], prefix)
    return net


def load_part(net: nn.Module, step: Step, prefix: str) -> None:
    weights = step.weights.items()
    net.load_state_dict({k.removeprefix(prefix): v for k, v in weights if k.startswith(prefix)})


def step_by_hand(
    net: nn.Module, gradients: Iterable[Tensor], optimizer: OptimizerFactory, prefix: str = "net."
) -> dict[str, Tensor]:
    for param, gradient in zip(net.parameters(), gradients, strict=True):
        param.grad = gradient
    optimizer(net.parameters()).step()
    return {prefix + name: value for name, value in net.state_dict().items()}


def part(step: Step, prefix: str = "net.") -> dict[str, Tensor]:
    return {name: value for name, value in step.weights.items() if name.startswith(prefix)}


def norm_of(gradients: Iterable[Tensor]) -> float:
    return torch.cat([g.flatten() for g in gradients]).double().norm().item()


# -- seen and clipped


class Looks(Faulty):
    """Keeps the gradients that hooks see."""

    def on_after_backward(self) -> None:
        self.note("after_backward", self._gradients())

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.note("before_step", self._gradients())

    def _gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.detach().clone() for name, p in self.named_parameters()}  # type: ignore[union-attr]

    def seen(self, hook: str, index: int) -> list[Tensor]:
        """The gradients of `net` that a hook saw in a step."""
        gradients = self.notes[hook][index].items()
        return [value for name, value in gradients if name.startswith("net.")]


def run_and_look(
    strategy: StrategyLike, is_half: bool, optimizer: OptimizerFactory, **options: Any
) -> tuple[list[Step], Looks, Looks]:
    """Four steps, the second of which overflows; with the module afterwards and before."""
    torch.manual_seed(3)
    module = Looks(last_rank(1), optimizer)
    initial = copy.deepcopy(module)
    plugin = scaled(model_dtype=None if is_half else "fp32", loss_scale_window=1)
    steps, _ = fit(strategy, plugin, lambda: module, range(4), **options)
    assert [s.scale / 2**10 for s in steps] == [2, 1, 2, 4]
    assert_unchanged(steps[1], steps[0])
    return steps, module, initial


# (index, scale of the loss) of the steps that are not skipped
GOOD_STEPS = ((0, 2**10), (2, 2**10), (3, 2**11))


def check_that_hooks_see_true_gradients(strategy: StrategyLike, is_half: bool) -> None:
    steps, module, initial = run_and_look(strategy, is_half, SGD)
    # on three ranks the order in which is added makes a difference
    exact = models.world_size() == 2
    for index, scale in GOOD_STEPS:
        net = net_before(steps, index, initial)
        want = gradients_by_hand(net, index, scale, is_half)
        for hook in ("after_backward", "before_step"):
            assert_same(module.seen(hook, index), want, exact=exact, label=f"{hook}, {index}")
        after = step_by_hand(net, want, SGD)
        assert_same(part(steps[index]), after, exact=exact, label=f"weights, {index}")


@pytest.mark.parametrize("is_half", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_hooks_see_and_optimizers_use_true_gradients(stage: str, is_half: bool) -> None:
    run_on_ranks(check_that_hooks_see_true_gradients, 2, stage, is_half)
    run_on_ranks(check_that_hooks_see_true_gradients, 3, partial(fine_strategy, stage), is_half)


@pytest.mark.parametrize("window", [1, 3])
@distributed()
def test_hooks_see_what_they_see_under_ddp_but_unscaled(window: int) -> None:
    """Inf in one element and in one micro-batch, too; and looking at them changes nothing."""

    def look(strategy: StrategyLike, plugin: Any) -> tuple[list[Step], dict[str, list[Any]]]:
        module = Looks(last_rank(window), MOMENTUM)
        torch.manual_seed(3)
        module.load_state_dict(full_state(Looks()))
        steps, _ = fit(
            strategy, plugin, lambda: module, range(3 * window), accumulate_grad_batches=window
        )
        return steps, module.notes

    want_steps, want = look(DDP, lightnings())
    scales = [2**10, *(step.scale for step in want_steps)]
    # DDP unscales between the two hooks
    want["after_backward"] = [
        {name: value / scale for name, value in gradients.items()}
        for gradients, scale in zip(want["after_backward"], scales, strict=False)
    ]
    for stage in STAGES if window == 1 else ("zero1",):
        for strategy in (stage, partial(fine_strategy, stage)):
            steps, got = look(strategy, scaled(model_dtype="fp32"))
            assert_same(got, want, exact=True, label=f"gradients, {strategy}")
            assert_same(compared(steps), compared(want_steps), exact=True, label=f"{strategy}")


@pytest.mark.parametrize("is_half", [False, True])
@pytest.mark.parametrize("stage", STAGES)
@distributed()
def test_values_are_clipped_when_unscaled(stage: str, is_half: bool) -> None:
    options = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}
    steps, _, initial = run_and_look(stage, is_half, SGD, **options)
    for index, scale in GOOD_STEPS:
        net = net_before(steps, index, initial)
        true = gradients_by_hand(net, index, scale, is_half)
        clipped = [g.clamp(-0.02, 0.02) for g in true]
        assert 0.2 < norm_of(clipped) / norm_of(true) < 0.9  # some are clipped, some are not
        after = step_by_hand(net, clipped, SGD)
        assert_same(part(steps[index]), after, exact=True, label=f"weights, {index}")


@pytest.mark.parametrize("limit", [0.1, 100.0])
@pytest.mark.parametrize("stage", STAGES)
@distributed()
def test_the_norm_is_clipped_when_unscaled(stage: str, limit: float) -> None:
    for optimizer in (SGD, FUSED):
        steps, module, initial = run_and_look(stage, False, optimizer, gradient_clip_val=limit)
        # the fused optimizer has a state from its second step on
        for index, scale in GOOD_STEPS[: 1 if optimizer is FUSED else 3]:
            net = net_before(steps, index, initial)
            true = gradients_by_hand(net, index, scale, is_half=False)
            assert_same(module.seen("before_step", index), true, exact=True, label="gradients")
            norm = norm_of(true)
            assert steps[index].norm == pytest.approx(norm, rel=1e-6)
            assert 0.1 < norm < 100.0  # the one limit clips, the other does not
            clipped = [g * min(1.0, limit / norm) for g in true]
            after = step_by_hand(net, clipped, optimizer)
            assert_same(part(steps[index]), after, exact=False, label=f"weights, {index}")


@pytest.mark.parametrize("stage", STAGES)
@distributed()
def test_a_fused_optimizer_skips_and_clips(stage: str) -> None:
    options = {"gradient_clip_val": 0.1}
    got, _ = fit(stage, scaled(), partial(Faulty, last_rank(2), FUSED), range(5), **options)
    want, _ = fit(stage, scaled(8), partial(Faulty, {}, FUSED), [0, 1, 3, 4], **options)
    assert [s.scale / 2**10 for s in got] == [1, 1, 0.5, 0.5, 0.5]
    assert_unchanged(got[2], got[1])
    assert_unchanged(got[4], want[3])


# -- manual optimization


class ClipsByHand(Faulty):
    """Reads and clips `p.grad` right after the backward, with torch's own function."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.note("norm", nn.utils.clip_grad_norm_(self.parameters(), 0.1))
        optimizer.step()


@pytest.mark.parametrize("stage", STAGES)
@distributed()
def test_gradients_may_be_clipped_by_hand(stage: str) -> None:
    module = ClipsByHand(last_rank(1), SGD)
    initial = copy.deepcopy(module)
    steps, _ = fit(stage, scaled(), lambda: module, range(3))
    assert_unchanged(steps[1], steps[0])
    for index, scale in ((0, 2**10), (2, 2**9)):
        net = net_before(steps, index, initial)
        true = gradients_by_hand(net, index, scale, is_half=True)
        assert module.notes["norm"][index].item() == pytest.approx(norm_of(true), rel=1e-6)
        after = step_by_hand(net, [g * 0.1 / norm_of(true) for g in true], SGD)
        assert_same(part(steps[index]), after, exact=False, label=f"weights, {index}")


class TwoNets(Recording):
    """Two networks with an optimizer each; faults are put into the loss of one."""

    def __init__(self, optimizer: OptimizerFactory, order: str, faulty: str, faults: Faults):
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b = mlp(7, 13, 5), mlp(7, 11, 5)
        self.make_optimizer, self.order = optimizer, order
        self.faulty, self.faults = faulty, faults

    def loss(self, name: str, batch: Any) -> Tensor:
        x, y, index = batch
        loss = F.mse_loss(self.get_submodule(name)(x).float(), y)
        fault = self.faults.get((models.rank(), index))
        return loss if fault is None or name != self.faulty else loss * fault

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = dict(zip("ab", self.optimizers(), strict=True))
        for name, optimizer in optimizers.items():
            optimizer.zero_grad()
            self.manual_backward(self.loss(name, batch))
            if self.order == "one after the other":
                optimizer.step()
        if self.order == "all backwards first":
            for optimizer in optimizers.values():
                optimizer.step()

    def configure_optimizers(self) -> Any:
        return [self.make_optimizer(net.parameters()) for net in (self.a, self.b)]


@pytest.mark.parametrize("order", ["one after the other", "all backwards first"])
@pytest.mark.parametrize("stage", STAGES)
@distributed()
def test_one_of_two_optimizers_is_skipped(stage: str, order: str) -> None:
    make = partial(TwoNets, ADAM, order)
    undisturbed, _ = fit(stage, scaled(), partial(make, "a", {}), range(4))
    without, _ = fit(stage, scaled(), partial(make, "a", {}), [0, 2, 3])
    for position, (faulty, other) in enumerate(("ab", "ba")):
        got, _ = fit(stage, scaled(), partial(make, faulty, last_rank(1)), range(4))
        assert [s.scale / 2**10 for s in got] == [1, 0.5, 0.5, 0.5]
        # only the last optimizer's step is seen at the end of the batch
        assert [s.has_overflow for s in got] == [False, faulty == "b", False, False]
        for prefix, step, want in (
            (f"{faulty}.", got[1], got[0]),
            (f"{faulty}.", got[3], without[2]),
            (f"{other}.", got[3], undisturbed[3]),
        ):
            label = f"{prefix} with faults in {faulty}"
            assert_same(part(step, prefix), part(want, prefix), exact=True, label=label)
        state, before = (got[i].optimizers[position] for i in (1, 0))
        assert_same(state, before, exact=True, label="optimizer state")


@pytest.mark.parametrize("is_half", [False, True])
@pytest.mark.parametrize("stage", STAGES)
@distributed()
def test_the_scale_changes_between_the_backward_and_the_step(stage: str, is_half: bool) -> None:
    """The first step changes the scale; the second uses gradients that were scaled before."""
    for faulty, factors in (("a", [4, 4, 16]), ("b", [4, 4, 16]), ("neither", [4, 16, 64])):
        torch.manual_seed(3)
        module = TwoNets(SGD, "all backwards first", faulty, last_rank(1))
        initial = copy.deepcopy(module)
        plugin = scaled(6, loss_scale_window=1, model_dtype=None if is_half else "fp32")
        steps, _ = fit(stage, plugin, lambda module=module: module, range(3))
        scales = [2.0**6, *(step.scale for step in steps)]
        assert scales[1:] == [2.0**6 * factor for factor in factors]
        for index, step in enumerate(steps):
            for name in "ab":
                net = net_before(steps, index, initial, f"{name}.")
                want = part(steps[0], f"{name}.")
                if (name, index) != (faulty, 1):
                    gradients = gradients_by_hand(net, index, scales[index], is_half)
                    want = step_by_hand(net, gradients, SGD, f"{name}.")
                label = f"{name} after batch {index} with faults in {faulty}"
                assert_same(part(step, f"{name}."), want, exact=True, label=label)
