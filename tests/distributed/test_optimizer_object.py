"""What users do with their optimizer object means what it means under DDP: its state, its own
methods, its hooks and its own checkpoint format.
"""

from __future__ import annotations

import abc
import copy
import pickle
import random
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn, optim

import lightning_zero
from tests.support.distributed import run_on_ranks
from tests.support.models import ADAM, SGD, OptimizerFactory, Regression, mlp, regression_loader
from tests.support.runs import STAGES, Case, check_parity, full_state, make_trainer

# -- reading and changing the state


def _net() -> nn.Sequential:
    net = mlp(7, 13, 5, 5)
    net[2].bias.requires_grad_(False)
    return net


def _raw(module: pl.LightningModule) -> optim.Optimizer:
    found = module.optimizers()
    return getattr(found, "optimizer", found)  # type: ignore[no-any-return]


def _tensors(entries: dict[str, Any]) -> list[str]:
    return [k for k, v in entries.items() if isinstance(v, Tensor) and v.dim()]


def read(opt: optim.Optimizer, param: nn.Parameter, module: Regression) -> None:
    for key, value in opt.state[param].items():
        module.note(f"read {key}", torch.as_tensor(value))


def zero_in_place(opt: optim.Optimizer, param: nn.Parameter, module: Regression) -> None:
    entries = opt.state[param]
    for key in _tensors(entries):
        entries[key].zero_()


def scale_an_index(opt: optim.Optimizer, param: nn.Parameter, module: Regression) -> None:
    entries = opt.state.get(param, {})
    for key in _tensors(entries):
        entries[key][0] *= 0.5


def through_numpy(opt: optim.Optimizer, param: nn.Parameter, module: Regression) -> None:
    entries = opt.state[param]
    for key in _tensors(entries):
        entries[key].numpy()[...] = 0.125


def new_tensors(opt: optim.Optimizer, param: nn.Parameter, module: Regression) -> None:
    entries = opt.state[param]
    for key in _tensors(entries):
        entries[key] = torch.full_like(param, 0.25).detach()


def reset_step(opt: optim.Optimizer, param: nn.Parameter, module: Regression) -> None:
    if isinstance(opt.state[param].get("step"), Tensor):
        opt.state[param]["step"].zero_()


def delete(opt: optim.Optimizer, param: nn.Parameter, module: Regression) -> None:
    if param in opt.state:
        del opt.state[param]


def pop(opt: optim.Optimizer, param: nn.Parameter, module: Regression) -> None:
    module.note("popped", len(opt.state.pop(param, {})))


def clear(opt: optim.Optimizer, param: nn.Parameter, module: Regression) -> None:
    opt.state.clear()


def replace_all(opt: optim.Optimizer, param: nn.Parameter, module: Regression) -> None:
    opt.state = defaultdict(dict)


def replace_by_a_copy(opt: optim.Optimizer, param: nn.Parameter, module: Regression) -> None:
    copied = {p: {k: copy.deepcopy(v) for k, v in s.items()} for p, s in opt.state.items()}
    opt.state = defaultdict(dict, copied)


def update(opt: optim.Optimizer, param: nn.Parameter, module: Regression) -> None:
    entries = opt.state[param]
    entries.update({key: entries[key] * 2 for key in _tensors(entries)})


def walk(opt: optim.Optimizer, param: nn.Parameter, module: Regression) -> None:
    module.note("number", len(opt.state))
    module.note("present", param in opt.state)
    for entries in opt.state.values():
        for key in _tensors(entries):
            entries[key].mul_(0.9)


def by_state_dict(opt: optim.Optimizer, param: nn.Parameter, module: Regression) -> None:
    saved = opt.state_dict()
    for entries in saved["state"].values():
        for key in _tensors(entries):
            entries[key] = entries[key] * 0.5
    opt.load_state_dict(saved)


def copies(opt: optim.Optimizer, param: nn.Parameter, module: Regression) -> None:
    copied = copy.deepcopy(opt)
    assert type(copied) is not type(opt) or not hasattr(opt, "_zero_driver")
    for other in (copied, pickle.loads(pickle.dumps(opt))):
        for entries in other.state.values():
            for key in _tensors(entries):
                module.note("copied", entries[key])


