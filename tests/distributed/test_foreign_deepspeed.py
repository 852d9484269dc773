"""Folders that DeepSpeed itself wrote, if it is installed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.checkpoint.foreign import foreign_kind, read_foreign
from tests.support.compare import assert_same
from tests.support.distributed import POOL, run_on_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)
STEPS = 3


class Net(nn.Module):
    """Odd sizes; frozen, tied and buffered; parameters of both groups take turns in the module."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 5)
        self.frozen = nn.Linear(5, 3).requires_grad_(False)
        self.a = nn.Linear(5, 5)
        self.register_buffer("scale", torch.tensor([1.5, 2.5, 3.5]))
        self.one = nn.Parameter(torch.tensor([1.25]))
        self.head = nn.Linear(5, 7)
        self.head.weight = self.emb.weight
        self.odd = nn.Parameter(torch.randn(3, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(self.emb(x).mean(1)) * self.one
        parts = (self.head(h).float().pow(2), self.frozen(h).float(), self.odd.float().pow(2))
        return torch.stack([part.sum() for part in parts]).sum()


def groups_of(net: Net) -> list[list[nn.Parameter]]:
    return [
        [net.a.weight, net.emb.weight],
        [net.odd, net.head.bias, net.one, net.a.bias],
    ]


def make_optimizer(net: Net) -> torch.optim.Optimizer:
    first, second = groups_of(net)
    groups = [{"params": first, "weight_decay": 0.1}, {"params": second, "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)


def batch(step: int) -> Tensor:
    return torch.randint(0, 7, (4, 3), generator=torch.Generator().manual_seed(step))


def train(folder: Path, dtype: str, zero: dict[str, Any]) -> dict[str, Tensor]:
    """Train with DeepSpeed and save; returns the fp32 weights as DeepSpeed itself gathers them."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    deepspeed.init_distributed("gloo")
    net = Net()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": dtype == "bf16"},
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=make_optimizer(net), config=config)
    for step in range(STEPS):
        engine.backward(engine(batch(step)))
        engine.step()
    engine.save_checkpoint(str(folder), client_state={"epoch": 1, "loops": {}})
    found = {n: safe_get_full_fp32_param(p) for n, p in net.named_parameters() if p.requires_grad}
    return {n: w.detach().clone() for n, w in found.items() if w is not None}


def train_alone() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The same in plain torch: all ranks have the same batches."""
    torch.manual_seed(0)
    net = Net()
    optimizer = make_optimizer(net)
    for step in range(STEPS):
        optimizer.zero_grad()
        net(batch(step)).backward()
        optimizer.step()
    return net.state_dict(), optimizer.state_dict()


@pytest.mark.parametrize(("ranks", "dtype"), [(3, "fp32"), (2, "bf16")])
@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 1},
        {"stage": 2},
        {"stage": 2, "round_robin_gradients": True},
        {"stage": 2, "parameter_alignment": True},
        {"stage": 3},
        {"stage": 3, "sub_group_size": 30},
    ],
    ids=lambda zero: "-".join(map(str, zero.values())),
)
def test_folders_of_deepspeed(tmp_path: Path, ranks: int, dtype: str, zero: dict[str, Any]) -> None:
    POOL.kill()
    gathered = run_on_ranks(train, ranks, tmp_path, dtype, zero, timeout=300.0)[0]
    POOL.kill()  # DeepSpeed keeps groups of processes beyond the end of the default one
    assert foreign_kind(tmp_path) == "deepspeed"
    checkpoint = read_foreign(tmp_path)
    assert (checkpoint["epoch"], checkpoint["global_step"]) == (1, STEPS)
    weights, optimizer = train_alone()
    assert checkpoint["state_dict"].keys() == weights.keys()
    assert len(gathered) == 6
    if "round_robin_gradients" not in zero:  # which `safe_get_full_fp32_param` overlooks
        own = {name: checkpoint["state_dict"][name] for name in gathered}
        assert_same(own, gathered, exact=True, label="masters")
    (saved,) = checkpoint["optimizer_states"]
    if dtype == "fp32":
        assert_same(checkpoint["state_dict"], dict(weights), exact=False, label="weights")
        assert_same(saved["state"], optimizer["state"], exact=False, label="state")
    assert saved["param_groups"] == optimizer["param_groups"]
