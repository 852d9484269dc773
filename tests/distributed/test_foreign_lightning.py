"""Checkpoints of Lightning's FSDP strategies and of DCP go on training in a stock Trainer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero.checkpoint.failures import CheckpointError
from lightning_zero.checkpoint.foreign import convert, foreign_kind, read_foreign
from tests.support.compare import assert_same
from tests.support.deepspeed_folder import Run
from tests.support.distributed import run_on_ranks

SAVED, STEPS = 3, 6
RANKS = 2


class Net(pl.LightningModule):
    """Odd shapes, a frozen weight, a buffer, two groups; step i has the same batch everywhere."""

    def __init__(self, first_step: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["first_step"])
        self.first_step = first_step
        self.losses: list[float] = []
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False))
            self.frozen = nn.Linear(3, 3)
            self.frozen.requires_grad_(False)
            self.gain = nn.Parameter(torch.ones(3))
            self.register_buffer("shift", torch.linspace(0, 1, 3))

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            shard(self, self.device_mesh["data_parallel"])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.frozen(self.body(x) * self.gain) + self.shift
        return y

    def loss(self, step: int, model: nn.Module | None = None) -> Tensor:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        return F.mse_loss((model or self)(x), x[:, :3])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self.first_step + self.global_step)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def make_optimizer(net: Net) -> torch.optim.Optimizer:
    groups = [{"params": list(net.body.parameters()), "weight_decay": 0.1}, {"params": [net.gain]}]
    return torch.optim.AdamW(groups, lr=0.05, weight_decay=0.0)


def shard(net: nn.Module, mesh: Any) -> None:
    for module in net.body:
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh)
    fully_shard(net, mesh=mesh)


class SaveAfterAnEpoch(pl.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.folder)


def train(net: Net, steps: int, ckpt_path: Path | None = None, **options: Any) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **options,
    )
    data = DataLoader(TensorDataset(torch.zeros(SAVED, 1)))
    trainer.fit(net, data, ckpt_path=ckpt_path)


def whole(net: nn.Module) -> dict[str, Tensor]:
    values = {name: v.detach() for name, v in net.state_dict().items()}
    return {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in values.items()}


def train_with_fsdp2(folder: Path) -> list[float]:
    net = Net()
    strategy = ModelParallelStrategy(RANKS, 1, process_group_backend="gloo")
    train(net, STEPS, strategy=strategy, devices=RANKS, callbacks=[SaveAfterAnEpoch(folder)])
    return net.losses


def train_by_hand(folder: Path, layout: str) -> tuple[list[float], dict[str, Tensor]]:
    """The same run without a Trainer; also returns the weights when it was saved."""
    net = Net()
    model: nn.Module = net
    if layout == "fsdp":
        wrap = ModuleWrapPolicy({nn.Linear})
        cpu = torch.device("cpu")
        model = FSDP(net, auto_wrap_policy=wrap, use_orig_params=True, device_id=cpu)
    else:
        shard(net, init_device_mesh("cpu", (RANKS,)))
    optimizer = make_optimizer(net)
    losses, weights = [], {}
    for step in range(STEPS):
        loss = net.loss(step, model)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == SAVED - 1 and layout == "fsdp":
            with FSDP.summon_full_params(model):
                weights = {name: value.detach().clone() for name, value in net.state_dict().items()}
            save_as_fsdp_strategy(model, optimizer, folder)
        elif step == SAVED - 1:
            weights = whole(net)
            save(net, optimizer, folder, layout)
    return losses, weights


def save_as_fsdp_strategy(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Through Lightning's own code, which needs a GPU only to set up its strategy."""

    class OnCpu(FSDPStrategy):
        global_rank = property(lambda self: dist.get_rank())
        world_size = property(lambda self: dist.get_world_size())

        def broadcast(self, obj: Any, src: int = 0) -> Any:
            return obj

    strategy = OnCpu(state_dict_type="sharded")
    strategy.model = model
    checkpoint = {
        "epoch": 1,
        "global_step": SAVED,
        "pytorch-lightning_version": pl.__version__,
        "state_dict": strategy.lightning_module_state_dict(),
        "optimizer_states": [strategy.optimizer_state(optimizer)],
        "hyper_parameters": {"width": 7},
    }
    strategy.save_checkpoint(checkpoint, folder)


def save(net: Net, optimizer: torch.optim.Optimizer, folder: Path, layout: str) -> None:
    model, optim = get_state_dict(net, optimizer)
    extra = {"epoch": 4, "notes": ["a", {"lr": 0.5}], "curve": [torch.ones(2), torch.zeros(1)]}
    saved: dict[str, dict[str, Any]] = {
        "plain": {"model": model, "optimizer": optim, **extra},
        "app": {"app": {"model": model, "optim": optim}},
        "model": dict(model),
        "unknown": {"generator": model, "critic": {"x": torch.ones(2)}},
    }
    dcp.save(saved[layout], checkpoint_id=folder)