EDITS: list[Callable[[optim.Optimizer, nn.Parameter, Regression], None]] = [
    read,
    zero_in_place,
    scale_an_index,
    through_numpy,
    new_tensors,
    reset_step,
    delete,
    pop,
    clear,
    replace_all,
    replace_by_a_copy,
    update,
    walk,
    by_state_dict,
    copies,
]


class Edits(Regression):
    """Edits the state after some steps: which, where and when is drawn from a seed."""

    def __init__(self, optimizer: OptimizerFactory, chosen: list[int] | int) -> None:
        super().__init__(_net, optimizer)
        self.draw = random.Random(chosen if isinstance(chosen, int) else 5)
        self.chosen = None if isinstance(chosen, int) else chosen

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        params = [p for p in self.parameters() if p.requires_grad]
        if self.chosen is not None:
            edits = [EDITS[i] for i in self.chosen] if batch_idx == 2 else []
        else:
            edits = self.draw.sample(EDITS, self.draw.randint(0, 2))
        for edit in edits:
            edit(_raw(self), self.draw.choice(params), self)


# -- classes with a mind of their own


class Counting(SGD.func):  # type: ignore[name-defined, misc]
    """Counts its steps in an attribute and saves the count; says so in its own format."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        if self.count > 2:
            self.param_groups[0]["lr"] = 0.05 / self.count
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = dict(state_dict)
        self.count = state_dict.pop("count")
        super().load_state_dict(state_dict)


class Abstract(abc.ABC, optim.Optimizer):
    """Another layout than `Optimizer` has."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        optim.Optimizer.__init__(self, params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state.setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                    p.add_(state["sum"], alpha=-group["lr"])
        return loss


