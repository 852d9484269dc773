"""Hooks of the user that look at gradients, or change them, during a backward: as under DDP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.distributed import run_on_ranks
from tests.support.models import ADAM, SGD, OptimizerFactory, Regression, mlp, regression_loader
from tests.support.runs import (
    DDP,
    DDP_UNUSED,
    STAGES,
    Case,
    ParityRun,
    check_parity,
    compare_stage,
    fine_strategy,
    parity_run,
    train,
)

Act = Callable[[Any, str, nn.Parameter], None]
THREE_LAYERS = partial(mlp, 7, 13, 11, 5)
SIX_BATCHES = partial(regression_loader, 6)
MOMENTUM: OptimizerFactory = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)


# -- what a hook does


def notes(module: Any, name: str, p: nn.Parameter) -> None:
    module.note(name, p.grad)
    module.note(f"{name}_dtype", (str(p.grad.dtype), tuple(p.grad.shape), str(p.dtype)))


def scales(module: Any, name: str, p: nn.Parameter) -> None:
    p.grad.mul_(0.5)


def squares(module: Any, name: str, p: nn.Parameter) -> None:
    p.grad = p.grad * p.grad.abs()


def clips(module: Any, name: str, p: nn.Parameter) -> None:
    torch.nn.utils.clip_grad_value_([p], 0.05)


def drops(module: Any, name: str, p: nn.Parameter) -> None:
    if len(module.notes.setdefault(f"drops_{name}", [])) % 3 == 1:
        p.grad = None
    module.note(f"drops_{name}", p.grad is None)


def drops_and_sets(module: Any, name: str, p: nn.Parameter) -> None:
    grad = p.grad.clone()
    p.grad = None
    assert p.grad is None
    p.grad = grad.sign() * 0.01


def decays(module: Any, name: str, p: nn.Parameter) -> None:
    p.grad.add_(p.data, alpha=0.1)


def guarded(module: Any, name: str, p: nn.Parameter) -> None:
    if p.grad is not None:
        p.grad.add_(0.01)


def averages(module: Any, name: str, p: nn.Parameter) -> None:
    dist.all_reduce(p.grad)


def zeroes(module: Any, name: str, p: nn.Parameter) -> None:
    p.grad.zero_()


class Hooked(Regression):
    """Every chosen parameter has the hooks, registered at the chosen time."""

    def __init__(
        self,
        acts: Sequence[Act],
        when: str = "init",
        *,
        optimizer: OptimizerFactory = SGD,
        every: int = 1,
    ) -> None:
        super().__init__(THREE_LAYERS, optimizer)
        self.acts, self.when, self.every = acts, when, every
        self.removable: list[Any] = []
        self.register("init")

    def register(self, now: str) -> None:
        if now != self.when:
            return
        for name, p in list(self.net.named_parameters())[:: self.every]:
            for act in self.acts:
                hook = partial(act, self, name)
                self.removable.append(p.register_post_accumulate_grad_hook(hook))

    def setup(self, stage: str) -> None:
        self.register("setup")

    def on_fit_start(self) -> None:
        self.register("fit_start")

    def on_train_start(self) -> None:
        self.register("train_start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.register("later")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.when == "removed" and batch_idx in (0, 4):
            self.when = "forward"
        self.register("forward")
        if batch_idx == 3 and self.when == "forward":
            for hook in self.removable:
                hook.remove()
            self.when = "removed"
        elif self.when == "forward":
            self.when = "done"
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, p in self.named_parameters():
            self.note(f"{name}_step", p.grad)


def hooked(*acts: Act, **more: Any) -> Case:
    return Case(partial(Hooked, acts, **more), SIX_BATCHES, reference=DDP)


def accumulated(case: Case, batches: int = 2) -> Case:
    # hooks see the sums of the window, so no stage adds in another order than DDP
    return replace(case, trainer={"accumulate_grad_batches": batches})


class Looks(Hooked):
    """Hooks of other kinds look at the gradients of all parameters, and change what they get."""

    def __init__(self, kind: str) -> None:
        super().__init__((), "init")
        self.kind = kind
        getattr(self, kind)()

    def look(self, *_: Any) -> None:
        for name, p in self.net[0].named_parameters():
            self.note(f"{self.kind}_{name}", p.grad)

    def tensor_hook(self) -> None:
        for p in self.net[0].parameters():
            p.register_hook(lambda grad: (self.look(), grad * 0.5)[1])

    def module_hook(self) -> None:
        self.net[2].register_full_backward_hook(self.look)
        self.net[2].register_full_backward_pre_hook(self.look)

    def multi_grad_hook(self) -> None:
        torch.autograd.graph.register_multi_grad_hook(
            list(self.net[2].parameters()), lambda grads: self.look()
        )

    def node_hook(self) -> None:
        self.nodes = [
            p.view_as(p).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            for p in self.net[0].parameters()
        ]
        for node in self.nodes:
            node.register_prehook(lambda grads: (self.look(), tuple(g * 0.5 for g in grads))[1])
            node.register_hook(self.look)


class GivesNone(torch.autograd.Function):
    """Uses a parameter, but has no gradient for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class NoGradient(Hooked):
    """A parameter whose node runs without a gradient."""

    def __init__(self) -> None:
        super().__init__((scales,), optimizer=MOMENTUM)
        self.offset = nn.Parameter(torch.ones(5))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(GivesNone.apply(self.net(x), self.offset), y)


