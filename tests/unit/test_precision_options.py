"""What can be chosen about precision, and which choices contradict each other."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from torch import nn

from lightning_zero import ZeroPrecision
from lightning_zero.loss_scale import loss_scaler_like

KNOBS = {
    "initial_scale_power": 8,
    "loss_scale_window": 10,
    "hysteresis": 2,
    "min_loss_scale": 2.0,
}
CLASSES = {
    "32-true": Precision,
    "64-true": DoublePrecision,
    "bf16-mixed": MixedPrecision,
    "16-mixed": MixedPrecision,
    "bf16-true": HalfPrecision,
    "16-true": HalfPrecision,
}
SHORT = {16: "16-mixed", "16": "16-mixed", "bf16": "bf16-mixed", 32: "32-true", "64": "64-true"}


def without_scaling(option: str, value: Any) -> list[tuple[str, dict[str, Any], str]]:
    return [
        (precision, {option: value}, precision) for precision in CLASSES if precision != "16-mixed"
    ]


# (precision, options, what the message has to name besides the option)
CONTRADICTIONS: list[tuple[str, dict[str, Any], str]] = [
    *without_scaling("loss_scale", 128),
    *without_scaling("loss_scale", 0),
    *(case for knob, value in KNOBS.items() for case in without_scaling(knob, value)),
    *(
        ("16-mixed", {knob: value, "loss_scale": 128}, "loss_scale=128")
        for knob, value in KNOBS.items()
    ),
    ("bf16-mixed", {"grad_dtype": "fp16"}, "bf16-mixed"),
    ("bf16-true", {"grad_dtype": torch.float16}, "bf16-true"),
    ("16-mixed", {"grad_dtype": "bf16"}, "16-mixed"),
    ("16-true", {"grad_dtype": torch.bfloat16}, "16-true"),
    ("64-true", {"grad_dtype": "fp32"}, "64-true"),
    ("bf16-mixed", {"model_dtype": "fp16"}, "bf16-mixed"),
    ("16-mixed", {"model_dtype": "bf16"}, "16-mixed"),
    *(
        (precision, {"model_dtype": dtype}, precision)
        for precision in ("32-true", "64-true", "16-true", "bf16-true")
        for dtype in ("fp32", "bf16", "fp16")
    ),
    ("32-true", {"keep_fp32": ["head"]}, "32-true"),
    ("64-true", {"keep_fp32": [nn.Linear]}, "64-true"),
    ("16-mixed", {"min_loss_scale": 2.0**17}, "initial_scale_power=16"),
    ("16-mixed", {"min_loss_scale": 257, "initial_scale_power": 8}, "initial_scale_power=8"),
]


def described(case: Any) -> str:
    return ",".join(f"{k}={v}" for k, v in case.items()) if isinstance(case, dict) else str(case)


@pytest.mark.parametrize(("precision", "options", "other"), CONTRADICTIONS, ids=described)
def test_contradictory_settings_are_refused_and_both_named(
    precision: Any, options: dict[str, Any], other: str
) -> None:
    with pytest.raises(MisconfigurationException) as refusal:
        ZeroPrecision(precision, **options)
    option = next(iter(options))
    assert f"`{option}=" in str(refusal.value)
    assert other in str(refusal.value)


WRONG_VALUES: list[dict[str, Any]] = [
    {"precision": "fp8"},
    {"precision": None},
    {"model_dtype": "int8"},
    {"model_dtype": torch.float64},
    {"grad_dtype": "fp8"},
    {"grad_dtype": torch.int32},
    {"keep_fp32": [3]},
    {"keep_fp32": [nn.Linear(1, 1)]},
    {"keep_fp32": [int]},
    {"keep_fp32": "head"},  # as a sequence it would be the names 'h', 'e', 'a', 'd'
    {"loss_scale": -1},
    {"loss_scale": math.nan},
    {"loss_scale": math.inf},
    {"initial_scale_power": -1},
    {"initial_scale_power": 1.5},
    {"initial_scale_power": 200},  # more than fp32 holds
    {"loss_scale_window": 0},
    {"loss_scale_window": 2.5},
    {"hysteresis": 0},
    {"hysteresis": "x"},
    {"min_loss_scale": 0},
    {"min_loss_scale": -1.0},
    {"min_loss_scale": math.nan},
]


@pytest.mark.parametrize("options", WRONG_VALUES, ids=described)
def test_a_wrong_value_is_refused_by_name(options: dict[str, Any]) -> None:
    (option,) = options
    with pytest.raises(ValueError, match=f"`{option}`"):
        ZeroPrecision(**{"precision": "16-mixed", **options})


@pytest.mark.parametrize(
    ("half", "names"),
    [
        ("16-mixed", ("float16", "fp16", "16", "half", torch.float16)),
        ("bf16-mixed", ("bfloat16", "bf16", torch.bfloat16)),
    ],
)
def test_dtypes_are_taken_by_name_and_as_such(half: Any, names: tuple[Any, ...]) -> None:
    dtype = names[-1]
    for name in names:
        policy = ZeroPrecision(half, model_dtype=name, grad_dtype=name).policy
        assert (policy.model_dtype, policy.grad_dtype) == (dtype, dtype)
    for fp32 in ("float32", "fp32", "32", torch.float32):
        policy = ZeroPrecision(half, model_dtype=fp32, grad_dtype=fp32).policy  # type: ignore[arg-type]
        assert (policy.compute_dtype, policy.model_dtype) == (dtype, None)
        assert policy.grad_dtype is torch.float32


def test_defaults_are_those_of_lightning() -> None:
    plugin = ZeroPrecision("16-mixed")
    scaler, pytorchs = plugin.scaler, torch.amp.GradScaler("cpu")  # type: ignore[attr-defined]
    assert pytorchs.state_dict().items() <= scaler.state_dict().items()
    assert (plugin.loss_scale, plugin.skipped_steps, plugin.has_overflow) == (2**16, 0, False)
    assert ZeroPrecision("16-mixed", loss_scale=0).loss_scale == 2**16
    assert ZeroPrecision("16-mixed", loss_scale=100).loss_scale == 100
    assert ZeroPrecision("16-mixed", initial_scale_power=3).loss_scale == 8
    assert ZeroPrecision("bf16-mixed").loss_scale == 1


@pytest.mark.parametrize("precision", CLASSES)
def test_it_is_lightnings_plugin_too(precision: Any) -> None:
    plugin = ZeroPrecision(precision)
    plain = CLASSES[precision]
    assert isinstance(plugin, ZeroPrecision)
    assert isinstance(plugin, plain)
    # the key under which Lightning keeps the plugin's state in checkpoints
    assert plugin.__class__.__qualname__ == plain.__qualname__
    assert plugin.precision == precision


@pytest.mark.parametrize("short", SHORT)
def test_short_names_mean_what_they_mean_to_the_trainer(short: Any) -> None:
    assert ZeroPrecision(short).precision == SHORT[short]


@pytest.mark.parametrize("precision", CLASSES)
def test_a_plugin_can_be_pickled(precision: Any) -> None:
    options = {} if precision in ("32-true", "64-true") else {"keep_fp32": ["head", nn.Linear]}
    plugin = ZeroPrecision(precision, **options)  # type: ignore[arg-type]
    copy = pickle.loads(pickle.dumps(plugin))
    assert type(copy) is type(plugin)
    assert copy.policy == plugin.policy
    assert copy.state_dict() == plugin.state_dict()


def test_settings_of_pytorchs_scaler_are_taken_over() -> None:
    theirs = torch.amp.GradScaler("cpu", 2.0**5, 4.0, 0.25, 3)
    ours = loss_scaler_like(theirs)
    assert theirs.state_dict().items() <= ours.state_dict().items()
    assert loss_scaler_like(ours) is ours


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is not switched off")
def test_a_scaler_for_cuda_switches_itself_off_on_cpu_and_is_replaced() -> None:
    with pytest.warns(UserWarning, match="Disabling"):
        theirs = torch.amp.GradScaler("cuda")
    assert loss_scaler_like(theirs).state_dict() == ZeroPrecision("16-mixed").state_dict()


class HomeMadeScaler(torch.amp.GradScaler):
    pass


@pytest.mark.parametrize(
    ("scaler", "word"),
    [
        (HomeMadeScaler("cpu"), r"HomeMadeScaler.*ZeroPrecision\("),
        (torch.amp.GradScaler("cpu", enabled=False), r"enabled=False.*loss_scale=1"),
    ],
)
def test_scalers_that_can_not_be_followed_are_refused(scaler: Any, word: str) -> None:
    with pytest.raises(MisconfigurationException, match=word):
        loss_scaler_like(scaler)
