"""fp16 loss scaling as the Trainer knows it: Lightning's own plugin, other fits, checkpoints."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_zero import ZeroPrecision
from tests.distributed.test_loss_scaling import (
    INF,
    MOMENTUM,
    Faulty,
    Step,
    Watch,
    compared,
    fit,
    last_rank,
    lightnings,
    loader,
    scaled,
)
from tests.support.compare import assert_same
from tests.support.distributed import distributed
from tests.support.runs import DDP, STAGES, make_trainer

# -- plugins


@pytest.mark.parametrize("stage", STAGES)
@distributed()
def test_lightnings_plugin_is_ours_with_the_defaults(stage: str) -> None:
    make = partial(Faulty, last_rank(1))
    got, trainer = fit(stage, MixedPrecision("16-mixed", "cpu"), make, range(3))
    assert isinstance(trainer.precision_plugin, ZeroPrecision)
    assert trainer.precision_plugin.loss_scale == 2**15
    want, _ = fit(stage, ZeroPrecision("16-mixed"), make, range(3))
    assert_same(compared(got), compared(want), exact=True, label=stage)


@distributed()
def test_another_strategy_does_not_take_our_plugin() -> None:
    trainer = make_trainer(DDP, plugins=[scaled()])
    with pytest.raises(MisconfigurationException, match="ZeroPrecision works with ZeroStrategy"):
        trainer.fit(Faulty(), loader(range(2)))


@pytest.mark.parametrize("stage", STAGES)
@distributed()
def test_a_second_fit_goes_on_with_the_scale(stage: str) -> None:
    plugin, make = scaled(), partial(Faulty, last_rank(1))
    fit(stage, plugin, make, range(3))
    steps, _ = fit(stage, plugin, make, range(3))
    assert [s.scale / 2**10 for s in steps] == [0.5, 0.25, 0.25]
    assert [s.skipped for s in steps] == [1, 2, 2]


def four_and_a_quarter() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 2.0**5, 4.0, 0.25, 3))


@distributed()
def test_a_grad_scaler_in_lightnings_plugin_keeps_its_settings() -> None:
    faulty = partial(Faulty, {(1, 4): INF}, multiplies=True)
    want, _ = fit(DDP, four_and_a_quarter(), faulty, range(9))
    assert [s.scale for s in want] == [32, 32, 128, 128, 32, 32, 32, 128, 128]
    for stage in STAGES:
        got, trainer = fit(stage, four_and_a_quarter(), faulty, range(9))
        assert [s.scale for s in got] == [s.scale for s in want]
        assert trainer.precision_plugin.loss_scale == 128  # type: ignore[attr-defined]
        # weights in half precision are rounded once more
        assert_same([s.lrs for s in got], [s.lrs for s in want], exact=True, label=stage)


# -- saving


def saved(trainer: Any, path: Path) -> Path:
    """Save on all ranks."""
    trainer.save_checkpoint(path)
    return path


def scaler_at_start(trainer: Any) -> dict[str, Any]:
    (watch,) = (callback for callback in trainer.callbacks if isinstance(callback, Watch))
    return watch.scaler_at_start


@pytest.mark.parametrize("stage", STAGES)
@distributed()
def test_scale_and_counters_go_on_from_a_checkpoint(stage: str, tmp_path: Path) -> None:
    def plugin(power: int = 10) -> Any:
        return scaled(power, loss_scale_window=4, hysteresis=2)

    make = partial(Faulty, last_rank(1), MOMENTUM)
    straight, _ = fit(stage, plugin(), make, range(4), max_epochs=2)
    _, first = fit(stage, plugin(), make, range(4))
    path = saved(first, tmp_path / "ours.ckpt")
    got, second = fit(stage, plugin(2), make, range(4), max_epochs=2, ckpt_path=path)
    state = scaler_at_start(second)
    assert state == first.precision_plugin.state_dict()
    # the second overflow lowers the scale only because the first is remembered
    assert (state["scale"], state["hysteresis"], state["_growth_tracker"]) == (2**10, 1, 2)
    assert [s.scale / 2**10 for s in got] == [1, 0.5, 0.5, 0.5]
    assert [s.skipped for s in got] == [1, 2, 2, 2]
    assert_same(compared(got), compared(straight[4:]), exact=True, label="second epoch")


@distributed()
def test_checkpoints_go_from_ddp_to_the_stages_and_back(tmp_path: Path) -> None:
    """Each of them goes on bitwise as if it had trained from the start."""
    make = partial(Faulty, {(1, 1): INF}, MOMENTUM, multiplies=True)

    def run(strategy: str, power: int = 8, **options: Any) -> tuple[list[Step], Any]:
        ours = partial(scaled, loss_scale_window=4, model_dtype="fp32")
        plugin = lightnings(power, window=4) if strategy == DDP else ours(power)
        return fit(strategy, plugin, make, range(4), **options)

    straight, _ = run(DDP, max_epochs=2)
    want = compared(straight[4:])
    assert [step["scale"] for step in want] == [2**7, 2**6, 2**6, 2**6]
    paths = {name: saved(run(name)[1], tmp_path / f"{name}.ckpt") for name in (DDP, *STAGES)}
    for source, target in [(DDP, stage) for stage in STAGES] + [(stage, DDP) for stage in STAGES]:
        got, trainer = run(target, 2, max_epochs=2, ckpt_path=paths[source])
        state = scaler_at_start(trainer)
        assert (state["scale"], state["_growth_tracker"]) == (2**7, 2)
        assert_same(compared(got), want, exact=True, label=f"{source} to {target}")
