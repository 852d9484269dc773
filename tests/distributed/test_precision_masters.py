"""fp32 master weights: what they keep, where they are seen, and which parameters have none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning, WeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero
from lightning_zero import ZeroPrecision, ZeroStrategy
from tests.support.distributed import run_on_ranks
from tests.support.models import ADAM, Regression, mlp, regression_loader, world_size
from tests.support.runs import make_trainer

MIXED = ("bf16-mixed", "16-mixed")
HALF = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def fit(
    module: pl.LightningModule,
    stage: int,
    options: dict[str, Any] | None = None,
    data: Any = None,
    **trainer_options: Any,
) -> pl.Trainer:
    plugin = ZeroPrecision(**(options or {"precision": "bf16-mixed"}))
    strategy = partial(ZeroStrategy, stage, bucket_bytes=1, precision_plugin=plugin)
    trainer = make_trainer(strategy, **trainer_options)
    trainer.fit(module, data or regression_loader())
    return trainer


class Slow(pl.LightningModule):
    """Weights of 1.0 that move by 1e-4 in each step, 1/40 of what bf16 can tell from 1.0."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, bias=False).to(dtype)
        self.layer.weight.data.fill_(1.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0].to(self.layer.weight.dtype)).float().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def ones() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(100 * world_size(), 3)), batch_size=1)


def move_slowly(precision: str, dtype: torch.dtype, path: Path) -> None:
    for stage in (1, 2, 3):
        module = Slow(dtype)
        options: dict[str, Any] = {"precision": precision}
        if precision == "16-mixed":
            options["initial_scale_power"] = 8  # nothing overflows
        trainer = fit(module, stage, options, data=ones())
        trainer.save_checkpoint(path)
        saved = torch.load(path, weights_only=True)["state_dict"]["layer.weight"]
        for weight in (module.layer.weight.detach(), saved):
            if precision.endswith("mixed"):
                assert weight.dtype == torch.float32
                torch.testing.assert_close(weight, torch.full((2, 3), 0.99), rtol=0, atol=1e-5)
            else:
                assert weight.dtype == HALF["bf16-mixed"]
                assert torch.equal(weight, torch.ones(2, 3, dtype=weight.dtype))


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("bf16-mixed", torch.float32),
        ("bf16-mixed", torch.bfloat16),
        ("16-mixed", torch.float32),
        ("bf16-true", torch.float32),  # no masters: as Lightning documents
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_steps_smaller_than_an_ulp_add_up(
    precision: str, dtype: torch.dtype, world_size: int, tmp_path: Path
) -> None:
    run_on_ranks(move_slowly, world_size, precision, dtype, tmp_path / "last.ckpt")


def resume(stage: int, dtype: torch.dtype, path: Path) -> None:
    """A run in two parts, of which the second one begins with the saved masters."""
    weights = []
    for max_steps, resume_from in ((100, None), (50, None), (100, path)):
        module = Slow(dtype)
        plugin = ZeroPrecision("bf16-mixed")
        strategy = partial(ZeroStrategy, stage, precision_plugin=plugin)
        trainer = make_trainer(strategy, max_steps=max_steps, max_epochs=-1)
        trainer.fit(module, ones(), ckpt_path=resume_from)
        if max_steps == 50:
            trainer.save_checkpoint(path)
        weights.append(module.layer.weight.detach().clone())
    assert torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_survive_a_checkpoint(dtype: torch.dtype, tmp_path: Path) -> None:
    for stage in (1, 2, 3):
        run_on_ranks(resume, 2, stage, dtype, tmp_path / f"{stage}.ckpt")


