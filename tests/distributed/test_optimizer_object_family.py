"""More of what users do with their optimizer object: state that moves between parameters,
optimizers that treat their closure in other ways, hooks at every moment, offloaded state.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn, optim

from tests.support.compare import assert_same
from tests.support.distributed import run_on_ranks
from tests.support.models import ADAM, SGD, OptimizerFactory, Regression, mlp, regression_loader
from tests.support.offload import CPU, strategy
from tests.support.runs import STAGES, Case, check_parity, make_trainer, run_under_each

MOMENTUM: OptimizerFactory = partial(optim.SGD, lr=0.05, momentum=0.9)


class Twins(nn.Module):
    """Two layers of one shape, one that is used on some batches only, and one without a use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 7)
        self.last = nn.Linear(7, 5)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        if self.training:
            self.calls += 1
        return self.last(self.third(x) if self.calls % 2 else x)


def _raw(module: pl.LightningModule) -> Any:
    found = module.optimizers()
    found = found[0] if isinstance(found, list) else found
    return getattr(found, "optimizer", found)


def drops_unread(opt: Any, net: Twins, module: Regression) -> None:
    kept = {p: s for p, s in opt.state.items() if p is not net.first.weight}
    opt.state = defaultdict(dict, kept)


def swaps_unread(opt: Any, net: Twins, module: Regression) -> None:
    a, b = net.first.weight, net.second.weight
    opt.state[a], opt.state[b] = opt.state[b], opt.state[a]


def moves(opt: Any, net: Twins, module: Regression) -> None:
    opt.state[net.second.bias] = opt.state.pop(net.first.bias)


def moves_after_get(opt: Any, net: Twins, module: Regression) -> None:
    stored = opt.state.get(net.first.weight, None)
    del opt.state[net.first.weight]
    stored["extra"] = 1
    opt.state[net.second.weight] = stored


def puts_back(opt: Any, net: Twins, module: Regression) -> None:
    kept = {p: opt.state[p] for p in list(opt.state)}
    opt.state.clear()
    for p, entries in kept.items():
        opt.state[p] = entries


def plain_copies(opt: Any, net: Twins, module: Regression) -> None:
    for p in net.first.parameters():
        opt.state[p] = {**opt.state[p]}
        opt.state[p] |= {k: v * 2 for k, v in opt.state[p].items() if torch.is_tensor(v)}


def keeps_one_mapping(opt: Any, net: Twins, module: Any) -> None:
    if not hasattr(module, "kept"):
        module.kept = (opt.state, opt.state[net.first.weight])
    state, entries = module.kept
    module.note("mapping", [len(state), sorted(entries)])
    for key in [k for k, v in entries.items() if torch.is_tensor(v) and v.dim()]:
        module.note(key, entries[key])
        entries[key].mul_(0.5)


def deletes_one_entry(opt: Any, net: Twins, module: Regression) -> None:
    entries = opt.state[net.last.bias]
    entries.pop("momentum_buffer", None)
    if "exp_avg" in entries:
        entries["exp_avg"] = entries.pop("exp_avg").neg()


def sums(opt: Any, net: Twins, module: Regression) -> None:
    found = [v.double().sum() for s in opt.state.values() for v in s.values() if torch.is_tensor(v)]
    module.note("sum", torch.stack(found))
    module.note("listed", [any(p is q for q in opt.state) for p in net.parameters()])


EDITS: list[Callable[[Any, Twins, Regression], None]] = [
    drops_unread,
    swaps_unread,
    moves,
    moves_after_get,
    puts_back,
    plain_copies,
    keeps_one_mapping,
    deletes_one_entry,
    sums,
]


class EditsAt(Regression):
    """Edits the state at one kind of moment, after two steps and later."""

    def __init__(self, optimizer: OptimizerFactory, edit: int, when: str) -> None:
        super().__init__(Twins, optimizer)
        self.edit, self.when = EDITS[edit], when

    def _at(self, when: str) -> None:
        if when == self.when and self.trainer.global_step in (2, 4):
            self.edit(_raw(self), self.net, self)  # type: ignore[arg-type]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._at("training_step")
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._at("before_step")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self._at("zero_grad")

    def on_train_batch_end(self, *_: Any) -> None:
        self._at("batch_end")

    def configure_optimizers(self) -> Any:
        opt = super().configure_optimizers()
        opt.register_step_pre_hook(lambda *_: self._at("step_hook"))
        return opt


