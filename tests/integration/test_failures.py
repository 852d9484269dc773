"""Runs that go wrong end soon, on every rank, and say why.

These are scripts under Lightning's own launcher, since half of what is tested is how the processes
end: a user must neither wait for a hung run nor look for the cause in the noise of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.scripts import ScriptResult, run_ahead, run_script

# Every layer is a unit of its own, as the layers of a large model are.
ZERO3 = "lightning_zero.ZeroStrategy(3, bucket_bytes=1)"
IMPATIENT = "lightning_zero.ZeroStrategy(3, bucket_bytes=1, stall_timeout=timedelta(seconds=4))"
# Imports and the start of two processes included.
SECONDS_TO_END = 60.0

SCRIPT = """
import os, signal, sys, time
from datetime import timedelta
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
import lightning_zero


class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x

    def training_step(self, batch, batch_idx):
        return self(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    def train_dataloader(self):
        return DataLoader(torch.randn(24, 8), batch_size=2)


{body}

if __name__ == "__main__":
    strategy = {strategy}
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Case())
    print("FINISHED %d" % trainer.global_step)  # in one piece: both ranks write
"""


def _run(folder: Path, body: str, strategy: str) -> ScriptResult:
    source = SCRIPT.format(body=body, strategy=strategy)
    return run_script(source, folder, timeout=SECONDS_TO_END)


def _assert_all_failed(result: ScriptResult, *messages: str) -> None:
    assert result.returncode != 0, result.output
    assert "FINISHED" not in result.output
    assert all(code != 0 for code in result.exit_codes.values()), result
    for message in messages:
        assert message in result.output, result.output


RAISES = """
class Case(Lit):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == {rank}:
            raise LookupError("the planned mishap")
        return super().training_step(batch, batch_idx)
"""

RAISES_IN_BACKWARD = """
class Case(Lit):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 and self.global_rank == 1:
            loss.register_hook(self.refuse)
        return loss

    def refuse(self, grad):
        raise LookupError("the planned mishap")
"""

IS_KILLED = """
class Case(Lit):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)
"""

READS_ON_ONE_RANK = """
class Case(Lit):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == 0:
            print(self.layers[1].weight.norm())
"""

SAVES_ON_ONE_RANK = """
class Case(Lit):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == 0:
            self.trainer.save_checkpoint("one_rank.ckpt")
"""

USES_A_LAYER_ON_ONE_RANK = """
class Case(Lit):
    def forward(self, x):
        x = self.layers[0](x)
        if self.global_rank == 1:
            x = x + self.layers[1](x)
        return self.layers[2](x)
"""

UNEVEN_BATCHES = """
class Rows(IterableDataset):
    def __iter__(self):
        for _ in range(2 * (4 if os.environ["LOCAL_RANK"] == "0" else 6)):
            yield torch.randn(8)


class Case(Lit):
    def train_dataloader(self):
        return DataLoader(Rows(), batch_size=2)
"""

LBFGS = """
class Case(Lit):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())
"""


SCRIPTS = {
    "raises_zero1": (RAISES.format(rank=1), "'zero1'"),
    "raises_zero2": (RAISES.format(rank=0), "'zero2'"),
    "raises_zero3": (RAISES.format(rank=1), ZERO3),
    "raises_in_backward": (RAISES_IN_BACKWARD, ZERO3),
    "is_killed": (IS_KILLED, ZERO3),
    "reads_on_one_rank": (READS_ON_ONE_RANK, ZERO3),
    "saves_on_one_rank": (SAVES_ON_ONE_RANK, IMPATIENT),
    "uses_a_layer_on_one_rank": (USES_A_LAYER_ON_ONE_RANK, IMPATIENT),
    "uneven_batches_zero1": (UNEVEN_BATCHES, "'zero1'"),
    "uneven_batches_zero3": (UNEVEN_BATCHES, IMPATIENT),
    "refused_optimizer": (LBFGS, "'zero2'"),
    "nothing_wrong": ("class Case(Lit): pass", ZERO3),
}
Ended = Callable[[str], ScriptResult]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    """How a script ended, by its name."""
    with run_ahead(
        {
            name: partial(_run, tmp_path_factory.mktemp(name), *script)
            for name, script in SCRIPTS.items()
        }
    ) as result:
        yield result


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_a_rank_that_raises_ends_the_run(ended: Ended, strategy: str) -> None:
    _assert_all_failed(ended(f"raises_{strategy}"), "LookupError: the planned mishap")


def test_a_rank_that_raises_in_backward_ends_the_run(ended: Ended) -> None:
    _assert_all_failed(ended("raises_in_backward"), "LookupError: the planned mishap")


def test_a_rank_that_is_killed_ends_the_run(ended: Ended) -> None:
    _assert_all_failed(ended("is_killed"))


def test_a_parameter_read_on_one_rank_is_named(ended: Ended) -> None:
    _assert_all_failed(ended("reads_on_one_rank"), "layers.1.weight")


def test_a_checkpoint_saved_on_one_rank_is_an_error(ended: Ended) -> None:
    _assert_all_failed(ended("saves_on_one_rank"))


def test_a_layer_used_on_one_rank_is_named(ended: Ended) -> None:
    _assert_all_failed(ended("uses_a_layer_on_one_rank"), "layers.1")


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_uneven_batch_counts_are_an_error(ended: Ended, strategy: str) -> None:
    _assert_all_failed(ended(f"uneven_batches_{strategy}"))


def test_a_refused_optimizer_ends_every_rank(ended: Ended) -> None:
    result = ended("refused_optimizer")
    _assert_all_failed(result)
    assert result.output.count("LBFGS") >= 2
    assert set(result.exit_codes) == {0, 1}


def test_the_script_of_these_tests_trains_when_nothing_is_wrong(ended: Ended) -> None:
    result = ended("nothing_wrong")
    assert result.returncode == 0, result.output
    assert result.exit_codes == {0: 0, 1: 0}
    assert result.output.count("FINISHED 6") == 2
