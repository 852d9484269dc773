"""fp16 loss scaling: all ranks skip the same steps, and otherwise it is DDP with a GradScaler."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroPrecision
from tests.support import models
from tests.support.compare import assert_same
from tests.support.distributed import distributed, run_on_ranks
from tests.support.models import ADAM, OptimizerFactory, Regression, mlp
from tests.support.runs import DDP, STAGES, StrategyLike, fine_strategy, full_state, make_trainer

INF, NAN = math.inf, math.nan
MOMENTUM: OptimizerFactory = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
Faults = Mapping[tuple[int, int], float]
"""What is put into the gradients, by rank and index of the batch."""


def batch(rank: int, index: int) -> tuple[Tensor, Tensor, int]:
    """The batch of a rank, which any other can make, too."""
    generator = torch.Generator().manual_seed(1000 * rank + index)
    return torch.randn(3, 7, generator=generator), torch.randn(3, 5, generator=generator), index


def loader(indices: Sequence[int]) -> DataLoader[Any]:
    return DataLoader([batch(models.rank(), i) for i in indices], batch_size=None)  # type: ignore[arg-type]


class Offset(nn.Module):
    """Its weight changes nothing, but one element of the weight's gradient is what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, gradient: float) -> Tensor:
        return (self.weight * torch.tensor([0.0, gradient, 0.0])).sum()


class Faulty(Regression):
    """Regression with faults in one element of one gradient, or with losses times a fault."""

    def __init__(
        self,
        faults: Faults | None = None,
        optimizer: OptimizerFactory = ADAM,
        *,
        multiplies: bool = False,
    ) -> None:
        super().__init__(mlp, optimizer)
        self.offset = Offset()
        self.faults, self.multiplies = faults or {}, multiplies

    def loss(self, batch: Any) -> Tensor:
        x, y, index = batch
        fault = self.faults.get((models.rank(), index))
        loss = super().loss((x, y)) + self.offset(0.0 if self.multiplies else fault or 0.0)
        return loss * fault if self.multiplies and fault is not None else loss


