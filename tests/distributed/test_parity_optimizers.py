"""Every element-wise optimizer, with any groups, gives DDP's numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import ADAM, SGD, Regression, mlp, regression_loader
from tests.support.runs import STAGES, Case, check_parity


class Lion(torch.optim.Optimizer):
    """A home-made element-wise optimizer: sign of an interpolated momentum."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                momentum = state["momentum"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = momentum * beta1 + p.grad * (1 - beta1)
                p.add_(update.sign(), alpha=-group["lr"])
                momentum.mul_(beta2).add_(p.grad, alpha=1 - beta2)
        return loss


optim = torch.optim
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": SGD,
    "sgd_momentum": partial(optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "sgd_dampening": partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.3),
    "sgd_nesterov": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "sgd_maximize": partial(optim.SGD, lr=0.01, maximize=True),
    "sgd_fused": partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adam": ADAM,
    "adam_amsgrad": partial(optim.Adam, lr=1e-2, amsgrad=True, weight_decay=1e-2),
    "adam_foreach": partial(optim.Adam, lr=1e-2, foreach=True),
    "adam_for_loop": partial(optim.Adam, lr=1e-2, foreach=False),
    "adam_fused": partial(optim.Adam, lr=1e-2, fused=True),
    "adam_tensor_lr": partial(optim.Adam, lr=torch.tensor(1e-2)),
    "adamw": partial(optim.AdamW, lr=1e-2),
    "adamw_foreach": partial(optim.AdamW, lr=1e-2, foreach=True),
    "adamw_fused": partial(optim.AdamW, lr=1e-2, fused=True),
    "nadam": partial(optim.NAdam, lr=1e-2),
    "radam": partial(optim.RAdam, lr=1e-2),
    "adamax": partial(optim.Adamax, lr=1e-2),
    "adagrad": partial(optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1),
    "adagrad_fused": partial(optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1, fused=True),
    "adadelta": partial(optim.Adadelta, lr=1.0),
    "rmsprop": partial(optim.RMSprop, lr=1e-2, centered=True, momentum=0.9),
    "rprop": partial(optim.Rprop, lr=1e-2),
    "asgd": partial(optim.ASGD, lr=1e-2, t0=2),
    "lion": Lion,
}
OPTIMIZER_CASES = {
    name: Case(partial(Regression, optimizer=factory), partial(regression_loader, 7))
    for name, factory in OPTIMIZERS.items()
}


class ThreeGroups(Regression):
    """Groups whose members interleave in the order of the module; one of them stands still."""

    kind: Callable[..., Any] = optim.AdamW

    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__(partial(mlp, 7, 13, 11, 5))
        self.kind = kind

    def configure_optimizers(self) -> Any:
        params = list(self.parameters())
        return self.kind(
            [
                {"params": params[0::3], "lr": 1e-1, "weight_decay": 0.0},
                {"params": params[1::3], "lr": 1e-3, "weight_decay": 0.1},
                {"params": params[2::3], "lr": 0.0, "weight_decay": 0.1},
            ]
        )

    def on_fit_start(self) -> None:
        group = self.trainer.optimizers[0].param_groups[2]
        self.still = {id(p) for p in group["params"]}

    def on_train_end(self) -> None:
        groups = self.trainer.optimizers[0].param_groups
        self.note("groups", [(g["lr"], g["weight_decay"], len(g["params"])) for g in groups])
        names = [n for n, p in self.named_parameters() if id(p) in self.still]
        self.note("still", names)


GROUP_CASES = {
    name: Case(
        partial(ThreeGroups, kind),
        partial(regression_loader, 6),
    )
    for name, kind in {
        "sgd": partial(optim.SGD, lr=0.5, momentum=0.9),
        "adamw": partial(optim.AdamW, lr=0.5),
        "adamw_fused": partial(optim.AdamW, lr=0.5, fused=True),
        "lion": Lion,
    }.items()
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("optimizer", OPTIMIZER_CASES)
def test_an_element_wise_optimizer_trains_as_under_ddp(optimizer: str, stage: str) -> None:
    check_parity(OPTIMIZER_CASES[optimizer], stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("optimizer", ["sgd_momentum", "adam", "adamw_fused", "rprop", "lion"])
def test_an_optimizer_trains_as_under_ddp_on_three_ranks(optimizer: str, stage: str) -> None:
    check_parity(OPTIMIZER_CASES[optimizer], stage, world_size=3)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("optimizer", GROUP_CASES)
def test_interleaved_groups_keep_their_settings(
    optimizer: str, stage: str, world_size: int
) -> None:
    check_parity(GROUP_CASES[optimizer], stage, world_size)