class TwoPoints(Abstract):
    """Trains at one point and evaluates at another, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.is_training = True

    @torch.no_grad()
    def _swap(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "sum" in self.state[p]:
                    before = p.clone()
                    p.lerp_(self.state[p]["sum"], 0.25)
                    self.state[p]["sum"].copy_(before)

    def eval(self) -> None:
        if self.is_training:
            self._swap()
        self.is_training = False

    def train(self) -> None:
        if not self.is_training:
            self._swap()
        self.is_training = True


class ZeroesItself(optim.Adam):
    """Drops its gradients at the end of a step; counts calls of zero_grad."""

    calls = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        self.zero_grad()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls += 1
        super().zero_grad(set_to_none)


class UsesItsMethods(Regression):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        opt: Any = _raw(self)
        opt.eval()
        self.note("evaluated", self.net(batch[0]))
        opt.train()

    def on_train_end(self) -> None:
        self.note("is training", _raw(self).is_training)  # type: ignore[attr-defined]


class NotesAttributes(Regression):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        opt: Any = _raw(self)
        self.note("attribute", getattr(opt, "count", None) or getattr(opt, "calls", None))
        if batch_idx == 2 and hasattr(opt, "count"):
            opt.count += 10
            self.note("kept", opt.state_dict()["count"])


class Hooked(Regression):
    """Every kind of hook, one of which changes the arguments of the step."""

    def configure_optimizers(self) -> Any:
        opt = SGD(self.parameters())
        opt.register_step_pre_hook(lambda o, args, kwargs: self.note("pre", len(args)))
        opt.register_step_post_hook(lambda o, args, kwargs: self.note("post", len(o.param_groups)))
        opt.register_state_dict_pre_hook(lambda o: self.note("state_dict pre", 1))
        opt.register_state_dict_post_hook(lambda o, state: {**state, "mine": 7})
        opt.register_load_state_dict_pre_hook(lambda o, state: self.note("mine", state["mine"]))
        opt.register_load_state_dict_post_hook(lambda o: self.note("load post", 1))
        return opt

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            opt = _raw(self)
            opt.load_state_dict(opt.state_dict())


def _case(module: Callable[..., pl.LightningModule], *args: Any, **options: Any) -> Case:
    return Case(partial(module, *args, **options))


MOMENTUM: OptimizerFactory = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAGRAD: OptimizerFactory = partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1)
AMSGRAD: OptimizerFactory = partial(torch.optim.Adam, lr=1e-2, amsgrad=True)
CASES = {
    **{
        f"{edit.__name__}_{name}": _case(Edits, optimizer, [i])
        for i, edit in enumerate(EDITS)
        for name, optimizer in (("adam", ADAM), ("momentum", MOMENTUM))
    },
    **{
        f"drawn_{seed}": _case(Edits, (ADAM, MOMENTUM, ADAGRAD, AMSGRAD)[seed % 4], seed)
        for seed in range(12)
    },
    "abstract": _case(Regression, optimizer=Abstract),
    "two_points": _case(UsesItsMethods, optimizer=TwoPoints),
    "counting": _case(NotesAttributes, optimizer=partial(Counting, lr=0.05, momentum=0.9)),
    "zeroes_itself": _case(NotesAttributes, optimizer=ZeroesItself),
    "hooked": _case(Hooked),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CASES)
def test_an_optimizer_object_is_what_it_is_under_ddp(name: str, stage: str) -> None:
    check_parity(CASES[name], stage)


# -- its own format


def _save_and_resume(strategy: Any, path: Path, module: type[Regression], opt: Any) -> list[Any]:
    from lightning.pytorch.strategies import DDPStrategy

    options = {"max_epochs": 1, "enable_checkpointing": True, "default_root_dir": path.parent}
    found = []
    for resumes in (False, True):
        torch.manual_seed(3)
        made = module(optimizer=opt) if opt else module()
        trainer = make_trainer(strategy, **options)
        trainer.fit_loop.max_epochs = 1 + resumes
        trainer.fit(made, regression_loader(), ckpt_path=path if resumes else None)
        trainer.save_checkpoint(path)
        assert isinstance(trainer.strategy, DDPStrategy)
        notes = {k: v for k, v in made.notes.items() if k != "state_dict pre"}
        found.append((full_state(made), notes, vars(trainer.optimizers[0]).get("count")))
    return found


@pytest.mark.parametrize("save_format", ["full", "sharded"])
@pytest.mark.parametrize("kind", ["counting", "hooked"])
def test_its_own_format_is_saved_and_resumed(save_format: str, kind: str, tmp_path: Path) -> None:
    module, opt = {
        "counting": (NotesAttributes, partial(Counting, lr=0.05, momentum=0.9)),
        "hooked": (Hooked, None),
    }[kind]
    want = run_on_ranks(_save_and_resume, 2, "ddp", tmp_path / "ddp.ckpt", module, opt)
    for stage in (1, 3):
        strategy = partial(lightning_zero.ZeroStrategy, stage, save_format=save_format)
        path = tmp_path / f"{stage}.ckpt"
        got = run_on_ranks(_save_and_resume, 2, strategy, path, module, opt)
        for mine, theirs in zip(got, want, strict=True):
            for (state, notes, count), (state_, notes_, count_) in zip(mine, theirs, strict=True):
                assert count == count_
                assert notes == notes_
                assert all(torch.equal(state[key], state_[key]) for key in state_)


# -- what can not be


class Replaced(Regression):
    def configure_optimizers(self) -> Any:
        opt = SGD(self.parameters())
        opt.step = partial(opt.step)  # type: ignore[method-assign]
        return opt


class KeepsOld(Regression):
    """Changes a tensor of the state that it took before a later step."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.kept = _raw(self).state[self.net[0].weight]["exp_avg"]
        if batch_idx == 2:
            self.kept.zero_()


def _refused(stage: str, module: type[Regression]) -> str:
    try:
        make_trainer(stage).fit(module(), regression_loader())
    except (NotImplementedError, RuntimeError) as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize("stage", STAGES)
def test_what_can_not_be_is_refused_by_name(stage: str) -> None:
    for text in run_on_ranks(_refused, 2, stage, Replaced):
        assert "`step` of the SGD object was replaced" in text
    for text in run_on_ranks(_refused, 2, stage, KeepsOld):
        assert "'exp_avg' of the optimizer state of parameter 'net.0.weight'" in text
