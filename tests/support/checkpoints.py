"""Modules and runs for the checkpoint tests: state of every kind, and batches that do not depend on
the number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.models import Recording

GLOBAL_BATCH = 12
STEPS_PER_EPOCH = 4


class Rich(Recording):
    """Tied, frozen and permuted weights, a bare parameter, buffers, groups, a schedule per step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.first = nn.Linear(7, 13)
        self.conv = nn.Conv2d(1, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.tied = nn.Linear(13, 13, bias=False)
        self.again = nn.Linear(13, 13)
        self.again.weight = self.tied.weight
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.last = nn.Linear(13, 5)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = self.frozen(self.again(self.tied(x)))
        x = self.conv(x.view(-1, 1, 1, 13)).mean(1).flatten(1)
        return self.last(x) * self.gain

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += 1
        loss = F.mse_loss(self(batch[0]).float(), batch[1].float())
        self.note("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.mse_loss(self(batch[0]).float(), batch[1].float()), sync_dist=True)

    def configure_optimizers(self) -> Any:
        rest = [p for n, p in self.named_parameters() if p.requires_grad and "last" not in n]
        groups = [{"params": rest}, {"params": self.last.parameters(), "weight_decay": 0.1}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=40)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class TwoOptimizers(Rich):
    """Manual optimization of two halves by different optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self(batch[0]).float(), batch[1].float())
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        self.note("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        rest = [p for n, p in self.named_parameters() if p.requires_grad and "last" not in n]
        return [
            torch.optim.SGD(self.last.parameters(), lr=0.05, momentum=0.9),
            torch.optim.Adam(rest, lr=1e-2),
        ]


class Dropping(Rich):
    """Draws random numbers in every step."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.3)


MODULES: dict[str, type[Rich]] = {
    "rich": Rich,
    "two_optimizers": TwoOptimizers,
    "dropping": Dropping,
}


def dataset() -> TensorDataset:
    """Rows of which each global batch sees the same on any number of ranks."""
    generator = torch.Generator().manual_seed(7)
    num_rows = GLOBAL_BATCH * STEPS_PER_EPOCH
    x, y = (torch.randn(num_rows, n, generator=generator) for n in (7, 5))
    return TensorDataset(x, y)


class DealtRows(torch.utils.data.Sampler[int]):
    """Rank r of N gets rows r, r + N, ... in order."""

    def __init__(self, num_rows: int, rank: int, num_ranks: int) -> None:
        self.rows = range(rank, num_rows, num_ranks)

    def __iter__(self) -> Any:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


class StatefulLoader(DataLoader[Any]):
    """Knows where it is, and goes on there, as Lightning asks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.position = self.first = 0

    def __iter__(self) -> Any:
        first, self.first = self.first, 0
        for index, batch in enumerate(super().__iter__()):
            if index >= first:
                self.position = index + 1
                yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["position"]
