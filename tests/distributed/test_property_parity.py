"""Generated models: whatever DDP trains, the stages train to the same numbers.

The default run takes the same examples on every machine; `--hypothesis-profile=thorough` takes
many more, and other ones each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given, note
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support import models
from tests.support.models import Regression, regression_loader
from tests.support.runs import (
    DDP_UNUSED,
    STAGES,
    Case,
    Control,
    ParityRun,
    StrategyLike,
    compare_stage,
    fine_strategy,
    run_under_each,
)

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=1e-2),
    "adamw_for_loop": partial(torch.optim.AdamW, lr=1e-2, foreach=False),
    "adamax": partial(torch.optim.Adamax, lr=1e-2),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1),
}
# They make whole steps even of a gradient that is next to nothing, be it a rounding error.
AMPLIFY_ROUNDING = {"adam", "adamw_for_loop", "adamax"}
DTYPES = {"float32": torch.float32, "float64": torch.float64}
# Sizes at which slicing goes wrong: nothing, one, fewer than the ranks, odd, prime.
HOSTILE_SHAPES = [(), (0,), (1,), (3,), (1, 1, 5), (17,), (2, 0, 3), (16,)]
USES = ["always", "always", "even_steps", "odd_steps", "never", "one_rank"]


@dataclass(frozen=True)
class LayerSpec:
    """A linear layer with a parameter of odd shape beside it."""

    width: int
    dtype: str
    has_bias: bool
    is_frozen: bool
    is_tied: bool
    use: str
    extra_shape: tuple[int, ...] | None


@dataclass(frozen=True)
class Spec:
    """A model, and how it is trained."""

    layers: tuple[LayerSpec, ...]
    optimizer: str
    group_lrs: tuple[float, ...]
    num_batches: int
    accumulation: int
    clip_value: float | None
    reverses_groups: bool
    bucket_bytes: int
    prefers_three_ranks: bool

    @property
    def world_size(self) -> int:
        amplifies = self.optimizer in AMPLIFY_ROUNDING
        return 3 if self.prefers_three_ranks and not amplifies else 2

    @property
    def ranks_differ(self) -> bool:
        return any(layer.use == "one_rank" for layer in self.layers)


def layer_specs() -> st.SearchStrategy[LayerSpec]:
    return st.builds(
        LayerSpec,
        width=st.sampled_from([1, 4, 7]),
        dtype=st.sampled_from(["float32", "float32", "float64"]),
        has_bias=st.booleans(),
        is_frozen=st.sampled_from([False, False, False, True]),
        is_tied=st.booleans(),
        use=st.sampled_from(USES),
        extra_shape=st.one_of(st.none(), st.sampled_from(HOSTILE_SHAPES)),
    )


def specs() -> st.SearchStrategy[Spec]:
    return st.builds(
        Spec,
        layers=st.lists(layer_specs(), min_size=1, max_size=5).map(tuple),
        optimizer=st.sampled_from(sorted(OPTIMIZERS)),
        group_lrs=st.lists(st.sampled_from([0.05, 1e-3, 0.0]), min_size=1, max_size=3).map(tuple),
        num_batches=st.integers(3, 7),
        accumulation=st.integers(1, 4),
        clip_value=st.sampled_from([None, None, 0.05]),
        reverses_groups=st.booleans(),
        bucket_bytes=st.sampled_from([1, 64, 200, 1 << 20]),
        prefers_three_ranks=st.sampled_from([False, False, True]),
    )


class Layer(nn.Module):
    """Maps to `width` features; says nothing of whether it is used."""

    def __init__(self, fan_in: int, spec: LayerSpec, twin: Layer | None) -> None:
        super().__init__()
        dtype = DTYPES[spec.dtype]
        self.linear = nn.Linear(fan_in, spec.width, bias=spec.has_bias, dtype=dtype)
        if twin is not None:
            self.linear.weight = twin.linear.weight
        if spec.extra_shape is not None:
            self.extra = nn.Parameter(torch.randn(spec.extra_shape, dtype=dtype))
        else:
            self.extra = None
        if spec.is_frozen:
            self.linear.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.linear(x.to(self.linear.weight.dtype)))
        return out if self.extra is None else out + 0.1 * self.extra.sum()


class Generated(Regression):
    """The model of a `Spec`."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(nn.ModuleList)
        self.spec = spec
        fan_in, earlier = 7, dict[Any, Layer]()
        for layer_spec in spec.layers:
            key = (fan_in, layer_spec.width, layer_spec.dtype)
            twin = earlier.get(key) if layer_spec.is_tied else None
            layer = Layer(fan_in, layer_spec, twin)
            earlier.setdefault(key, layer)
            self.net.append(layer)
            fan_in = layer_spec.width
        self.head = nn.Linear(fan_in, 5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        for layer, layer_spec in zip(self.net, self.spec.layers, strict=True):
            if self._is_used(layer_spec.use, batch_idx):
                x = layer(x)
            else:
                x = x.mean(-1, keepdim=True).expand(-1, layer_spec.width)
        return F.mse_loss(self.head(x.float()), y)

    def _is_used(self, use: str, batch_idx: int) -> bool:
        by_use = {
            "always": True,
            "even_steps": batch_idx % 2 == 0,
            "odd_steps": batch_idx % 2 == 1,
            "never": False,
            "one_rank": models.rank() == batch_idx % 2,
        }
        return by_use[use]

    def configure_optimizers(self) -> Any:
        params = list(self.parameters())
        count = min(len(self.spec.group_lrs), len(params))
        groups = [
            {"params": params[index::count], "lr": lr}
            for index, lr in enumerate(self.spec.group_lrs[:count])
        ]
        if self.spec.reverses_groups:
            groups.reverse()
        return OPTIMIZERS[self.spec.optimizer](groups)


@given(spec=specs())
def test_generated_models_train_as_under_ddp(spec: Spec) -> None:
    trainer: dict[str, Any] = {"accumulate_grad_batches": spec.accumulation}
    if spec.clip_value is not None:
        trainer |= {"gradient_clip_val": spec.clip_value, "gradient_clip_algorithm": "value"}
    data = partial(regression_loader, spec.num_batches, 2)
    case = Case(partial(Generated, spec), data, trainer=trainer, reference=DDP_UNUSED)
    # Stage 3 may refuse ranks that differ, which costs a timeout: the branches have their tests.
    stages = STAGES[:2] if spec.ranks_differ else STAGES
    if spec.accumulation > 1 and spec.optimizer in AMPLIFY_ROUNDING:
        stages = STAGES[:1]  # the others add up in another order than DDP
    strategies: dict[str, StrategyLike] = {DDP_UNUSED: DDP_UNUSED}
    for stage in stages:
        under_test = partial(fine_strategy, stage, spec.bucket_bytes)
        strategies[stage] = DDP_UNUSED if Control.is_on else under_test
    run = ParityRun(case, run_under_each(case, strategies, spec.world_size, timeout=60.0))
    for stage in stages:
        note(f"compared: {stage}")
        compare_stage(run, stage, spec.world_size)