class Looks(Regression):
    """Notes what parameters are inside and outside of module calls."""

    def __init__(self) -> None:
        super().__init__(partial(mlp, 7, 13, 5), ADAM)
        self.norm = nn.LayerNorm(7)
        self.ids = nn.Parameter(torch.arange(3), requires_grad=False)
        self.flags = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
        self.wide = nn.Linear(2, 2).double()
        self.register_buffer("table", torch.full((2,), 1 / 3))
        self.register_buffer("count", torch.tensor(1))
        self.inside: dict[str, torch.dtype] = {}
        self.net[0].register_forward_pre_hook(self._look)

    def _look(self, module: nn.Module, args: Any) -> None:
        self.inside["weight"] = module.weight.dtype
        self.inside["norm"] = self.norm.weight.dtype
        self.inside["input"] = args[0].dtype

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        extra = self.wide(torch.ones(2, dtype=torch.float64)).sum().float()
        return F.mse_loss(self.net(self.norm(x)).float(), y) + extra

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        weight = self.net[0].weight
        self.note("outside", (weight.dtype, weight.element_size(), weight.nbytes))
        self.note("value", weight.float())
        # what is read is the master weight, not the rounded one
        is_rounded = torch.equal(weight.detach(), weight.detach().bfloat16().float())
        self.note("is_rounded", is_rounded)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note("grad", self.net[0].weight.grad.dtype)


def look(precision: str) -> None:
    for stage in (1, 2, 3):
        module = Looks()
        before = copy.deepcopy(module.state_dict())
        trainer = fit(module, stage, {"precision": precision})
        assert module.inside["weight"] == HALF[precision]
        assert module.inside["norm"] == torch.float32
        assert set(module.notes["outside"]) == {(torch.float32, 4, 4 * 7 * 13)}
        assert not any(module.notes["is_rounded"])
        assert set(module.notes["grad"]) == {torch.float32}
        after = module.state_dict()
        assert {k: v.dtype for k, v in after.items()} == {k: v.dtype for k, v in before.items()}
        for name in ("ids", "flags", "table", "count"):
            assert torch.equal(after[name], before[name])
        masters = trainer.optimizers[0].state_dict()["state"]
        by_dtype = {v.dtype for state in masters.values() for v in state.values()}
        assert by_dtype <= {torch.float32, torch.float64}


@pytest.mark.parametrize("precision", MIXED)
def test_parameters_are_their_masters_outside_of_module_calls(precision: str) -> None:
    run_on_ranks(look, 2, precision)


def untouched() -> None:
    """Evaluation rounds weights, too; nothing of it may stay."""
    for stage in (1, 2, 3):
        torch.manual_seed(3)
        module = Regression()
        before = copy.deepcopy(module.state_dict())
        plugin = ZeroPrecision("bf16-mixed")
        trainer = make_trainer(partial(ZeroStrategy, stage, precision_plugin=plugin))
        trainer.validate(module, regression_loader())
        assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
        frozen = Regression()
        frozen.net[0].requires_grad_(False)
        weight = frozen.net[0].weight.detach().clone()
        dtype_of_built = frozen.net[2].to(torch.bfloat16).weight.dtype
        fit(frozen, stage)
        assert torch.equal(frozen.net[0].weight, weight)
        assert dtype_of_built == torch.bfloat16
        assert frozen.net[2].weight.dtype == torch.float32


def test_frozen_and_evaluated_weights_come_back_exactly() -> None:
    run_on_ranks(untouched, 2)


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=1e-4)


class Finetuned(Regression):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.net.to(dtype)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x.to(torch.bfloat16)).float(), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1e-4)


def finetune(dtype: torch.dtype) -> None:
    results = []
    for stage in (1, 2, 3):
        torch.manual_seed(0)
        module = Finetuned(dtype)
        start = module.net[0].weight.detach().float()
        fit(module, stage, callbacks=[Unfreezes()], max_epochs=3)
        weight = module.net[0].weight.detach()
        assert weight.dtype == torch.float32
        assert not torch.equal(weight, start)
        assert not torch.equal(weight, weight.bfloat16().float()), "stepped without a master"
        results.append(weight)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_unfrozen_layer_gets_masters(dtype: torch.dtype) -> None:
    run_on_ranks(finetune, 2, dtype)


class Writes(Regression):
    """Changes weights in each of the ways in which users do."""

    def __init__(self, how: Callable[[Any], None]) -> None:
        super().__init__(partial(mlp, 7, 13, 5), partial(torch.optim.SGD, lr=0.0))
        self.how = how
        self.is_done = False

    def on_train_batch_end(self, *args: Any) -> None:
        if not self.is_done:
            self.how(self)
            self.is_done = True


THIRD = 1 / 3  # can not be told from its neighbours in bf16


def in_place(module: Any) -> None:
    with torch.no_grad():
        module.net[0].weight.fill_(THIRD)