MOMENTS = ("batch_end", "before_step", "training_step", "step_hook", "zero_grad")


def _edits(edit: int, number: int) -> Case:
    module = partial(EditsAt, (ADAM, MOMENTUM)[number % 2], edit, MOMENTS[(edit + number) % 5])
    data = partial(regression_loader, 7)
    return Case(module, data, reference="ddp_find_unused_parameters_true")


# -- optimizers that treat their closure in other ways


class Base(optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def move(self, params: Any) -> None:
        for p in params:
            if p.grad is not None:
                state = self.state[p]
                state["n"] = state.get("n", 0) + 1
                state.setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                p.add_(state["sum"], alpha=-0.05 / state["n"])

    def all(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"]]


class CallsFirst(Base):
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        self.move(self.all())
        return loss


class Remembers(Base):
    """Makes a list of its parameters before it calls its closure."""

    def step(self, closure: Any = None) -> Any:
        params = self.all()
        loss = closure() if closure is not None else None
        self.move(params)
        return loss


class Decorated(optim.Adam):
    """Its method is torch's own with something around it that looks like it."""

    count = 0

    @functools.wraps(optim.Adam.step)
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = optim.Adam.step(self, closure)
        self.count += 1
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(1 - 0.01 * self.count)
        return loss


class SetsState(optim.Adam):
    """Changes what it loads where torch puts it in its place."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for entries in self.state.values():
            entries["exp_avg"] = entries["exp_avg"] * 0.5


class Reloads(Regression):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        opt = _raw(self)
        self.note("count", getattr(opt, "count", None))
        if batch_idx == 2:
            opt.load_state_dict(opt.state_dict())


class Ignores(Base):
    """Has no use for a closure."""

    def step(self, closure: Any = None) -> Any:
        self.move(self.all())


class LooksAhead(Base):
    """Moves the weights before it calls its closure, by its last update (it has no other way)."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for p in self.all():
                if "sum" in self.state[p]:
                    p.sub_(self.state[p]["sum"], alpha=0.01)
        loss = closure() if closure is not None else None
        self.move(self.all())
        return loss


class Manual(Regression):
    """Several steps on one object, without a closure of its own."""

    def __init__(self, optimizer: OptimizerFactory) -> None:
        super().__init__(Twins, optimizer)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        opt: Any = self.optimizers()
        loss = self.loss(batch)
        opt.zero_grad()
        self.manual_backward(loss)
        opt.step()
        return loss.detach()


class NotesState(Regression):
    def on_train_batch_end(self, *_: Any) -> None:
        state = _raw(self).state
        for name, p in self.named_parameters():
            if p in state:
                self.note(name, [state[p]["n"], state[p]["sum"].clone()])


class TwoOfThem(Regression):
    """Two optimizers, of which one is edited."""

    def __init__(self) -> None:
        super().__init__(Twins)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.optimizers()  # type: ignore[misc]
        loss = self.loss(batch)
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss)
        first.step()
        second.step()
        if batch_idx == 2:
            first.state.clear()
            for entries in second.state.values():
                entries["exp_avg"].zero_()
        self.note("number", [len(first.state), len(second.state)])
        return loss.detach()

    def configure_optimizers(self) -> Any:
        net: Any = self.net
        rest = [*net.second.parameters(), *net.third.parameters(), *net.last.parameters()]
        return MOMENTUM(net.first.parameters()), ADAM(rest)


class Adds(Regression):
    """Gives the optimizer a layer between the steps, and state for it before it has any."""

    def __init__(self, optimizer: OptimizerFactory) -> None:
        super().__init__(partial(mlp, 7, 13, 5), optimizer)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.zero_grad()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        opt = _raw(self)
        if batch_idx == 2:
            opt.add_param_group({"params": list(self.net[0].parameters()), "lr": 0.02})
            opt.state[self.net[0].weight]["momentum_buffer"] = torch.ones(13, 7)
        if batch_idx == 4:
            self.note(
                "thawed", [opt.state[p]["momentum_buffer"].clone() for p in self.parameters()]
            )

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.net[2].parameters())


