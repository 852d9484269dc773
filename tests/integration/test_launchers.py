"""Every registered way of starting processes trains as DDP does and hands the weights back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.support.scripts import ScriptResult, run_ahead, run_script

SCRIPT = """
import sys
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader
import lightning_zero


class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 8))

    def training_step(self, batch, batch_idx):
        return (self.net(batch) - batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def weights(strategy):
    module = Lit()
    data = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=3))
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


if __name__ == "__main__":
    reference, *strategies = sys.argv[1:]
    expected = weights(reference)
    for strategy in strategies:
        outcome = "SAME" if torch.equal(weights(strategy), expected) else "DIFFERENT"
        print(f"{outcome} {strategy}", flush=True)  # in one piece: both ranks write
"""


STRATEGIES = {
    "multiprocessing": ("ddp_fork", "zero2_fork", "zero3_notebook", "zero1_spawn", "zero3_spawn"),
    "popen": ("ddp", "zero1", "zero2", "zero3"),
}
Ended = Callable[[str], ScriptResult]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    """How the script ended, by the kind of its strategies."""
    with run_ahead(
        {
            kind: partial(run_script, SCRIPT, tmp_path_factory.mktemp(kind), args=strategies)
            for kind, strategies in STRATEGIES.items()
        }
    ) as result:
        yield result


@pytest.mark.parametrize("kind", STRATEGIES)
def test_weights_come_back_as_from_ddp(ended: Ended, kind: str) -> None:
    result = ended(kind)
    assert result.returncode == 0, result.output
    for strategy in STRATEGIES[kind][1:]:
        assert f"SAME {strategy}" in result.output, result.output