def through_data(module: Any) -> None:
    module.net[0].weight.data[:] = THIRD


def by_copy(module: Any) -> None:
    with torch.no_grad():
        module.net[0].weight.copy_(torch.full((13, 7), THIRD))


def by_load(module: Any) -> None:
    state = {k: v.clone() for k, v in module.state_dict().items()}
    state["net.0.weight"].fill_(THIRD)
    module.load_state_dict(state)


def rounded_write(module: Any) -> None:
    with lightning_zero.full_params(module, write=True):
        module.net[0].weight.data[:, 0] = 2.0


def write(stage: int, how: Callable[[Any], None]) -> None:
    torch.manual_seed(0)
    module = Writes(how)
    start = copy.deepcopy(module.state_dict())
    fit(module, stage)
    weight = module.net[0].weight.detach()
    if how is rounded_write:
        assert torch.equal(weight[:, 0], torch.full((13,), 2.0))
        start["net.0.weight"][:, 0] = 2.0
        if torch.distributed.get_rank() == 0:  # whose values everybody has
            assert torch.equal(weight, start["net.0.weight"]), "masters that nobody wrote changed"
    else:
        assert torch.equal(weight, torch.full((13, 7), THIRD)), how
    if torch.distributed.get_rank() == 0:
        assert torch.equal(module.net[2].weight.detach(), start["net.2.weight"])


def write_all() -> None:
    for stage in (1, 2, 3):
        for how in (in_place, through_data, by_copy, by_load, rounded_write):
            write(stage, how)


def test_writes_reach_the_masters() -> None:
    run_on_ranks(write_all, 2)


class ClampsItself(nn.Linear):
    """Changes its own weight in its forward, as weight clipping does."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.05, 0.05)
        return super().forward(x)


def clamp() -> None:
    results = []
    for stage in (1, 2, 3):
        torch.manual_seed(0)
        module = Regression(
            partial(nn.Sequential, ClampsItself(7, 5)), partial(torch.optim.SGD, lr=0.0)
        )
        start = module.net[0].weight.detach().clone()
        fit(module, stage)
        weight = module.net[0].weight.detach()
        kept = start.abs() < 0.049
        assert torch.equal(weight[kept], start[kept]), "masters that were not clamped were rounded"
        assert weight.abs().max() <= 0.0501
        results.append(weight)
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_module_may_change_its_own_rounded_weights() -> None:
    run_on_ranks(clamp, 2)


class Averages(WeightAveraging):
    def __init__(self) -> None:
        super().__init__(avg_fn=lambda old, new, _: 0.9 * old + 0.1 * new)


def average(stage: int) -> dict[str, Tensor]:
    module = Slow(torch.float32)
    fit(module, stage, data=ones(), callbacks=[Averages()])
    return dict(module.state_dict())


def test_averages_of_weights_are_made_of_masters() -> None:
    """An average of rounded weights would not move at all."""
    expected, weight = 1.0, 1.0
    for _ in range(100):
        weight -= 1e-4
        expected = 0.9 * expected + 0.1 * weight
    for stage in (1, 2, 3):
        (state, _) = run_on_ranks(average, 2, stage)
        got = state["layer.weight"]
        torch.testing.assert_close(got, torch.full((2, 3), expected), rtol=0, atol=3e-5)


class Samples(pl.Callback):
    """Calls the module outside of steps, where nobody has switched autocast on."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        x = torch.linspace(0, 1, 7).repeat(2, 1)
        with torch.no_grad():
            self.outputs.append(pl_module.net(x))
            with lightning_zero.full_params(pl_module):
                self.outputs.append(pl_module.net(x))
        loss = pl_module.net(x).sum()
        (grad,) = torch.autograd.grad(loss, pl_module.net[0].bias)
        assert grad.shape == (13,)


def sample() -> None:
    for stage in (1, 2, 3):
        samples = Samples()
        module = Regression()
        fit(module, stage, callbacks=[samples])
        assert all(output.dtype == torch.float32 for output in samples.outputs)
        assert not torch.is_autocast_enabled("cpu")
        want = module.net(torch.linspace(0, 1, 7).repeat(2, 1)).detach()
        for output in samples.outputs:
            torch.testing.assert_close(output, want, rtol=2e-2, atol=2e-2)


