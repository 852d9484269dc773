"""When something is offloaded, what that moves, and what a run leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import lightning_zero
from lightning_zero import OffloadCallback
from lightning_zero.config import NVME_PATH
from lightning_zero.offload.host import HostMemory
from tests.support.compare import assert_same
from tests.support.distributed import run_on_ranks
from tests.support.models import Regression, mlp, rank, regression_loader
from tests.support.offload import CPU, strategy
from tests.support.runs import make_trainer
from tests.support.scripts import ROOT

DEEP = partial(mlp, 7, 13, 11, 5)
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
PRECISION = {"precision": "bf16-mixed"}


def state_devices(trainer: Any) -> set[str]:
    """Where the optimizer state is at the moment; "meta" stands for elsewhere."""
    return {
        value.device.type
        for driver in trainer.strategy.engine.drivers
        for state in driver.inner.state.values()
        for value in state.values()
        if torch.is_tensor(value) and value.dim() == 1
    }


class Parks(Regression):
    """Looks at the optimizer state in training, in validation, and where it asks for parking."""

    def __init__(self) -> None:
        super().__init__(DEEP, ADAMW)
        torch.manual_seed(3)
        self.found: dict[str, list[Any]] = {"training": [], "validation": [], "parked": []}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self._look("validation")

    def on_train_batch_end(self, *_: Any) -> None:
        self._look("training")
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, OffloadCallback):
                with callback.parked():
                    self._look("parked")
                    self.note("prediction", self(torch.ones(1, 7)))

    def forward(self, x: Any) -> Any:
        return self.net(x)

    def _look(self, name: str) -> None:
        engine: Any = self.trainer.strategy.engine  # type: ignore[attr-defined]
        if engine is None:  # one device has nothing to shard
            return
        masters = {type(b.shard).__name__ for b in engine.buffers if b.has_master}
        self.found[name].append((state_devices(self.trainer), masters))


def park(stage: int, precision: Any, place: dict[str, Any] | None) -> dict[str, Any]:
    module = Parks()
    options = [OffloadCallback(during="evaluation", **place)] if place else []
    trainer = make_trainer(
        partial(strategy, stage, precision=precision), callbacks=options, val_check_interval=2
    )
    trainer.fit(module, regression_loader(), regression_loader(2))
    state = {k: v.clone() for k, v in module.state_dict().items()}
    return {"state": state, "found": module.found, "val": trainer.callback_metrics["val_loss"]}


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_state_is_away_while_a_fit_validates(place: str, tmp_path: Path) -> None:
    where: dict[str, Any] = {"optimizer": "cpu", "force": True}
    if place == "nvme":
        where = {"optimizer": "nvme", "nvme_path": str(tmp_path)}
    for stage, precision, num_ranks in ((1, PRECISION, 2), (3, None, 2), (2, None, 1)):
        plain = run_on_ranks(park, num_ranks, stage, precision, None)
        parked = run_on_ranks(park, num_ranks, stage, precision, where)
        for got, want in zip(parked, plain, strict=True):
            assert_same(got["state"], want["state"], exact=True, label="weights")
            assert_same(got["val"], want["val"], exact=True, label="validation")
            masters = {"HeldShard"} if precision else set()
            assert got["found"]["training"] == [({"cpu"}, masters)] * 5
            away = ({"meta"}, {"RestingShard"} if precision else set())
            assert got["found"]["validation"] == [away] * 4
            assert got["found"]["parked"] == [away] * 5
            if num_ranks > 1:
                assert want["found"]["validation"] == [({"cpu"}, masters)] * 4
    assert list(tmp_path.iterdir()) == []


def evaluate(during: Any, disk: str) -> dict[str, Any]:
    """What is offloaded in each of Lightning's entry points."""
    places: dict[str, Any] = {}

    class Looks(pl.Callback):
        def look(self, trainer: pl.Trainer, *_: Any) -> None:
            engine: Any = trainer.strategy.engine  # type: ignore[attr-defined]
            offload = None if engine is None else engine.offload
            fn: Any = trainer.state.fn
            places[fn.value] = offload is not None and (
                type(offload.states).__name__,
                type(offload.params).__name__,
            )

        on_train_end = on_validation_end = on_test_end = on_predict_end = look

    callback = OffloadCallback("nvme", "nvme", nvme_path=disk, during=during)
    trainer = make_trainer("zero3", callbacks=[callback, Looks()])
    module = Regression(DEEP, ADAMW)
    trainer.validate(module, regression_loader(), verbose=False)
    trainer.test(module, regression_loader(), verbose=False)
    trainer.predict(module, regression_loader(), return_predictions=False)
    trainer.fit(module, regression_loader())
    return places


def test_when_something_is_offloaded(tmp_path: Path) -> None:
    params, both = ("NoneType", "Disk"), ("Disk", "Disk")
    wanted = {
        "training": {"validate": False, "test": False, "predict": False, "fit": both},
        "evaluation": {"validate": params, "test": params, "predict": params, "fit": False},
        "always": {"validate": params, "test": params, "predict": params, "fit": both},
    }
    for during, want in wanted.items():
        assert run_on_ranks(evaluate, 2, during, str(tmp_path)) == [want] * 2
    assert list(tmp_path.iterdir()) == []