class Scheduled(Faulty):
    """With one scheduler; it counts steps or epochs."""

    def __init__(self, interval: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.interval = interval

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        step_size = 3 if self.interval == "step" else 1
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": self.interval}]


@dataclass
class Step:
    """What there is after a batch."""

    weights: dict[str, Tensor]
    optimizers: list[Any]
    scale: float
    lrs: list[float]
    global_step: int
    skipped: int | None = None
    has_overflow: bool | None = None
    norm: float | None = None
    loss: Tensor | None = None


@dataclass
class Watch(pl.Callback):
    """Keeps a `Step` for each batch."""

    steps: list[Step] = field(default_factory=list)
    scaler_at_start: dict[str, Any] = field(default_factory=dict)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.scaler_at_start = trainer.precision_plugin.state_dict()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        plugin, engine = trainer.precision_plugin, getattr(trainer.strategy, "engine", None)
        norm = None if engine is None else engine.last_grad_norm
        self.steps.append(
            Step(
                full_state(pl_module),
                # under a stage the tensors come to rank 0 only
                [trainer.strategy.optimizer_state(opt) for opt in trainer.optimizers],
                plugin.scaler.get_scale(),  # type: ignore[attr-defined]
                [float(group["lr"]) for opt in trainer.optimizers for group in opt.param_groups],
                trainer.global_step,
                getattr(plugin, "skipped_steps", None),
                getattr(plugin, "has_overflow", None),
                None if norm is None else float(norm),
                outputs["loss"].detach().clone() if outputs else None,
            )
        )


def scaled(power: int = 10, **options: Any) -> ZeroPrecision:
    return ZeroPrecision("16-mixed", initial_scale_power=power, **options)


def lightnings(power: int = 10, window: int = 2000) -> MixedPrecision:
    """What DDP is given, with the same settings as `scaled`."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**power, growth_interval=window)
    return MixedPrecision("16-mixed", "cpu", scaler)


def fit(
    strategy: StrategyLike,
    plugin: Any,
    make: Callable[[], pl.LightningModule],
    indices: Sequence[int],
    **options: Any,
) -> tuple[list[Step], pl.Trainer]:
    """Train on these batches of each rank; what there is after each of them. Collective."""
    torch.manual_seed(3)
    watch = Watch()
    ckpt_path = options.pop("ckpt_path", None)
    trainer = make_trainer(
        strategy,
        plugins=[plugin],
        callbacks=[watch],
        **{"use_distributed_sampler": False, **options},
    )
    trainer.fit(make(), loader(indices), ckpt_path=ckpt_path)
    check_ranks_agree(watch.steps)
    return watch.steps, trainer


def check_ranks_agree(steps: list[Step]) -> None:
    mine = [(s.weights, s.scale, s.lrs, s.global_step, s.skipped, s.has_overflow) for s in steps]
    everyones: list[Any] = [mine]
    if models.world_size() > 1:
        everyones *= models.world_size()
        dist.all_gather_object(everyones, mine)
    for rank, seen in enumerate(everyones):
        assert_same(seen, mine, exact=True, label=f"rank {rank} against rank {models.rank()}")


def last_rank(*indices: int, value: float = INF) -> Faults:
    return {(models.world_size() - 1, index): value for index in indices}


def assert_unchanged(step: Step, before: Step) -> None:
    assert_same(step.weights, before.weights, exact=True, label="weights")
    assert_same(step.optimizers, before.optimizers, exact=True, label="optimizer state")


# -- one step


def check_that_one_step_is_skipped(
    strategy: StrategyLike, value: float, window: int, **options: Any
) -> None:
    """The second of three steps overflows, in the first of the batches that it adds up."""
    run = partial(fit, strategy, accumulate_grad_batches=window)
    indices = list(range(3 * window))
    faulty = partial(Faulty, last_rank(window, value=value))
    steps, _ = run(scaled(**options), faulty, indices)
    want, _ = run(scaled(**options), Faulty, [i for i in indices if i // window != 1])

    first, second, third = steps[window - 1 :: window]
    assert not torch.equal(first.weights["net.0.weight"], third.weights["net.0.weight"])
    for between in steps[window : 2 * window]:
        assert_unchanged(between, first)
    assert [s.scale for s in (first, second, third)] == [2**10, 2**9, 2**9]
    assert [s.skipped for s in (first, second, third)] == [0, 1, 1]
    assert [s.has_overflow for s in (first, second, third)] == [False, True, False]
    assert_unchanged(third, want[-1])


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("value", [INF, NAN])
@pytest.mark.parametrize("stage", STAGES)
def test_one_element_on_one_rank_makes_all_skip(stage: str, value: float, window: int) -> None:
    # the one value with one unit and bucket, the other with as many as there can be
    strategy = stage if math.isinf(value) else partial(fine_strategy, stage)
    run_on_ranks(check_that_one_step_is_skipped, 2, strategy, value, window)


@pytest.mark.parametrize("grad_dtype", ["fp16", "fp32"])
def test_all_skip_whatever_gradients_are_sent_in(grad_dtype: str) -> None:
    for stage, window in (("zero1", 3), ("zero3", 1)):
        run_on_ranks(check_that_one_step_is_skipped, 2, stage, INF, window, grad_dtype=grad_dtype)


@pytest.mark.parametrize("stage", STAGES)
def test_three_ranks_skip_together(stage: str) -> None:
    for window in (1, 3):
        run_on_ranks(check_that_one_step_is_skipped, 3, stage, INF, window)


def test_one_rank_alone_skips_as_well() -> None:
    for stage in STAGES:
        run_on_ranks(check_that_one_step_is_skipped, 1, stage, NAN, 3)


class Logs(Faulty):
    """Logs what the plugin tells, as users would."""

    def on_train_batch_end(self, *_: Any) -> None:
        plugin = self.trainer.precision_plugin
        self.log("loss_scale", plugin.loss_scale)  # type: ignore[attr-defined]
        self.log("skipped_steps", plugin.skipped_steps)  # type: ignore[attr-defined]
        self.log("has_overflow", plugin.has_overflow)  # type: ignore[attr-defined]


@pytest.mark.parametrize("stage", STAGES)
@distributed()
def test_three_overflows_at_the_start(stage: str) -> None:
    torch.manual_seed(3)
    initial = full_state(Logs())
    steps, trainer = fit(stage, scaled(), partial(Logs, last_rank(0, 1, 2)), range(4))
    for step in steps[:3]:
        assert_same(step.weights, initial, exact=True, label="weights")
        assert not any(state["state"] for state in step.optimizers)
    assert not torch.equal(steps[3].weights["net.0.weight"], initial["net.0.weight"])
    assert [s.scale for s in steps] == [2**9, 2**8, 2**7, 2**7]
    assert [s.skipped for s in steps] == [1, 2, 3, 3]
    assert [s.has_overflow for s in steps] == [True, True, True, False]
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    assert logged == {"loss_scale": 2**7, "skipped_steps": 3, "has_overflow": 0}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("optimizer", [MOMENTUM, partial(torch.optim.AdamW, lr=1e-2, fused=True)])
@distributed()
def test_hysteresis_only_skips(stage: str, optimizer: OptimizerFactory) -> None:
    plugin = scaled(hysteresis=3, loss_scale_window=2)
    steps, _ = fit(stage, plugin, partial(Faulty, last_rank(1, 2, 5), optimizer), range(8))
    assert [s.scale / 2**10 for s in steps] == [1, 1, 1, 1, 2, 2, 2, 4]
    for skipped in (1, 2, 5):
        assert_unchanged(steps[skipped], steps[skipped - 1])


# -- the numbers of DDP


# (the module, options of the trainer, the scale to begin with)
PARITY: dict[str, tuple[Callable[[], pl.LightningModule], dict[str, Any], int]] = {
    "no_overflow": (partial(Faulty, multiplies=True), {}, 8),
    # nothing is put in: fp16 itself is left, again and again
    "too_large_a_scale": (partial(Faulty, optimizer=MOMENTUM), {}, 24),
    "overflow": (partial(Faulty, {(1, 3): INF}, multiplies=True), {}, 8),
    "nan": (partial(Faulty, {(0, 3): NAN, (1, 4): INF}, MOMENTUM, multiplies=True), {}, 8),
    "first_steps": (
        partial(Scheduled, "step", {(1, i): INF for i in range(3)}, multiplies=True),
        {"max_epochs": 2},
        8,
    ),
    "each_epoch": (
        partial(Scheduled, "epoch", {(0, 0): INF, (1, 5): INF}, MOMENTUM, multiplies=True),
        {"max_epochs": 3},
        8,
    ),
    "accumulated": (
        partial(Faulty, {(1, 3): INF}, MOMENTUM, multiplies=True),
        {"accumulate_grad_batches": 2},
        8,
    ),
}
NAMES_OF_BOTH = ("weights", "scale", "lrs", "global_step", "loss")


def compared(steps: list[Step]) -> list[dict[str, Any]]:
    return [{name: getattr(step, name) for name in NAMES_OF_BOTH} for step in steps]


@pytest.mark.parametrize("name", PARITY)
@distributed()
def test_with_weights_in_fp32_it_is_ddp_with_a_grad_scaler(name: str) -> None:
    """Bitwise, where the order of additions allows: losses, weights, scales, learning rates."""
    make, options, power = PARITY[name]
    num_batches = 14 if power > 8 else 6
    steps, _ = fit(DDP, lightnings(power, window=2), make, range(num_batches), **options)
    want = compared(steps)
    scales = [2.0**power, *(step["scale"] for step in want)]
    assert any(b < a for a, b in pairwise(scales)) == (name != "no_overflow")
    for stage in ("zero1",) if name == "accumulated" else STAGES:
        for strategy in (stage, partial(fine_strategy, stage)):
            plugin = scaled(power, loss_scale_window=2, model_dtype="fp32")
            got, _ = fit(strategy, plugin, make, range(num_batches), **options)
            assert_same(compared(got), want, exact=True, label=f"{name}, {strategy}")


@distributed(1)
def test_on_one_rank_it_is_plain_amp() -> None:
    """Nothing is sharded: the module itself holds the masters."""
    faulty = partial(Faulty, {(0, 2): INF}, multiplies=True)
    want, _ = fit(DDP, lightnings(8, window=2), faulty, range(6))
    for stage in STAGES:
        got, _ = fit(stage, scaled(8, loss_scale_window=2), faulty, range(6))
        assert_same(compared(got), compared(want), exact=True, label=stage)


# -- without a way on


@pytest.mark.parametrize("stage", STAGES)
def test_overflow_in_every_step_is_an_error_that_names_the_parameter(stage: str) -> None:
    outcomes = run_on_ranks(overflow_everywhere, 2, stage, expect_failure=True, timeout=60)
    for outcome in outcomes:
        assert outcome.error_type == "LossScaleError", outcome.traceback
        # three that lower the scale, and five at the least
        assert "1 (8 steps skipped so far)" in outcome.message
        assert "Parameters with such gradients: offset.weight." in outcome.message


def overflow_everywhere(stage: str) -> None:
    fit(stage, scaled(3), partial(Faulty, last_rank(*range(20))), range(20))