def test_modules_can_be_called_outside_of_steps() -> None:
    run_on_ranks(sample, 2)


class Batches(pl.LightningModule):
    """Notes the dtypes of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.seen: dict[str, torch.dtype] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen = {key: value.dtype for key, value in batch.items()}
        return self.layer(batch["x"]).float().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.ones(3)
        return {"x": x, "ids": x.long(), "mask": x.bool(), "y": x.double()}


def seen_batch(strategy: str, precision: str) -> dict[str, torch.dtype]:
    module = Batches()
    make_trainer(strategy, precision=precision).fit(module, DataLoader(Rows(), batch_size=2))
    return module.seen


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "32-true"])
def test_batches_are_cast_as_lightning_casts_them(precision: str) -> None:
    (want, _) = run_on_ranks(seen_batch, 2, "ddp", precision)
    for stage in ("zero1", "zero2", "zero3"):
        (got, _) = run_on_ranks(seen_batch, 2, stage, precision)
        assert got == want


class Islands(Regression):
    """A user's own mixture: a bf16 layer between fp32 ones."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(7, 7).bfloat16()
        self.norm = nn.LayerNorm(7)
        self.router = nn.Linear(7, 7)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = self.router(self.norm(self.low(x.bfloat16()).float()))
        self.note("dtypes", [m.weight.dtype for m in (self.low, self.norm, self.router)])
        return F.mse_loss(self.net(x), y)


def islands() -> None:
    for stage in (1, 2, 3):
        module = Islands()
        dtypes = {k: v.dtype for k, v in module.state_dict().items()}
        fit(module, stage, {"precision": "32-true"})
        assert {k: v.dtype for k, v in module.state_dict().items()} == dtypes
        assert module.notes["dtypes"][-1] == [torch.bfloat16, torch.float32, torch.float32]


def test_dtypes_of_the_users_own_stay_without_mixed_precision() -> None:
    run_on_ranks(islands, 2)


def refuse_other_half(precision: str, dtype: torch.dtype) -> str:
    module = Slow(dtype)
    try:
        fit(module, 1, {"precision": precision}, data=ones())
    except ValueError as error:
        return str(error)
    return "trained"


def test_modules_in_the_other_half_precision_are_refused() -> None:
    for message in run_on_ranks(refuse_other_half, 2, "bf16-mixed", torch.float16):
        assert "'layer.weight'" in message
        assert "torch.float16" in message
        assert "torch.bfloat16" in message
    for message in run_on_ranks(refuse_other_half, 2, "16-mixed", torch.bfloat16):
        assert "torch.float16" in message
        assert "torch.bfloat16" in message


def keep(entries: list[Any], precision: str) -> dict[str, torch.dtype] | str:
    """The dtypes of weights inside of a step, by name."""
    module = Looks()
    inside: dict[str, torch.dtype] = {}

    def look(layer: nn.Module, args: Any) -> None:
        inside[names[layer]] = layer.weight.dtype

    names = {layer: name for name, layer in module.named_modules()}
    for layer in (module.net[0], module.net[2], module.norm):
        layer.register_forward_pre_hook(look)
    module.loss = lambda batch: F.mse_loss(  # type: ignore[method-assign]
        module.net[2](module.net[0](batch[0]).float()).float(), batch[1]
    )
    try:
        fit(module, 3, {"precision": precision, "keep_fp32": entries})
    except ValueError as error:
        return str(error)
    return inside


@pytest.mark.parametrize(
    ("entries", "kept"),
    [
        (["net.2"], {"net.2"}),
        (["*.weight"], {"net.0", "net.2"}),
        (["net.?.weight"], {"net.0", "net.2"}),
        ([nn.Linear], {"net.0", "net.2"}),
        ([], set()),
    ],
)
def test_named_modules_stay_in_fp32(entries: list[Any], kept: set[str]) -> None:
    for inside in run_on_ranks(keep, 2, entries, "bf16-mixed"):
        assert {name for name, dtype in inside.items() if dtype == torch.float32} == kept


def test_a_name_that_fits_nothing_is_refused() -> None:
    for message in run_on_ranks(keep, 2, ["net.7", "net.2", nn.Conv2d], "bf16-mixed"):
        assert "'net.7'" in message
        assert "Conv2d" in message
        assert "'net.2'" not in message
