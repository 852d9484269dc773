"""Parameters that don't train, stop training, or start late."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.support.compare import assert_same
from tests.support.distributed import run_on_ranks
from tests.support.models import ADAM, SGD, Recording, Regression, mlp, regression_loader
from tests.support.runs import DDP_UNUSED, STAGES, Case, Control, check_parity, parity_run, train

SIX_BATCHES = partial(regression_loader, 6)


class FrozenLayer(Regression):
    """One layer is frozen from the start; the optimizer gets all parameters, or the trainable."""

    def __init__(self, gives_all: bool, frozen: tuple[int, ...] = (0,)) -> None:
        super().__init__(partial(mlp, 7, 13, 11, 5))
        self.gives_all = gives_all
        for index in frozen:
            self.net[index].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        params = [p for p in self.parameters() if self.gives_all or p.requires_grad]
        return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


class LowRank(Recording):
    """A frozen base, in float or as integers with a scale, and a trained low-rank addition."""

    def __init__(self, is_quantised: bool) -> None:
        super().__init__()
        base = torch.randn(16, 16)
        self.scale = 0.0625 if is_quantised else 1.0
        stored = (base / self.scale).round().to(torch.int8) if is_quantised else base
        self.base = nn.Parameter(stored, requires_grad=False)
        self.a = nn.Linear(16, 2, bias=False)
        self.b = nn.Linear(2, 16, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        frozen = F.linear(x, self.base.float() * self.scale)
        return F.mse_loss(frozen + self.b(self.a(x)), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


class TeacherAndStudent(Regression):
    """A frozen teacher beside the student that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = mlp().requires_grad_(False).eval()

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            target = self.teacher(batch[0])
        return super().loss(batch) + F.mse_loss(self.net(batch[0]), target)

    def configure_optimizers(self) -> Any:
        return ADAM(self.net.parameters())


class SwitchesRequiresGrad(Regression):
    """Layers take turns at training."""

    def __init__(self) -> None:
        super().__init__(partial(mlp, 7, 13, 11, 5))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(batch_idx % 2 == 0)
        self.net[2].requires_grad_(batch_idx % 3 != 1)


class FreezesForGood(Regression):
    """A layer stops training after two steps; what its gradient was must not linger."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.net[0].requires_grad_(False)


class OnlyUnderNoGrad(Regression):
    """A trainable module whose output never carries a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(7, 5)

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            offset = self.side(batch[0])
        return F.mse_loss(self.net(batch[0]) + offset, batch[1])


class DetachedHalf(Regression):
    """The first half of the network is detached, hence gets no gradient."""

    def loss(self, batch: Any) -> Tensor:
        hidden = self.net[0](batch[0]).detach()
        return F.mse_loss(self.net[2](hidden), batch[1])


CASES = {
    "trainable_to_optimizer": Case(partial(FrozenLayer, False), SIX_BATCHES),
    "all_to_optimizer": Case(partial(FrozenLayer, True), SIX_BATCHES),
    "frozen_between": Case(partial(FrozenLayer, True, (2,)), SIX_BATCHES),
    "all_but_the_last": Case(partial(FrozenLayer, False, (0, 2)), SIX_BATCHES),
    "frozen_accumulated": Case(
        partial(FrozenLayer, True), SIX_BATCHES, trainer={"accumulate_grad_batches": 3}
    ),
    "low_rank": Case(partial(LowRank, False), partial(regression_loader, 6, 3, (16,), (16,))),
    "low_rank_int8": Case(partial(LowRank, True), partial(regression_loader, 6, 3, (16,), (16,))),
    "teacher": Case(TeacherAndStudent, SIX_BATCHES),
    "switched": Case(SwitchesRequiresGrad, SIX_BATCHES, reference=DDP_UNUSED),
    "freezes_for_good": Case(FreezesForGood, SIX_BATCHES, reference=DDP_UNUSED),
    "only_under_no_grad": Case(OnlyUnderNoGrad, SIX_BATCHES, reference=DDP_UNUSED),
    "detached_half": Case(DetachedHalf, SIX_BATCHES, reference=DDP_UNUSED),
}


class HasBackbone(Recording):
    """What `BackboneFinetuning` expects."""

    def __init__(self, optimizer: Any = SGD) -> None:
        super().__init__()
        self.backbone = mlp(7, 13, 11)
        self.head = nn.Linear(11, 5)
        self.make_optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return self.make_optimizer([p for p in self.parameters() if p.requires_grad])


def thaws_the_backbone() -> list[pl.Callback]:
    return [BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.05)]


class ThawsLayerByLayer(BaseFinetuning):
    """A layer more in each epoch."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.backbone)  # type: ignore[arg-type]

    def finetune_function(
        self, pl_module: pl.LightningModule, epoch: int, optimizer: Optimizer
    ) -> None:
        if epoch in (1, 2):
            layer = pl_module.backbone[2 if epoch == 1 else 0]  # type: ignore[index]
            self.unfreeze_and_add_param_group(layer, optimizer, lr=0.02 / epoch)


def thaws_layers() -> list[pl.Callback]:
    return [ThawsLayerByLayer()]


class ThawsByHand(HasBackbone):
    """A layer that the optimizer has had all along gets its first gradient late."""

    def __init__(self, optimizer: Any = SGD) -> None:
        super().__init__(optimizer)
        self.backbone[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 5:
            self.backbone[0].requires_grad_(True)


def _late(module: Any, callbacks: Any, batch_size: int) -> Case:
    data = partial(regression_loader, 4, batch_size)
    return Case(module, data, callbacks=callbacks, trainer={"max_epochs": 3})


# DDP never reduces what was frozen when it was built, and its ranks drift apart. One process that
# sees the joined batch is the reference here: (module, callbacks).
LATE_CASES: dict[str, tuple[Any, Any]] = {
    "backbone_sgd": (HasBackbone, thaws_the_backbone),
    "backbone_adam": (partial(HasBackbone, ADAM), thaws_the_backbone),
    "layer_by_layer": (partial(HasBackbone, partial(torch.optim.AdamW, lr=1e-2)), thaws_layers),
    "by_hand_sgd": (ThawsByHand, None),
    "by_hand_adam": (partial(ThawsByHand, ADAM), None),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CASES)
def test_frozen_parameters_give_ddps_numbers(name: str, stage: str) -> None:
    check_parity(CASES[name], stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["all_to_optimizer", "low_rank_int8", "switched"])
def test_frozen_parameters_on_three_ranks(name: str, stage: str) -> None:
    check_parity(CASES[name], stage, world_size=3)


@pytest.mark.parametrize("stage", STAGES)
def test_a_frozen_parameter_never_changes(stage: str) -> None:
    run = parity_run(CASES["low_rank_int8"], 2)
    torch.manual_seed(100)
    before = LowRank(True).base
    for record in chain.from_iterable(map(run.records, run.sizes(stage))):
        assert record.state["base"].dtype == torch.int8
        assert torch.equal(record.state["base"], before)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", LATE_CASES)
def test_what_thaws_late_trains_as_in_one_process(name: str, stage: str) -> None:
    if Control.is_on:
        pytest.skip("DDP itself diverges here")
    module, callbacks = LATE_CASES[name]
    joined = run_on_ranks(train, 1, _late(module, callbacks, 6), "ddp")[0]
    records = run_on_ranks(train, 2, _late(module, callbacks, 3), stage)
    assert_same(records[0].state, joined.state, exact=False, label=f"{stage} against one process")
    assert_same(records[0].lrs, joined.lrs, exact=True, label="lrs")
    assert_same(records[1].state, records[0].state, exact=True, label="rank 1 against rank 0")
