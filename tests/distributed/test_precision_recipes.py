"""Mixed precision gives the numbers of the recipe that its name stands for, written out by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero import ZeroPrecision, ZeroStrategy
from tests.support.compare import assert_same
from tests.support.distributed import run_on_ranks
from tests.support.models import ADAM, SGD, OptimizerFactory, Recording, mlp, rank, world_size
from tests.support.runs import make_trainer

HALF = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
NUM_BATCHES, BATCH_SIZE = 6, 3


class Net(nn.Module):
    """Layers that are rounded, a norm and a router that are not, and a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(7, 13, 13)
        self.norm = nn.LayerNorm(13)
        self.router = nn.Linear(13, 5)
        self.gain = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.router(self.norm(self.body(x))) * self.gain


class Trained(Recording):
    def __init__(self, optimizer: OptimizerFactory) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = Net()
        self.make_optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self.net(x).float(), y)
        self.note("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters())


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    num_rows = NUM_BATCHES * BATCH_SIZE * world_size()
    return (
        torch.randn(num_rows, 7, generator=generator),
        torch.randn(num_rows, 5, generator=generator),
    )


def batch_of(rank: int, index: int) -> tuple[Tensor, Tensor]:
    """What a rank trains on."""
    start = index * BATCH_SIZE
    x, y = (t[rank :: world_size()][start : start + BATCH_SIZE] for t in rows())
    return x, y


def own_loader() -> DataLoader[Any]:
    x, y = (t[rank() :: world_size()] for t in rows())
    return DataLoader(TensorDataset(x, y), batch_size=BATCH_SIZE)


def recipe(
    precision: str, optimizer: OptimizerFactory, accumulate: int, wire: torch.dtype | None
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """One process plays all ranks: fp32 masters, explicit casts, sums in fp32."""
    half, scale = HALF[precision], 2.0**10 if precision == "16-mixed" else 1.0
    masters = Trained(optimizer)
    rounded = Trained(optimizer)
    for name, param in rounded.named_parameters():
        if not name.startswith(("net.norm", "net.router")):
            param.data = param.data.to(half)
    stepped = masters.configure_optimizers()
    losses = []
    for index in range(NUM_BATCHES):
        for master, model in zip(masters.parameters(), rounded.parameters(), strict=True):
            model.data = master.detach().to(model.dtype)
        for other in range(world_size()):
            x, y = batch_of(other, index)
            rounded.zero_grad()
            with torch.autocast("cpu", dtype=half, cache_enabled=False):
                loss = F.mse_loss(rounded.net(x).float(), y)
            (loss / accumulate * scale).backward()
            losses += [loss.detach()] if other == rank() else []
            for master, model in zip(masters.parameters(), rounded.parameters(), strict=True):
                sent = model.grad if wire is None else model.grad.to(wire)
                grad = sent.float() / world_size() / scale
                master.grad = grad if master.grad is None else master.grad + grad
        if (index + 1) % accumulate == 0:
            stepped.step()
            stepped.zero_grad()
    return {k: v.detach() for k, v in masters.state_dict().items()}, losses


def train(
    stage: int, optimizer: OptimizerFactory, accumulate: int, options: dict[str, Any]
) -> tuple[dict[str, Tensor], list[Tensor]]:
    module = Trained(optimizer)
    if options["precision"] == "16-mixed":
        options = {**options, "initial_scale_power": 10}  # nothing overflows
    plugin = ZeroPrecision(keep_fp32=["net.router"], **options)
    trainer = make_trainer(
        partial(ZeroStrategy, stage, bucket_bytes=1, precision_plugin=plugin),
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,
    )
    trainer.fit(module, own_loader())
    return {k: v.detach() for k, v in module.state_dict().items()}, module.notes["loss"]


def compare_with_recipe(
    optimizer: OptimizerFactory, accumulate: int, options: dict[str, Any]
) -> None:
    """On each rank: every stage against the recipe."""
    wire = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(options.get("grad_dtype", ""))
    want, losses = recipe(options["precision"], optimizer, accumulate, wire)
    is_exact = world_size() == 2 and accumulate == 1
    for stage in (1, 2, 3):
        got, seen = train(stage, optimizer, accumulate, options)
        assert_same(got, want, exact=is_exact, label=f"stage {stage}")
        assert_same(seen, losses, exact=is_exact, label=f"losses of stage {stage}")


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("world_size", [2, 3])
def test_mixed_precision_is_its_recipe(world_size: int, precision: str) -> None:
    for optimizer in (SGD, ADAM):
        run_on_ranks(compare_with_recipe, world_size, optimizer, 1, {"precision": precision})


@pytest.mark.parametrize("precision", HALF)
def test_accumulation_is_in_fp32(precision: str) -> None:
    run_on_ranks(compare_with_recipe, 2, SGD, 3, {"precision": precision})


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16-mixed", "grad_dtype": "fp32"},
        {"precision": "16-mixed", "grad_dtype": torch.float32},
        {"precision": "bf16-mixed", "grad_dtype": "bf16"},
    ],
    ids=lambda options: f"{options['precision']}, {options['grad_dtype']}",
)
def test_the_wire_dtype_is_separate(options: dict[str, Any]) -> None:
    run_on_ranks(compare_with_recipe, 2, SGD, 1, options)


def coarse_gradients(stage: int, wire: str, accumulate: int) -> Tensor:
    """The gradient of a 32-true run, as a hook sees it."""
    seen = []

    class Looks(Trained):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.append(self.net.router.weight.grad.clone())

    plugin = ZeroPrecision("32-true", grad_dtype=wire) if wire else ZeroPrecision()
    trainer = make_trainer(
        partial(ZeroStrategy, stage, precision_plugin=plugin),
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,
        max_steps=1,
    )
    trainer.fit(Looks(SGD), own_loader())
    return seen[0]


def compare_coarse() -> None:
    for stage in (1, 2, 3):
        for accumulate in (1, 2):
            want = coarse_gradients(stage, "", accumulate)
            got = coarse_gradients(stage, "bf16", accumulate)
            assert got.dtype == torch.float32
            assert not torch.equal(got, want), "nothing was rounded"
            torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-10)


def test_fp32_gradients_can_be_sent_in_half_the_bytes() -> None:
    run_on_ranks(compare_coarse, 2)


class Sums(pl.LightningModule):
    """Its gradient is the data, so that sums of gradients can be checked by eye."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        super().__init__()
        self.make = make
        self.w = nn.Linear(4, 1, bias=False)
        self.w.weight.data.zero_()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(self.make()), batch_size=1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.w(batch[0]).float().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def one_and_63_thousandths() -> Tensor:
    """Micro-batches whose gradients are 1 once and then too small for a sum in bf16."""
    x = torch.full((64, 4), 1e-3)
    x[0] = 1.0
    return x.repeat_interleave(world_size(), dim=0)


def sum_up(stage: int, precision: str) -> Tensor:
    module = Sums(one_and_63_thousandths)
    trainer = make_trainer(
        partial(ZeroStrategy, stage, precision_plugin=ZeroPrecision(precision)),
        accumulate_grad_batches=64,
    )
    trainer.fit(module)
    return -64 * module.w.weight.detach()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("precision", HALF)
def test_64_micro_batches_add_up_as_in_fp32(precision: str, world_size: int) -> None:
    for stage in (1, 2, 3):
        for total in run_on_ranks(sum_up, world_size, stage, precision):
            torch.testing.assert_close(total, torch.full((1, 4), 1.063), rtol=1e-3, atol=0.0)