def names() -> dict[str, Any]:
    found = {}
    for name in ("zero1_offload", "zero2_offload", "zero3_offload", "zero3_nvme"):
        config = pl.Trainer(strategy=name, accelerator="cpu", logger=False).strategy.config  # type: ignore[attr-defined]
        found[name] = (config.stage, config.offload.optimizer, config.offload.params)
    return found


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NVME_PATH, str(tmp_path))
    assert names() == {
        "zero1_offload": (1, "cpu", None),
        "zero2_offload": (2, "cpu", None),
        "zero3_offload": (3, "cpu", "cpu"),
        "zero3_nvme": (3, "nvme", "nvme"),
    }
    assert lightning_zero.ZeroStrategy(3, offload_optimizer="nvme").config.offload is not None


def moved(disk: str) -> tuple[list[float], list[float], int]:
    """Bytes moved per step as logged, what the formula says, and elements of this rank's shards."""
    logged: list[dict[str, float]] = []
    numel = 0

    class Settles(OffloadCallback):
        def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
            # what is still being written would not be read again
            trainer.strategy.engine.grads.wait()
            trainer.strategy.engine.offload.states.wait()

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            nonlocal numel
            engine = trainer.strategy.engine
            engine.offload.runner.wait()
            engine.offload.states.wait()
            numel = sum(buffer.layout.shard_numel for buffer in engine.buffers)
            super().on_train_batch_end(trainer, *args)
            names = ("moved_bytes", "exposed_seconds", "overlap")
            metrics = trainer.callback_metrics
            logged.append({name: float(metrics[f"offload/{name}"]) for name in names})

    callback = Settles(optimizer="nvme", nvme_path=disk)
    trainer = make_trainer(partial(strategy, 2), callbacks=[callback])
    trainer.fit(Regression(DEEP, ADAMW), regression_loader())
    assert all(0 <= entry["overlap"] <= 1 for entry in logged)
    assert all(entry["exposed_seconds"] > 0 for entry in logged)
    return [e["moved_bytes"] for e in logged], [e["overlap"] for e in logged], numel


def test_the_bytes_that_are_logged(tmp_path: Path) -> None:
    for found, _, numel in run_on_ranks(moved, 2, str(tmp_path)):
        once = 4 * numel
        # a gradient leaves the device, is written and read; two moments are written, then read, too
        assert found[0] == once * 5
        assert found[1:] == [once * 7] * 4


def host_bytes(num_ranks: int) -> int:
    found: list[int] = []

    class Looks(pl.Callback):
        def on_train_end(self, trainer: Any, *_: Any) -> None:
            offload = trainer.strategy.engine.offload
            assert isinstance(offload.states, HostMemory)
            found.append(offload.states.resting_bytes)

    make = partial(strategy, 3, params="cpu", **CPU)
    net = partial(mlp, 7, 130, 110, 5)
    make_trainer(make, callbacks=[Looks()]).fit(Regression(net, ADAMW), regression_loader())
    return found[0]


def test_host_memory_does_not_grow_with_the_ranks() -> None:
    sums = [sum(run_on_ranks(host_bytes, n, n)) for n in (1, 2, 4)]
    assert max(sums) <= 1.1 * min(sums), sums
    weights = 4 * sum(p.numel() for p in mlp(7, 130, 110, 5).parameters())
    assert sums[0] == pytest.approx(2 * weights, rel=0.1)  # the weights and their gradients


def end_badly(disk: str, kind: str) -> str:
    class Fails(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            assert list(Path(disk).glob(f"*-rank{rank()}/states.bin"))
            if trainer.global_step == 3 and kind != "none":
                raise {"error": LookupError, "interrupt": KeyboardInterrupt}[kind]("planned")

    make = partial(strategy, 3, optimizer="nvme", params="nvme", nvme_path=disk)
    trainer = make_trainer(make, callbacks=[Fails()])
    try:
        trainer.fit(Regression(DEEP, ADAMW), regression_loader())
    except (LookupError, KeyboardInterrupt, SystemExit) as error:
        return type(error).__name__
    return "ended"


@pytest.mark.parametrize("kind", ["none", "error", "interrupt"])
def test_files_are_gone_however_a_run_ends(kind: str, tmp_path: Path) -> None:
    for outcome in run_on_ranks(end_badly, 2, str(tmp_path), kind, expect_failure=True):
        assert outcome.value is not None, outcome.traceback
        assert (outcome.value == "ended") == (kind == "none")
    assert list(tmp_path.iterdir()) == []


SCRIPT = """
import os, signal, sys, time
from functools import partial
import torch
from lightning_zero import ZeroStrategy
from tests.support.models import Regression, regression_loader
from tests.support.runs import make_trainer

class Module(Regression):
    def on_train_batch_end(self, *_):
        if self.global_step == 2:
            print("READY", flush=True)
            sys.stdin.readline()

make = partial(ZeroStrategy, 2, offload_optimizer="nvme", nvme_path=sys.argv[1])
make_trainer(make).fit(Module(), regression_loader())
print("FINISHED", flush=True)
"""


def start(disk: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "WORLD_SIZE": "1", "RANK": "0", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(disk)],
        cwd=ROOT,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def wait_until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert any("READY" in line for line in process.stdout)


def test_two_runs_share_a_folder_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    runs = [start(tmp_path) for _ in range(2)]
    for process in runs:
        wait_until_ready(process)
    assert len(list(tmp_path.glob("*/states.bin"))) == 2
    runs[0].send_signal(signal.SIGKILL)
    runs[0].communicate()
    assert len(list(tmp_path.glob("*/states.bin"))) == 2
    run_on_ranks(end_badly, 1, str(tmp_path), "none")  # finds the dead one's files
    assert len(list(tmp_path.glob("*/states.bin"))) == 1
    output, _ = runs[1].communicate("go on\n", timeout=60)
    assert "FINISHED" in output
    assert list(tmp_path.iterdir()) == []
