"""What can not be offloaded is refused before anything trains, with numbers and the way out."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

import lightning_zero.offload_devices as devices
from lightning_zero import OffloadCallback, ZeroStrategy
from lightning_zero.config import NVME_PATH
from tests.support.distributed import run_on_ranks
from tests.support.models import Regression, rank, regression_loader
from tests.support.runs import make_trainer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"stage": 2, "offload_params": "cpu"},
            "stage 3 only.*stage 2 with params='cpu'.*Pass",
        ),
        ({"offload_optimizer": "nvme"}, "pass `nvme_path=...`.*LIGHTNING_ZERO_NVME_PATH"),
        ({"offload_optimizer": "disk"}, "'cpu' or 'nvme', got 'disk'"),
        ({"nvme_path": "/tmp"}, "Nothing is offloaded"),
        ({"offload_optimizer": "cpu", "nvme_path": "/tmp"}, "nothing is offloaded to 'nvme'"),
    ],
)
def test_options_of_the_strategy(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(NVME_PATH, raising=False)
    with pytest.raises(ValueError, match=message):
        ZeroStrategy(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Nothing is offloaded"),
        ({"optimizer": "gpu"}, "got 'gpu'"),
        ({"optimizer": "nvme", "nvme_path": "/x", "delayed_update": True}, "got optimizer='nvme'"),
        ({"optimizer": "cpu", "during": "never"}, "'evaluation' or 'always', got 'never'"),
        ({"optimizer": "cpu", "during": "evaluation", "delayed_update": True}, "delayed_update"),
        ({"optimizer": "cpu", "pin_memory": -1}, "got -1"),
        ({"optimizer": "cpu", "staging_bytes": 0}, "at least 1, got 0"),
    ],
)
def test_options_of_the_callback(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OffloadCallback(**options)


def free_bytes_are(free: int) -> Any:
    return mock.patch.object(devices, "free_bytes", return_value=free)


def fit(make: Any, options: dict[str, Any], free: int | None = None) -> tuple[str, str]:
    """The error of a run with the callback."""
    trainer = make_trainer(make, callbacks=[OffloadCallback(**options)])
    disk = nullcontext() if free is None or rank() == 0 else free_bytes_are(free)
    try:
        with disk:
            trainer.fit(Regression(), regression_loader())
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        trainer.strategy.teardown()
    return "", ""


def test_the_callback_needs_the_strategy() -> None:
    ((kind, message),) = run_on_ranks(fit, 1, "ddp", {"optimizer": "cpu"})
    assert kind == MisconfigurationException.__name__
    assert "needs a ZeroStrategy, got DDPStrategy" in message
    assert "zero3" in message


def test_one_choice_only() -> None:
    make = partial(ZeroStrategy, 2, offload_optimizer="cpu")
    ((kind, message),) = run_on_ranks(fit, 1, make, {"optimizer": "cpu", "force": True})
    assert kind == MisconfigurationException.__name__
    assert "configured twice" in message
    assert "force=True" in message


def test_params_of_stage_2_by_the_callback() -> None:
    ((kind, message),) = run_on_ranks(fit, 1, "zero2", {"params": "cpu"})
    assert kind == "ValueError"
    assert "stage 3 only" in message


def test_a_disk_that_is_too_small_for_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    options = {"optimizer": "nvme", "nvme_path": str(tmp_path)}
    for kind, message in run_on_ranks(fit, 2, "zero3", options, 1000):
        assert kind == MisconfigurationException.__name__
        assert str(tmp_path) in message
        assert "are free" in message
        assert "nvme_path" in message
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_can_not_be_used(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    options = {"optimizer": "nvme", "nvme_path": str(file / "folder")}
    for kind, message in run_on_ranks(fit, 2, "zero1", options):
        assert kind == MisconfigurationException.__name__
        assert f"Rank 0 can not offload to '{file / 'folder'}'" in message
        assert "Give a folder on a local disk" in message


def infos_of(num_ranks: int, options: dict[str, Any]) -> tuple[list[str], bool]:
    """What is said in a run, and whether there was an engine."""
    said: list[str] = []
    had_engine: list[bool] = []

    class Looks(OffloadCallback):
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            had_engine.append(trainer.strategy.engine is not None)
            engine = trainer.strategy.engine
            assert engine is None or engine.offload is None

    with mock.patch.object(devices, "rank_zero_info", said.append):
        make_trainer("zero3", callbacks=[Looks(**options)]).fit(Regression(), regression_loader())
    return said, had_engine[0]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_cpu_on_the_cpu_says_so_once_and_does_nothing(num_ranks: int) -> None:
    for said, had_engine in run_on_ranks(infos_of, num_ranks, num_ranks, {"optimizer": "cpu"}):
        assert len(said) == 1
        assert "does nothing here" in said[0]
        assert "force=True" in said[0]
        assert had_engine == (num_ranks > 1)
