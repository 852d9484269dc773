"""What rests in host memory or in files trains to the same bits as what does not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn

from tests.distributed.test_parity_frozen import HasBackbone, thaws_layers
from tests.distributed.test_parity_manual import Gan, Manual
from tests.distributed.test_parity_optimizer_use import CountsInItsGroups
from tests.support.models import ADAM, Regression, mlp, regression_loader
from tests.support.offload import check_offloaded
from tests.support.runs import Case

DEEP = partial(mlp, 7, 13, 11, 5)
FIVE = partial(regression_loader, 5)


class Odd(nn.Module):
    """Parameters of nothing, one number and awkward sizes; the largest exceeds the staging."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.one = nn.Parameter(torch.ones(1))
        self.seven = nn.Parameter(torch.randn(7))
        self.many = nn.Parameter(torch.randn(1023) * 0.01)
        self.large = nn.Parameter(torch.randn(10_000, 7) * 0.01)
        self.last = nn.Linear(7, 5)
        self.last.weight = nn.Parameter(self.last.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x) * self.seven + self.empty.sum())
        return self.last(x + self.large.sum(0)) * self.scalar + self.one + self.many.sum()


class Groups(Regression):
    """Two groups, lr as a tensor that is changed in place right after each step."""

    def __init__(self, optimizer: Any, has_tensors: bool) -> None:
        super().__init__(DEEP)
        self.optimizer, self.has_tensors = optimizer, has_tensors

    def configure_optimizers(self) -> Any:
        first, *rest = self.parameters()
        lr: Any = torch.tensor(0.05) if self.has_tensors else 0.05
        return self.optimizer([{"params": [first], "lr": lr / 2}, {"params": rest}], lr=lr)

    def on_train_batch_end(self, *_: Any) -> None:
        optimizer: Any = self.optimizers()
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].mul_(0.5)
            else:
                group["lr"] = group["lr"] * 0.5
            group["weight_decay"] = 0.3


class LooksAfterSteps(Manual):
    """Reads everything right after the step, and changes what it read."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        with torch.no_grad():
            self.note("grad", self.net[0].weight.grad)
            self.note("data", self.net[2].weight.data.clone())
            self.note("state", optimizer.state_dict()["state"][0])
            self.net[4].bias.grad.zero_()
            self.net[2].weight.mul_(1.01)
            self.net[0].bias.data.add_(0.01)
        return loss.detach()


class KeepsGradients(Manual):
    """Zeroes gradients every other step only, and clips in between."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        if batch_idx % 2 == 0:
            optimizer.zero_grad(set_to_none=batch_idx % 4 == 0)
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.05, "norm")
        optimizer.step()
        optimizer.step()
        return loss.detach()


def averages() -> list[pl.Callback]:
    return [EMAWeightAveraging(decay=0.8, update_every_n_steps=2)]


ADAMW = partial(torch.optim.AdamW, lr=1e-2)
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ACCUMULATES = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
CASES: dict[str, Case] = {
    "odd_sizes": Case(partial(Regression, Odd, ADAMW)),
    "momentum_accumulated": Case(
        partial(Regression, DEEP, MOMENTUM),
        FIVE,
        trainer={"accumulate_grad_batches": 3, "max_epochs": 2},
    ),
    "fused_clipped": Case(
        partial(Regression, DEEP, partial(ADAMW, fused=True)),
        trainer={"gradient_clip_val": 0.05},
    ),
    "amsgrad_clipped_by_value": Case(
        partial(Regression, DEEP, partial(ADAMW, amsgrad=True)),
        trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    "accumulated_and_clipped": Case(partial(Regression, DEEP, ADAMW), trainer=ACCUMULATES),
    "groups": Case(partial(Groups, torch.optim.AdamW, False)),
    "lr_tensor": Case(partial(Groups, partial(torch.optim.AdamW, foreach=False), True)),
    "counts_in_groups": Case(partial(Regression, DEEP, CountsInItsGroups)),
    "looks_after_steps": Case(partial(LooksAfterSteps, ADAM)),
    "keeps_gradients": Case(partial(KeepsGradients, ADAM)),
    "gan_toggled": Case(partial(Gan, True), partial(regression_loader, 4, 3, (8,), (4,))),
    "gan": Case(partial(Gan, False), partial(regression_loader, 4, 3, (8,), (4,))),
    "thaws": Case(
        partial(HasBackbone, ADAMW), FIVE, callbacks=thaws_layers, trainer={"max_epochs": 3}
    ),
    "averages": Case(
        partial(Regression, DEEP, ADAMW),
        validation_data=FIVE,
        callbacks=averages,
        trainer={"max_epochs": 2, "val_check_interval": 2},
    ),
}
HALVES = (
    ("1 cpu", "2 nvme", "3 nvme nvme", "3 - cpu"),
    ("1 nvme", "2c cpu", "3 cpu nvme", "3 nvme cpu", "3c nvme", "3 - nvme"),
)
NEEDS_ALL = ("odd_sizes", "looks_after_steps")


@pytest.mark.parametrize("name", CASES)
def test_two_ranks(name: str, tmp_path: Path) -> None:
    chosen = HALVES[list(CASES).index(name) % 2]
    check_offloaded(CASES[name], 2, tmp_path, None if name in NEEDS_ALL else chosen)
    assert list(tmp_path.iterdir()) == []
