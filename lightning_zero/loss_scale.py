"""Loss scaling for fp16: one scale for all ranks, lowered when gradients overflow.

Micikevicius et al., "Mixed Precision Training", section 3.2; the knobs are those of DeepSpeed's
dynamic loss scaler.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from typing_extensions import override

from lightning_zero.engine.driven import driver_of
from lightning_zero.errors import LossScaleError

_MAX_FP32 = torch.finfo(torch.float32).max
_PATIENCE = 5
"""Steps in a row that may overflow at a scale that can not be lowered."""


class LossScaler(torch.amp.GradScaler):
    """Scales losses, skips steps whose gradients overflowed, and adapts the scale.

    A drop-in for PyTorch's scaler. Gradients of sharded optimizers are never scaled when they rest
    (see [Note: gradient dtypes]), so :meth:`unscale_` only looks for overflow, on all ranks at
    once, and optimizers may be stepped and the scale updated in any order.

    Args:
        scale: the first scale.
        is_dynamic: whether the scale may change.
        window: steps without overflow after which the scale is raised.
        hysteresis: overflows that lower the scale once: the first ``hysteresis - 1`` after a raise
            only skip the step.
        min_scale: the scale is not lowered below this.
        growth_factor, backoff_factor: what the scale is multiplied with when it is raised and
            lowered.

    Attributes:
        skipped_steps: optimizer steps that were skipped so far.
        has_overflow: whether the last one was.
    """

    def __init__(
        self,
        *,
        scale: float,
        is_dynamic: bool,
        window: int,
        hysteresis: int = 1,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
    ) -> None:
        super().__init__("cpu", scale, growth_factor, backoff_factor, window)
        self._value = float(scale)
        self._is_dynamic, self._min_scale = is_dynamic, float(min_scale)
        self._hysteresis = self._remaining = hysteresis
        self._num_good = self._num_stuck = 0
        self._overflows: dict[int, bool] = {}
        self._suspect: Optimizer | None = None
        self.skipped_steps = 0
        self.has_overflow = False

    # -- what is done with losses and gradients

    @override
    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or losses, by the scale (in fp32, where a half would overflow)."""

        def scaled(value: Tensor) -> Tensor:
            value = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
            return value * torch.full((), self._value, dtype=torch.float32, device=value.device)

        return pytree.tree_map_only(Tensor, scaled, outputs)

    @override
    def unscale_(self, optimizer: Optimizer) -> None:
        """Look for inf and NaN in the gradients of an optimizer. Collective if it is sharded."""
        driver, key = driver_of(optimizer), _key(optimizer)
        if key in self._overflows:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update()."
            )
        if driver is None:
            self._overflows[key] = self._unscale_plain(optimizer)
        else:
            self._overflows[key] = not math.isfinite(driver.engine.grad_norm(driver).item())
        if self._overflows[key]:
            self._suspect = optimizer

    def _unscale_plain(self, optimizer: Optimizer) -> bool:
        grads = [
            param.grad
            for group in optimizer.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        found = False
        for device in {grad.device for grad in grads}:
            inverse = torch.full((), 1.0 / self._value, device=device)
            overflow = torch.zeros((), device=device)
            for dtype in {grad.dtype for grad in grads}:
                same = [g for g in grads if g.device == device and g.dtype == dtype]
                if same:
                    torch._amp_foreach_non_finite_check_and_unscale_(same, overflow, inverse)
            found |= bool(overflow.item())
        return found

    @override
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer, unless its gradients overflowed on any rank."""
        if "closure" in kwargs:
            raise RuntimeError("Closures are not supported together with loss scaling.")
        key = _key(optimizer)
        if key not in self._overflows:
            self.unscale_(optimizer)
        return None if self._overflows[key] else optimizer.step(*args, **kwargs)

    @override
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapt the scale to what the steps since the last update have found.

        Raises:
            LossScaleError: if gradients overflow again and again at the least scale.
        """
        overflows, self._overflows = self._overflows, {}
        if new_scale is not None:
            self._value = float(new_scale)
            return
        if not overflows:
            raise RuntimeError("No optimizer has been stepped or unscaled since the last update().")
        self.has_overflow = any(overflows.values())
        if self.has_overflow:
            self.skipped_steps += 1
            self._num_good = 0
            self._lower()
        else:
            self._num_good, self._num_stuck = self._num_good + 1, 0
            if self._is_dynamic and self._num_good >= self._growth_interval:
                self._raise()

    def _lower(self) -> None:
        if not self._is_dynamic or self._value <= self._min_scale:
            self._num_stuck += 1
            if self._num_stuck >= _PATIENCE:
                self._give_up()
        elif self._remaining > 1:
            self._remaining -= 1
        else:
            self._value = max(self._value * self._backoff_factor, self._min_scale)

    def _raise(self) -> None:
        self._num_good, self._remaining = 0, self._hysteresis
        if self._value * self._growth_factor <= _MAX_FP32:
            self._value *= self._growth_factor

    def _give_up(self) -> None:
        driver = driver_of(self._suspect)
        names = [] if driver is None else driver.engine.non_finite_gradients(driver)
        where = f" Parameters with such gradients: {', '.join(names)}." if names else ""
        least = "the least loss scale" if self._is_dynamic else "the fixed loss scale"
        raise LossScaleError(
            f"Gradients were infinite or NaN in {self._num_stuck} optimizer steps in a row at"
            f" {least}, {self._value:g} ({self.skipped_steps} steps skipped so far).{where}"
            " A smaller scale would not help: look for NaN in the data and the loss, lower the"
            " learning rate, or train with precision='bf16-mixed', which needs no scaling."
            + ("" if self._is_dynamic else " Or let the scale adapt: `loss_scale=0`.")
        )

    def begin_run(self) -> None:
        """Forget what a run that broke off between unscaling and updating has left."""
        self._overflows.clear()

    # -- reading, saving

    @override
    def get_scale(self) -> float:
        """The present scale."""
        return self._value

    @override
    def _get_growth_tracker(self) -> int:
        return self._num_good

    @override
    def state_dict(self) -> dict[str, Any]:
        """The state, which PyTorch's scaler can load, too."""
        return {
            "scale": self._value,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._num_good,
            "hysteresis": self._remaining,
            "skipped_steps": self.skipped_steps,
            "steps_at_min_scale": self._num_stuck,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state, PyTorch's or ours. The knobs stay as they were chosen now, and
        so does a fixed scale.
        """
        if not state_dict:  # saved without scaling
            return
        if self._is_dynamic:
            self._value = float(state_dict["scale"])
        self._num_good = int(state_dict["_growth_tracker"])
        self._remaining = min(int(state_dict.get("hysteresis", self._hysteresis)), self._hysteresis)
        self.skipped_steps = int(state_dict.get("skipped_steps", 0))
        self._num_stuck = int(state_dict.get("steps_at_min_scale", 0))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_overflows": {}, "_suspect": None}


def _key(optimizer: Optimizer) -> int:
    """The same for an optimizer and for Lightning's wrapper around it."""
    driver = driver_of(optimizer)
    return id(optimizer if driver is None else driver.user)


def loss_scaler_like(scaler: torch.amp.GradScaler) -> LossScaler:
    """A :class:`LossScaler` with the settings of one of PyTorch's.

    Raises:
        MisconfigurationException: for scalers of other classes and for switched-off ones.
    """
    if isinstance(scaler, LossScaler):
        return scaler
    if not type(scaler).__module__.startswith("torch."):
        raise MisconfigurationException(
            f"The scaler {type(scaler).__name__} can not be used with ZeroStrategy: gradients are"
            " sharded. Pass ZeroPrecision('16-mixed', loss_scale=..., ...) in `plugins`, or a"
            " `torch.amp.GradScaler`, whose settings are taken over."
        )
    if not scaler.is_enabled():
        if scaler._device == "cuda" and not torch.cuda.is_available():  # switched itself off
            return default_loss_scaler()
        raise MisconfigurationException(
            "The GradScaler is switched off (`enabled=False`), but '16-mixed' needs loss scaling."
            " For a fixed scale of 1 pass ZeroPrecision('16-mixed', loss_scale=1) in `plugins`."
        )
    scale = scaler.get_scale()
    return LossScaler(
        scale=scale,
        is_dynamic=True,
        window=scaler.get_growth_interval(),
        min_scale=min(1.0, scale),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
    )


def default_loss_scaler() -> LossScaler:
    """The settings with which Lightning's '16-mixed' begins."""
    return LossScaler(scale=2.0**16, is_dynamic=True, window=2000)
