"""The command `lightning-zero`, as a user types it, and Lightning's own tool on our folders.

One call is a process of its own; the others run in this one, which has imported everything.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_zero import ZeroStrategy
from lightning_zero.cli import main
from tests.support.distributed import run_on_ranks
from tests.support.models import regression_loader
from tests.support.runs import make_trainer

COMMAND = [sys.executable, "-c", "from lightning_zero.cli import main; main()"]


class Small(pl.LightningModule):
    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(width, 5)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self.net(batch[0]) - batch[1]).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class Saves(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def save(path: Path) -> Tensor:
    module = Small()
    strategy = ZeroStrategy(3, save_format="sharded")
    make_trainer(lambda: strategy, callbacks=[Saves(path)]).fit(module, regression_loader())
    return module.net.weight.detach()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    path = tmp_path_factory.mktemp("cli") / "step=5.ckpt"
    return path, run_on_ranks(save, 2, path)[0]


@dataclass
class Ended:
    """What a call of the command left behind."""

    returncode: int
    stdout: str
    stderr: str


Call = Callable[..., Ended]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    def call(*words: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["lightning-zero", *map(str, words)])
        capsys.readouterr()
        code: object = 0
        try:
            main()
        except SystemExit as exit:
            code = exit.code
        printed = capsys.readouterr()
        if isinstance(code, str):  # Python prints it to stderr and ends with 1
            return Ended(1, printed.out, f"{printed.err}{code}\n")
        return Ended(int(code or 0), printed.out, printed.err)  # type: ignore[call-overload]

    return call


def test_the_command_in_a_process_of_its_own(saved: tuple[Path, Tensor], tmp_path: Path) -> None:
    def start(*words: object) -> subprocess.Popen[str]:
        command = [*COMMAND, *map(str, words)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)

    right, wrong = start("inspect", saved[0]), start("inspect", tmp_path / "nothing")
    printed, errors = right.communicate(timeout=120)
    assert right.returncode == 0, errors
    assert "model.net.weight" in printed
    _, errors = wrong.communicate(timeout=120)
    assert wrong.returncode == 1
    assert "Traceback" not in errors
    assert "does not exist" in errors


def test_consolidate_makes_files_that_load(
    call: Call, saved: tuple[Path, Tensor], tmp_path: Path
) -> None:
    folder, weight = saved
    done = call("consolidate", folder, tmp_path / "one.ckpt")
    assert done.returncode == 0, done.stderr
    assert "one.ckpt" in done.stdout
    module = Small.load_from_checkpoint(tmp_path / "one.ckpt", strict=True)
    assert torch.equal(module.net.weight, weight)
    safetensors = pytest.importorskip("safetensors.torch")
    assert call("consolidate", folder, tmp_path / "one.safetensors").returncode == 0
    assert torch.equal(safetensors.load_file(tmp_path / "one.safetensors")["net.weight"], weight)


def test_inspect_shows_and_verifies(call: Call, saved: tuple[Path, Tensor]) -> None:
    done = call("inspect", saved[0], "--verify=true")
    assert done.returncode == 0, done.stderr
    for word in ("stage", "world_size", "model.net.weight", "Adam", "every byte is right"):
        assert word in done.stdout


def test_damage_is_named_in_one_line(
    call: Call, saved: tuple[Path, Tensor], tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged.ckpt"
    damaged.mkdir()
    for file in saved[0].iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    data = bytearray((damaged / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (damaged / "__0_0.distcp").write_bytes(data)
    for words in (("inspect", damaged, "--verify=true"), ("consolidate", damaged, "x.ckpt")):
        done = call(*words)
        assert done.returncode == 1
        assert "__0_0.distcp" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_lightnings_own_tool_reads_the_weights(saved: tuple[Path, Tensor], tmp_path: Path) -> None:
    out = tmp_path / "stock.ckpt"
    tool = "lightning.pytorch.utilities.consolidate_checkpoint"
    words = [sys.executable, "-m", tool, str(saved[0]), "--output_file", str(out)]
    subprocess.run(words, check=True, timeout=120)
    assert torch.equal(torch.load(out, weights_only=True)["state_dict"]["net.weight"], saved[1])