def resume(folder: Path, net: Net, steps: int) -> list[float]:
    """The losses of a stock Trainer that starts from the converted folder."""
    file = folder.with_suffix(".ckpt")
    convert(folder, file)
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name, file.name]
    train(net, steps, ckpt_path=file, strategy="auto", devices=1)
    return net.losses


def test_a_folder_of_model_parallel_strategy_goes_on_in_a_stock_trainer(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    losses = run_on_ranks(train_with_fsdp2, RANKS, folder)[0]
    assert foreign_kind(folder) == "lightning_fsdp"
    checkpoint = read_foreign(folder)
    assert checkpoint["global_step"] == SAVED
    groups = checkpoint["optimizer_states"][0]["param_groups"]
    assert [group["params"] for group in groups] == [[0, 1, 2], [3]]
    assert {"loops", "lr_schedulers", "callbacks"} <= checkpoint.keys()
    assert checkpoint["lr_schedulers"]
    close(resume(folder, Net(), STEPS), losses[SAVED:])


@pytest.mark.parametrize("layout", ["plain", "app", "fsdp"])
def test_a_folder_without_a_trainers_state_goes_on_in_a_stock_trainer(
    tmp_path: Path, layout: str
) -> None:
    folder = tmp_path / "run"
    losses, weights = run_on_ranks(train_by_hand, RANKS, folder, layout, init_group=True)[0]
    assert foreign_kind(folder) == ("lightning_fsdp" if layout == "fsdp" else "dcp")
    checkpoint = read_foreign(folder)
    assert_same(checkpoint["state_dict"], weights, exact=True, label=layout)
    state = checkpoint["optimizer_states"][0]["state"]
    assert [state[i]["exp_avg"].shape for i in range(4)] == [(7, 5), (7,), (3, 7), (3,)]
    assert all(entries["step"] == SAVED for entries in state.values())
    if layout == "plain":
        assert checkpoint["epoch"] == 4
        assert checkpoint["notes"] == ["a", {"lr": 0.5}]
        assert torch.equal(checkpoint["curve"][0], torch.ones(2))
    if layout == "fsdp":
        assert checkpoint["hyper_parameters"] == {"width": 7}
    # No loops were saved: the new Trainer counts its steps from 0.
    net = Net(SAVED)
    net.configure_optimizers = partial(make_optimizer, net)  # type: ignore[method-assign]
    close(resume(folder, net, STEPS - SAVED), losses[SAVED:])


@pytest.mark.parametrize("stage", [2, 3])
def test_a_folder_of_deepspeed_goes_on_in_a_stock_trainer(tmp_path: Path, stage: int) -> None:
    net = Net()
    optimizer = make_optimizer(net)
    losses = []
    for step in range(STEPS):
        if step == SAVED:
            save_as_deepspeed(net, optimizer, tmp_path / "run", stage)
        loss = net.loss(step)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    resumed = Net(SAVED)
    resumed.configure_optimizers = partial(make_optimizer, resumed)  # type: ignore[method-assign]
    assert resume(tmp_path / "run", resumed, STEPS - SAVED) == losses[SAVED:]


def save_as_deepspeed(net: Net, optimizer: torch.optim.Optimizer, folder: Path, stage: int) -> None:
    weights = {name: param.detach().clone() for name, param in net.named_parameters()}
    names = [[name for name in weights if name.startswith("body")], ["gain"]]
    saved = optimizer.state_dict()

    def use_own_options(rank: int, part: dict[str, Any]) -> None:
        base = part["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
        for ours, group in zip(base["param_groups"], saved["param_groups"], strict=True):
            ours |= {key: value for key, value in group.items() if key != "params"}
        for state in base["state"].values():
            state["step"] = torch.tensor(float(SAVED))

    run = Run(
        [{name: weights[name] for name in group} for group in names],
        stage=stage,
        dtype=torch.float32,
        frozen={name: weights[name] for name in weights if name.startswith("frozen")},
        buffers={"shift": net.shift},
        change=use_own_options,
    )
    for key in run.state:
        run.state[key] = {n: saved["state"][i][key] for i, n in enumerate(run.params)}
    run.save(folder)


def close(losses: list[float], expected: list[float]) -> None:
    assert losses == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_a_bare_state_dict_and_weights_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    _, weights = run_on_ranks(train_by_hand, RANKS, folder, "model", init_group=True)[0]
    checkpoint = read_foreign(folder)
    assert all(torch.equal(checkpoint["state_dict"][n], w) for n, w in weights.items())
    assert checkpoint["optimizer_states"] == []
    convert(folder, tmp_path / "weights.ckpt", weights_only=True)
    saved = torch.load(tmp_path / "weights.ckpt")
    assert "optimizer_states" not in saved
    Net().load_state_dict(saved["state_dict"])


def test_what_is_not_clear_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "unknown"
    run_on_ranks(train_by_hand, RANKS, folder, "unknown", init_group=True)
    with pytest.raises(CheckpointError, match="'critic', 'generator'; the model is expected"):
        read_foreign(folder)
