"""A run that is told to end by a signal says so, and saves itself where DDP would."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.test_failures import SCRIPT, SECONDS_TO_END, ZERO3
from tests.support.scripts import run_script

BODY = """
class Case(Lit):
    def train_dataloader(self):
        return DataLoader(torch.randn(400, 8), batch_size=2)

    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and {who}:
            os.kill(os.getpid(), signal.{signal})
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)

    def configure_callbacks(self):
        from lightning.pytorch.callbacks import OnExceptionCheckpoint
        return [OnExceptionCheckpoint("{folder}", "saved")]
"""


def _end(folder: Path, strategy: str, signal: str, who: str) -> str:
    body = BODY.format(signal=signal, who=who, folder=folder)
    source = SCRIPT.format(body=body, strategy=strategy)
    result = run_script(source, folder, timeout=SECONDS_TO_END)
    assert "FINISHED" not in result.output
    return result.output


def test_a_signal_to_one_rank_is_named(tmp_path: Path) -> None:
    output = _end(tmp_path, ZERO3, "SIGTERM", "self.global_rank == 1")
    assert "A signal (SIGTERM) has ended the run: rank 1 received it" in output
    assert "different operations" not in output
    assert not list(tmp_path.rglob("saved.ckpt"))


@pytest.mark.parametrize("strategy", ["'ddp'", ZERO3])
def test_a_signal_to_the_launcher_saves_what_was_asked_for(strategy: str, tmp_path: Path) -> None:
    output = _end(tmp_path, strategy, "SIGTERM", "self.global_rank == 0")
    assert list(tmp_path.rglob("saved.ckpt")), output
    assert "signal" not in output.lower().replace("sigterm", ""), output
