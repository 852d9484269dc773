"""The loss scale goes the way of PyTorch's GradScaler, and with hysteresis that of DeepSpeed."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_zero import LossScaleError, ZeroPrecision
from lightning_zero.loss_scale import LossScaler

INF, NAN = math.inf, math.nan
PATIENCE = 5
# What the gradient of one step is: 2**-20 stays finite at any scale that fp32 can hold.
GRADIENTS = st.lists(st.sampled_from([2.0**-20, -1.5, INF, -INF, NAN]), min_size=1, max_size=24)


@dataclass
class Training:
    """One parameter under SGD, whose gradient is whatever a step is given."""

    scaler: torch.amp.GradScaler
    param: nn.Parameter = field(default_factory=lambda: nn.Parameter(torch.ones(1)))
    has_unscaled_first: bool = False

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD([self.param], lr=0.25, momentum=0.5)

    def step(self, gradient: float) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale((self.param * gradient).sum()).backward()
        if self.has_unscaled_first:
            self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def seen(self) -> tuple[float, int, list[float]]:
        return (
            self.scaler.get_scale(),
            self.scaler.state_dict()["_growth_tracker"],
            self.param.tolist(),
        )


def train(scaler: LossScaler, gradients: list[float]) -> list[float]:
    """The scale after each step."""
    training = Training(scaler)
    scales = []
    for gradient in gradients:
        training.step(gradient)
        scales.append(scaler.get_scale())
    return scales


def ours(power: int, window: int) -> LossScaler:
    # the least scale is out of reach
    return LossScaler(scale=2.0**power, is_dynamic=True, window=window, min_scale=2.0**-64)


def pytorchs(power: int, window: int) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**power, growth_interval=window)


def dynamic(power: int = 4, **options: float) -> LossScaler:
    """A scaler as users choose it."""
    plugin = ZeroPrecision("16-mixed", initial_scale_power=power, **options)  # type: ignore[arg-type]
    return plugin.scaler  # type: ignore[attr-defined, no-any-return]


# -- PyTorch's scaler


@given(GRADIENTS, st.integers(-8, 127), st.integers(1, 5), st.booleans())
def test_without_hysteresis_it_is_pytorchs_scaler(
    gradients: list[float], power: int, window: int, has_unscaled_first: bool
) -> None:
    got = Training(ours(power, window), has_unscaled_first=has_unscaled_first)
    want = Training(pytorchs(power, window), has_unscaled_first=has_unscaled_first)
    for gradient in gradients:
        got.step(gradient)
        want.step(gradient)
        assert got.seen() == want.seen()


@given(GRADIENTS, GRADIENTS, st.integers(0, 20), st.integers(1, 5))
def test_saved_states_are_read_by_pytorchs_scaler_and_the_reverse(
    before: list[float], after: list[float], power: int, window: int
) -> None:
    got, want = Training(ours(power, window)), Training(pytorchs(power, window))
    for gradient in before:
        got.step(gradient)
        want.step(gradient)
    saved_by_us, saved_by_pytorch = got.scaler.state_dict(), want.scaler.state_dict()
    # begun with another scale, which must not be seen any more
    got.scaler, want.scaler = ours(power + 1, window), pytorchs(power + 1, window)
    got.scaler.load_state_dict(saved_by_pytorch)
    want.scaler.load_state_dict(saved_by_us)
    assert got.seen() == want.seen()
    for gradient in after:
        got.step(gradient)
        want.step(gradient)
        assert got.seen() == want.seen()


# -- DeepSpeed's rule


@dataclass
class DeepSpeedsRule:
    """What its documentation says, in terms of what has happened so far."""

    scale: float
    window: int
    hysteresis: int
    min_scale: float
    overflows_since_raise: int = 0
    good_in_a_row: int = 0

    def step(self, is_overflow: bool) -> None:
        if is_overflow:
            self.good_in_a_row = 0
            self.overflows_since_raise += 1
            if self.overflows_since_raise >= self.hysteresis:
                self.scale = max(self.scale / 2, self.min_scale)
        else:
            self.good_in_a_row += 1
            if self.good_in_a_row == self.window:
                self.scale, self.good_in_a_row, self.overflows_since_raise = self.scale * 2, 0, 0


@given(
    st.lists(st.booleans(), min_size=1, max_size=60),
    st.integers(0, 12),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([0.25, 1.0, 0.75]),
)
def test_with_hysteresis_it_follows_deepspeeds_rule(
    overflows: list[bool], power: int, window: int, hysteresis: int, min_scale: float
) -> None:
    scaler = dynamic(
        power, loss_scale_window=window, hysteresis=hysteresis, min_loss_scale=min_scale
    )
    training = Training(scaler)
    rule = DeepSpeedsRule(2.0**power, window, hysteresis, min_scale)
    for index, is_overflow in enumerate(overflows):
        try:
            training.step(INF if is_overflow else 1.0)
        except LossScaleError:
            assert rule.scale == min_scale
            assert overflows[index - PATIENCE + 1 : index + 1] == [True] * PATIENCE
            return
        rule.step(is_overflow)
        assert scaler.get_scale() == rule.scale
        assert scaler.has_overflow == is_overflow
        assert scaler.skipped_steps == sum(overflows[: index + 1])


@given(st.lists(st.booleans(), min_size=1, max_size=20), st.sampled_from([1, 1000, 128.0]))
def test_a_fixed_scale_stays(overflows: list[bool], scale: float) -> None:
    scaler = ZeroPrecision("16-mixed", loss_scale=scale).scaler  # type: ignore[attr-defined]
    training = Training(scaler)
    for is_overflow in overflows:
        before = training.param.tolist()
        try:
            training.step(INF if is_overflow else 1.0)
        except LossScaleError:
            return
        assert scaler.get_scale() == scale
        assert (training.param.tolist() == before) == is_overflow


# -- giving up


@pytest.mark.parametrize(
    ("scaler", "num_free", "scale"),
    [
        # overflows that still lower the scale, or only use up the hysteresis, are free
        (lambda: dynamic(0), 0, "1"),
        (lambda: dynamic(3), 3, "1"),
        (lambda: dynamic(6, min_loss_scale=16, hysteresis=3), 4, "16"),
        (lambda: ZeroPrecision("16-mixed", loss_scale=384).scaler, 0, "384"),  # type: ignore[attr-defined]
    ],
)
def test_five_overflows_in_a_row_at_the_least_scale_are_an_error(
    scaler: object, num_free: int, scale: str
) -> None:
    made: LossScaler = scaler()  # type: ignore[operator]
    training = Training(made)
    for _ in range(num_free + PATIENCE - 1):
        training.step(NAN)
    assert made.get_scale() == float(scale)
    training.step(1.0)  # a good step, after which the count begins again
    for _ in range(PATIENCE - 1):
        training.step(INF)
    message = rf"{PATIENCE} optimizer steps in a row at the .* loss scale, {scale} .*'bf16-mixed'"
    with pytest.raises(LossScaleError, match=message):
        training.step(INF)


def test_the_error_at_a_fixed_scale_names_the_option() -> None:
    training = Training(ZeroPrecision("16-mixed", loss_scale=8).scaler)  # type: ignore[attr-defined]
    for _ in range(PATIENCE - 1):
        training.step(INF)
    with pytest.raises(LossScaleError, match=r"the fixed loss scale, 8 .*`loss_scale=0`"):
        training.step(INF)


def test_a_raise_starts_the_hysteresis_again() -> None:
    scaler = dynamic(4, loss_scale_window=2, hysteresis=2)
    scales = train(scaler, [INF, INF, INF, 1.0, 1.0, INF, INF])
    assert scales == [16, 8, 4, 4, 8, 8, 4]


# -- saving


def test_counters_survive_saving() -> None:
    def fresh() -> LossScaler:
        return dynamic(1, loss_scale_window=3, hysteresis=3)

    for before in ([INF], [INF, INF, 1.0, 1.0], [NAN] * 4, [1.0, 1.0, 1.0, INF]):
        for after in ([INF, INF, INF], [1.0, 1.0, 1.0, INF, INF, INF]):
            straight, first, second = Training(fresh()), Training(fresh()), fresh()
            for gradient in before:
                straight.step(gradient)
                first.step(gradient)
            second.load_state_dict(pickle.loads(pickle.dumps(first.scaler.state_dict())))
            assert second.state_dict() == straight.scaler.state_dict()
            assert second.skipped_steps == sum(not math.isfinite(g) for g in before)
            assert train(second, after) == train(straight.scaler, after)  # type: ignore[arg-type]


def test_the_count_of_overflows_at_the_least_scale_survives_saving() -> None:
    first, second = dynamic(0), dynamic(0)
    train(first, [INF] * (PATIENCE - 1))
    second.load_state_dict(first.state_dict())
    with pytest.raises(LossScaleError):
        train(second, [INF])


def test_what_is_chosen_now_counts_not_what_was_saved() -> None:
    saved = dynamic(4, hysteresis=4).state_dict()
    fixed = ZeroPrecision("16-mixed", loss_scale=3).scaler  # type: ignore[attr-defined]
    fixed.load_state_dict(saved)
    assert fixed.get_scale() == 3
    stricter = dynamic(10, hysteresis=2, loss_scale_window=1)
    stricter.load_state_dict(saved)
    assert train(stricter, [INF, INF, 1.0]) == [16, 8, 16]
    stricter.load_state_dict({})  # a run without scaling
    assert stricter.get_scale() == 16


def test_a_scaler_can_be_pickled() -> None:
    scaler = dynamic(4, loss_scale_window=2, hysteresis=2)
    training = Training(scaler)
    training.step(INF)
    training.step(1.0)
    scaler.unscale_(training.optimizer)  # what is between two steps is not worth keeping
    copy = pickle.loads(pickle.dumps(scaler))
    assert copy.state_dict() == scaler.state_dict()
    assert train(copy, [1.0, INF, INF]) == [32, 32, 16]


# -- losses and gradients


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_loss_in_half_precision_is_scaled_without_overflow(shape: tuple[int, ...]) -> None:
    loss = torch.full(shape, 10.0, dtype=torch.float16, requires_grad=True)
    scaled = dynamic(16).scale(loss)
    assert scaled.sum().item() == 10 * 2**16
    scaled.sum().backward()
    assert loss.grad is not None


def test_losses_in_containers_are_scaled() -> None:
    scaled = dynamic(3).scale({"a": torch.tensor(2.0), "b": [torch.tensor(3.0), "label"]})
    assert scaled == {"a": torch.tensor(16.0), "b": [torch.tensor(24.0), "label"]}


def test_gradients_are_unscaled_once_and_in_every_dtype() -> None:
    params = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    optimizer, scaler = torch.optim.SGD(params, lr=1.0), dynamic(5)
    scaler.scale(params[0].sum() * 3 + params[1].sum() * 5).backward()
    scaler.unscale_(optimizer)
    assert [p.grad.tolist() for p in params] == [[3.0] * 3, [5.0] * 3]  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert [p.tolist() for p in params] == [[-2.0] * 3, [-4.0] * 3]
    scaler.update()
    scaler.unscale_(optimizer)  # allowed again


def test_one_of_two_optimizers_overflows() -> None:
    scaler, first, second = dynamic(4), Training(None), Training(None)  # type: ignore[arg-type]
    scaler.scale((first.param * INF + second.param).sum()).backward()
    scaler.step(first.optimizer)
    scaler.step(second.optimizer)
    assert (first.param.item(), second.param.item()) == (1.0, 0.75)
    scaler.update()
    assert (scaler.get_scale(), scaler.skipped_steps, scaler.has_overflow) == (8, 1, True)


def test_wrong_order_of_calls_is_an_error() -> None:
    training = Training(dynamic())
    with pytest.raises(RuntimeError, match="No optimizer has been stepped"):
        training.scaler.update()
    with pytest.raises(RuntimeError, match="Closures are not supported"):
        training.scaler.step(training.optimizer, closure=lambda: 0.0)