class Tied(Hooked):
    """One layer twice: its gradient is summed before the hooks run."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        first, tanh, second = self.net[0], self.net[1], self.net[2]
        hidden = tanh(first(x))
        hidden = tanh(torch.nn.functional.linear(hidden, second.weight.T @ second.weight))
        return torch.nn.functional.mse_loss(self.net[4](second(hidden)), y)


class Checkpointed(Hooked):
    """The first layers are recomputed in the backward."""

    def __init__(self, acts: Sequence[Act], *, use_reentrant: bool) -> None:
        super().__init__(acts)
        self.use_reentrant = use_reentrant

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        hidden = checkpoint(self.net[:3], x.requires_grad_(), use_reentrant=self.use_reentrant)
        return torch.nn.functional.mse_loss(self.net[3:](hidden), y)


class Manual(Hooked):
    """Two backwards before a step, which the second adds to the average of the first."""

    def __init__(self, acts: Sequence[Act], **more: Any) -> None:
        super().__init__(acts, **more)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss.square())
        for name, p in self.named_parameters():
            self.note(f"{name}_step", p.grad)
        optimizer.step()
        return loss


class Thaws(Hooked):
    """Parameters with hooks are frozen, and thawed again."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(batch_idx % 3 != 1)


CASES = {
    **{
        act.__name__: hooked(act)
        for act in (notes, scales, squares, clips, drops_and_sets, decays, guarded, averages)
    },
    "drops": hooked(drops, optimizer=MOMENTUM),
    "drops_some": hooked(drops, optimizer=ADAM, every=2),
    "zeroes": hooked(zeroes, every=3, optimizer=MOMENTUM),
    "several": hooked(notes, scales, notes, squares, notes),
    **{
        when: hooked(notes, squares, notes, when=when, every=2)
        for when in ("setup", "fit_start", "train_start", "later", "forward", "removed")
    },
    "accumulated": accumulated(hooked(notes, squares, notes)),
    "accumulated_drops": accumulated(hooked(drops), 3),
    "accumulated_some": accumulated(hooked(notes, squares, every=10), 3),
    "accumulated_later": accumulated(hooked(notes, squares, when="later"), 2),
    "tied": replace(hooked(), module=partial(Tied, (notes, squares))),
    "checkpointed": replace(
        hooked(), module=partial(Checkpointed, (notes, squares), use_reentrant=False)
    ),
    "checkpointed_reentrant": replace(
        hooked(),
        module=partial(Checkpointed, (notes, squares), use_reentrant=True),
        reference="ddp",
    ),
    "manual": replace(hooked(), module=partial(Manual, (notes, squares))),
    # what thaws DDP leaves out of the average without it, and the other it refuses
    "thaws": replace(
        hooked(),
        module=partial(Thaws, (notes, squares), optimizer=MOMENTUM),
        reference=DDP_UNUSED,
    ),
    **{
        kind: replace(hooked(), module=partial(Looks, kind))
        for kind in ("tensor_hook", "module_hook", "multi_grad_hook", "node_hook")
    },
    "no_gradient": replace(hooked(), module=NoGradient, reference=DDP_UNUSED),
}
# stages 2 and 3 add what has no hooks after the reduction
UNORDERED = {"accumulated_some", "accumulated_later"}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CASES)
def test_hooks_see_and_change_what_they_do_under_ddp(name: str, stage: str) -> None:
    case = CASES[name]
    if name in UNORDERED or not case.adds_before_step:
        check_parity(case, stage)
        return
    run = parity_run(case, 2)
    for size in run.sizes(stage):
        compare_stage(ParityRun(replace(case, trainer={}), run.by_strategy), size, 2)


def steps(module: Any, name: str, p: nn.Parameter) -> None:
    """Memory-saving training, with optimizers of the user's own."""
    torch.optim.SGD([p], lr=0.1).step()
    p.grad = None


def subtracts(module: Any, name: str, p: nn.Parameter) -> None:
    p.data.sub_(p.grad, alpha=0.1)


def steps_all(module: Any, name: str, p: nn.Parameter) -> None:
    module.optimizers().step()


class LooksBack(Hooked):
    """Looks at the gradient of a parameter that has been sent already."""

    def __init__(self) -> None:
        super().__init__(())
        self.net[0].weight.register_hook(lambda grad: print(self.net[4].weight.grad))


REFUSALS = {
    "steps": (hooked(steps), "drift apart. Step after the backward"),
    "subtracts": (hooked(subtracts), "drift apart. Step after the backward"),
    "steps_all": (hooked(steps_all), "drift apart. Step after the backward"),
    "late": (
        accumulated(hooked(notes, when="later"), 3),
        "Register it before the window begins",
    ),
    "sent": (Case(LooksBack, SIX_BATCHES), "Read it in a hook of this parameter"),
}


def refuse(case: Case, stage: str) -> str:
    try:
        train(case, partial(fine_strategy, stage))
    except Exception as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", REFUSALS)
def test_what_a_hook_may_not_do_is_refused_on_every_rank(name: str, stage: str) -> None:
    case, words = REFUSALS[name]
    if name == "late" and stage == "zero1":
        check_parity(case, stage)  # the window's gradients have not been sent yet
        return
    for message in run_on_ranks(refuse, 2, case, stage):
        assert words in message


@pytest.mark.parametrize("stage", STAGES)
def test_hooks_of_rounded_weights_get_gradients_of_master_weights(stage: str) -> None:
    for record in run_on_ranks(train, 2, BF16, partial(fine_strategy, stage)):
        dtypes = {
            seen[0] for key, notes in record.notes.items() if "dtype" in key for seen in notes
        }
        assert dtypes == {"torch.float32"}


BF16 = replace(hooked(notes), precision={"precision": "bf16-mixed"})