UNUSED = "ddp_find_unused_parameters_true"
SEVEN = partial(regression_loader, 7)
CASES = {
    **{
        f"{edit.__name__}_{number}": _edits(i, number)
        for i, edit in enumerate(EDITS)
        for number in range(2)
    },
    "calls_first": Case(partial(NotesState, Twins, CallsFirst), SEVEN, reference=UNUSED),
    "remembers": Case(partial(NotesState, Twins, Remembers), SEVEN, reference=UNUSED),
    "remembers_manual": Case(partial(Manual, Remembers), SEVEN, reference=UNUSED),
    "decorated": Case(partial(Reloads, mlp, partial(Decorated, lr=1e-2))),
    "sets_state": Case(partial(Reloads, mlp, partial(SetsState, lr=1e-2))),
    "two_of_them": Case(TwoOfThem, SEVEN, reference=UNUSED),
    "adds": Case(partial(Adds, MOMENTUM)),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CASES)
def test_state_may_move_and_closures_be_used_as_under_ddp(name: str, stage: str) -> None:
    check_parity(CASES[name], stage)


# -- offloaded


class Counts(MOMENTUM.func):  # type: ignore[name-defined, misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)


class NotesCount(Regression):
    def on_train_batch_end(self, *_: Any) -> None:
        opt = _raw(self)
        self.note("count", opt.count)
        opt.state[self.net[0].weight]["momentum_buffer"].mul_(0.5)
        self.note("state", [s["momentum_buffer"].sum() for s in opt.state.values()])


OFFLOADED = {
    "edits": _edits(EDITS.index(puts_back), 0),
    "plain_copies": _edits(EDITS.index(plain_copies), 1),
    "counts": Case(partial(NotesCount, mlp, partial(Counts, lr=0.05, momentum=0.9))),
}


@pytest.mark.parametrize("name", OFFLOADED)
def test_offloaded_state_is_changed_as_state_in_memory(name: str, tmp_path: Path) -> None:
    case, nvme = OFFLOADED[name], {"nvme_path": str(tmp_path)}
    made: dict[str, Any] = {
        case.reference: case.reference,
        "1 cpu": partial(strategy, 1, **CPU),
        "3 nvme": partial(strategy, 3, optimizer="nvme", **nvme),
    }
    runs = run_under_each(case, made, 2)
    for key in list(made)[1:]:
        for got, want in zip(runs[key], runs[case.reference], strict=True):
            assert_same(vars(got), vars(want), exact=True, label=key)


# -- what can not be


class Patches(Regression):
    """Replaces `step` on the object, and has a scheduler that replaces it once more."""

    def configure_optimizers(self) -> Any:
        opt = SGD(self.parameters())
        plain = type(opt).step

        def step(optimizer: Any, closure: Any = None) -> Any:
            return plain(optimizer, closure)

        opt.step = step.__get__(opt)  # type: ignore[method-assign]
        return [opt], [optim.lr_scheduler.ConstantLR(opt)]


class SharesState(Regression):
    def __init__(self) -> None:
        super().__init__(Twins, ADAM)

    def on_train_batch_end(self, *_: Any) -> None:
        state, net = _raw(self).state, self.net
        state[net.first.weight] = state[net.second.weight]  # type: ignore[index, union-attr]


REFUSED: dict[str, tuple[Callable[[], Regression], str]] = {
    "patched": (Patches, "`step` of the SGD object was replaced"),
    "ignores": (partial(Manual, Ignores), "closure"),
    "looks_ahead": (partial(Regression, mlp, LooksAhead), "before it calls"),
    "shares_state": (SharesState, "the state of two parameters"),
}


def _refused(stage: str, make: Callable[[], Regression]) -> str:
    try:
        make_trainer(stage).fit(make(), regression_loader())
    except (NotImplementedError, RuntimeError) as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_differs_from_ddp_is_refused(name: str, stage: str) -> None:
    make, words = REFUSED[name]
    for text in run_on_ranks(_refused, 2, stage, make):
        assert words in text
