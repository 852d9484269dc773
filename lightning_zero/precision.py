"""``ZeroPrecision``: Lightning's precision plugins for sharded weights and gradients.

Lightning chooses the plugin by the type of its own strategies, so ours gets a generic one and turns
it into a subclass of the same name (checkpoints store the plugin's state under that name).

| precision   | model weights            | masters, optimizer state | sent in | added up in |
|-------------|--------------------------|--------------------------|---------|-------------|
| 32-true     | fp32                     | the same tensors         | fp32    | fp32        |
| bf16-mixed  | bf16, under autocast     | fp32 shards              | bf16    | fp32        |
| 16-mixed    | fp16, autocast, scaling  | fp32 shards              | fp16    | fp32        |
| bf16-true,  | as named                 | none                     | as      | as named    |
| 16-true     |                          |                          | named   |             |
| 64-true     | fp64                     | the same tensors         | fp64    | fp64        |
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.config import PrecisionPolicy
from lightning_zero.engine.driven import driver_of
from lightning_zero.engine.dtypes import named_in
from lightning_zero.loss_scale import LossScaler, loss_scaler_like

if TYPE_CHECKING:
    from lightning.fabric.utilities.types import Steppable
    from lightning.pytorch import LightningModule

_PLAIN_CLASSES: dict[str, type[Precision]] = {
    "32-true": Precision,
    "64-true": DoublePrecision,
    "bf16-mixed": MixedPrecision,
    "16-mixed": MixedPrecision,
    "bf16-true": HalfPrecision,
    "16-true": HalfPrecision,
}
_SHORT_NAMES: dict[Any, str] = {
    **dict.fromkeys((32, "32"), "32-true"),
    **dict.fromkeys((64, "64"), "64-true"),
    **dict.fromkeys((16, "16"), "16-mixed"),
    "bf16": "bf16-mixed",
}
_HALF_OF = {"bf16": torch.bfloat16, "16": torch.float16}
_DTYPES: dict[Any, torch.dtype] = {
    **dict.fromkeys((torch.float32, "float32", "fp32", "32"), torch.float32),
    **dict.fromkeys((torch.bfloat16, "bfloat16", "bf16", "bfp16"), torch.bfloat16),
    **dict.fromkeys((torch.float16, "float16", "fp16", "16", "half"), torch.float16),
}
# Autocast does not reach the kernels of these, which want their parameters in the dtype of the
# input or in fp32; and normalization is better done in fp32.
_USUALLY_FP32: tuple[type, ...] = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.Bilinear,
    SpectralNorm,
    ParametrizationList,
)
_LEAST = {"initial_scale_power": 0, "loss_scale_window": 1, "hysteresis": 1}
_TINY, _HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
_DTYPE_ERROR = re.compile("dtype|scalar type", re.IGNORECASE)
_classes: dict[tuple[type, type], type] = {}

PrecisionName = Literal[
    "32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "bf16", "16", "32", "64"
]
DtypeName = Literal["fp32", "bf16", "fp16"]


class ZeroPrecision(Precision):
    """Precision of a sharded run. ``Trainer(precision=...)`` makes one with the defaults; pass one
    in ``plugins`` to choose more.

    "mixed" steps fp32 master weights, of which each rank holds its shard, whatever the module was
    built in, and computes with rounded copies under autocast. Outside of module calls a parameter
    is its master weight: read, saved and given back in fp32. Normalization layers and parametrized
    weights stay in fp32, parameters in fp64 and integers keep their dtype, and buffers are never
    cast. "true" has no masters and casts everything, as Lightning documents.

    The instance is also one of Lightning's own ``Precision``, ``MixedPrecision``, ``HalfPrecision``
    or ``DoublePrecision``.

    Args:
        precision: as for ``Trainer(precision=...)``.
        model_dtype: "fp32" keeps model weights of "mixed" in fp32 under autocast: exactly the
            numbers of DDP, with the memory and bytes of fp32. None: the half precision.
        keep_fp32: module classes, and dotted names of modules or parameters (wildcards allowed),
            that stay in fp32 in half precision: routers, heads.
        grad_dtype: what gradients are sent in, whatever they are computed and added up in. None: as
            they were computed; with accumulation under stage 1, which sends sums, in fp32.
        loss_scale: for "16-mixed", a fixed scale; 0 or None adapts it.
        initial_scale_power: an adapted scale begins with 2 to this power; 16 by default.
        loss_scale_window: steps without overflow after which the scale is doubled; 2000.
        hysteresis: overflows that halve the scale once, the later ones after a raise each; 1. (The
            defaults of both are those of PyTorch and Lightning; DeepSpeed has 1000 and 2.)
        min_loss_scale: the scale is not lowered below this; 1. After 5 steps in a row that overflow
            there, training stops with an error.

    Raises:
        ValueError: for a value that is not allowed.
        MisconfigurationException: for settings that contradict each other; both are named.
    """

    policy: PrecisionPolicy

    def __init__(  # noqa: PLR0913
        self,
        precision: PrecisionName = "32-true",
        *,
        model_dtype: Literal["fp32"] | torch.dtype | None = None,
        keep_fp32: Sequence[type[nn.Module] | str] = (),
        grad_dtype: DtypeName | torch.dtype | None = None,
        loss_scale: float | None = None,
        initial_scale_power: int | None = None,
        loss_scale_window: int | None = None,
        hysteresis: int | None = None,
        min_loss_scale: float | None = None,
    ) -> None:
        name = _canonical(precision)
        knobs = {
            "initial_scale_power": initial_scale_power,
            "loss_scale_window": loss_scale_window,
            "hysteresis": hysteresis,
            "min_loss_scale": min_loss_scale,
        }
        scaler = _scaler(name, loss_scale, knobs)
        policy = _policy(name, model_dtype, keep_fp32, grad_dtype)
        # not in __new__, whose signature would hide this one from the command line
        self.__class__ = _class_for(type(self), _PLAIN_CLASSES[name])
        self._set_up(name, policy, scaler)

    def _set_up(self, name: Any, policy: PrecisionPolicy, scaler: LossScaler | None) -> None:
        self.policy = policy
        if isinstance(self, MixedPrecision):
            # the strategy puts the real device in
            MixedPrecision.__init__(self, name, "cpu", scaler)
        elif isinstance(self, HalfPrecision):
            HalfPrecision.__init__(self, name)

    def __reduce__(self) -> Any:
        # started with spawn: the class was made here and cannot be found by its name
        mixin, plain = type(self).__mro__[1:3]
        return _rebuild, (mixin, plain, self.__dict__)

    # -- to be read and logged

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied with at present; 1 without loss scaling."""
        scaler = self._scaler
        return 1.0 if scaler is None else scaler.get_scale()

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that were skipped because gradients overflowed."""
        return 0 if self._scaler is None else self._scaler.skipped_steps

    @property
    def has_overflow(self) -> bool:
        """Whether the last optimizer step was skipped because gradients overflowed."""
        return self._scaler is not None and self._scaler.has_overflow

    @property
    def _scaler(self) -> LossScaler | None:
        return getattr(self, "scaler", None)

    # -- what Lightning calls

    @override
    def connect(self, model: Any, optimizers: Any, lr_schedulers: Any) -> Any:
        """Refuse strategies that would ignore what was chosen."""
        trainer = getattr(getattr(model, "module", model), "_trainer", None)
        if trainer is not None and not hasattr(trainer.strategy, "engine"):
            raise MisconfigurationException(
                f"ZeroPrecision works with ZeroStrategy only, got"
                f" {type(trainer.strategy).__name__}. Pass Trainer(strategy='zero3'), or"
                " precision=... instead of the plugin."
            )
        if self._scaler is not None:
            self._scaler.begin_run()
        return super().connect(model, optimizers, lr_schedulers)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """As Lightning's plugin, apart from what is named in ``keep_fp32``."""
        if not (isinstance(self, HalfPrecision) and self.policy.keep_fp32):
            return super().convert_module(module)
        kept = named_in(module, self.policy.keep_fp32)
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                is_kept = tensor in kept
                tensor.data = tensor.data.to(torch.float32 if is_kept else self._half_dtype)
        return module

    @property
    def _half_dtype(self) -> torch.dtype:
        return self._desired_input_dtype  # type: ignore[attr-defined,no-any-return]

    def prepare(self, module: nn.Module, device: torch.device, *, is_trained_whole: bool) -> None:
        """Get a module ready for training, sharded or on one device, or for evaluation."""
        if isinstance(self, MixedPrecision):
            self.device = device.type
        self.convert_module(module)
        if not is_trained_whole:
            return
        # no shards that could be masters: the module itself is, as PyTorch's AMP expects
        for param in module.parameters():
            if param.dtype == self.policy.compute_dtype:
                param.data = param.data.float()

    def prepare_load(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        """Widen parameters into which wider ones are going to be loaded: masters into a module that
        was built in half precision, doubles into one that has not been converted yet.
        """
        if isinstance(self, DoublePrecision):
            self.convert_module(module)
        if self.policy.model_dtype is None:
            return
        for name, param in module.named_parameters():
            saved = state.get(name)
            if param.dtype == self.policy.compute_dtype and isinstance(saved, Tensor):
                param.data = param.data.to(saved.dtype)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Errors about dtypes get a note that says why weights are in half precision."""
        try:
            yield
        except RuntimeError as error:
            if self.policy.model_dtype is not None and _DTYPE_ERROR.search(str(error)):
                error.args = (
                    f"{error}\nUnder precision={self.precision!r} model weights are in"
                    f" {self.policy.model_dtype}. Where autocast does not cast the inputs (custom"
                    " kernels, `torch.autocast(enabled=False)`), name the module in"
                    f" ZeroPrecision({self.precision!r}, keep_fp32=[...]), or keep all weights in"
                    " fp32 with model_dtype='fp32'.",
                )
            raise

    @override
    def backward(  # type: ignore[override]  # as Lightning's own plugins
        self,
        tensor: Tensor,
        model: LightningModule,
        optimizer: Steppable | None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Run the module's backward and finish it for the engine, before anybody looks at
        gradients.

        Collective.
        """
        engine = model.trainer.strategy.engine  # type: ignore[attr-defined]
        if engine is not None:
            engine.begin_backward(self.loss_scale)
        super().backward(tensor, model, optimizer, *args, **kwargs)
        if engine is not None:
            engine.end_backward()

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip the sharded gradients of ``optimizer`` to a total 2-norm. Collective."""
        driver = driver_of(optimizer)
        if driver is None:
            super().clip_grad_by_norm(optimizer, clip_val)
        else:
            driver.engine.clip_by_norm(driver, float(clip_val))

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clamp the sharded gradients of ``optimizer``. Every rank."""
        driver = driver_of(optimizer)
        if driver is None:
            super().clip_grad_by_value(optimizer, clip_val)
        else:
            driver.engine.clip_by_value(driver, float(clip_val))


# -- from what the user chose


def _canonical(precision: Any) -> str:
    name = _SHORT_NAMES.get(precision, precision)
    if name not in _PLAIN_CLASSES:
        raise ValueError(f"`precision` must be one of {', '.join(_PLAIN_CLASSES)}, got {name!r}.")
    return str(name)


def _dtype(value: Any, option: str) -> torch.dtype | None:
    if value is None:
        return None
    if not isinstance(value, str | torch.dtype) or value not in _DTYPES:
        raise ValueError(f"`{option}` must be 'fp32', 'bf16', 'fp16' or None, got {value!r}.")
    return _DTYPES[value]


def _policy(name: str, model: Any, keep_fp32: Any, grad: Any) -> PrecisionPolicy:
    half = _HALF_OF.get(name.split("-")[0])
    compute = half if name.endswith("mixed") else None
    model_dtype, grad_dtype = _dtype(model, "model_dtype"), _dtype(grad, "grad_dtype")
    if isinstance(keep_fp32, str) or not isinstance(keep_fp32, Iterable):
        raise ValueError(f"`keep_fp32` must be a list of classes and names, got {keep_fp32!r}.")
    keep_fp32 = tuple(keep_fp32)
    for entry in keep_fp32:
        is_class = isinstance(entry, type) and issubclass(entry, nn.Module)
        if not (is_class or isinstance(entry, str)):
            raise ValueError(f"`keep_fp32` must hold module classes and names, got {entry!r}.")
    if model_dtype is not None and model_dtype not in (torch.float32, half):
        _refuse(name, "model_dtype", model, "model weights are in fp32 or in the half precision")
    if model_dtype is not None and compute is None:
        _refuse(name, "model_dtype", model, "only mixed precision has model weights of their own")
    if keep_fp32 and half is None:
        _refuse(name, "keep_fp32", keep_fp32, "nothing is in half precision")
    if half is not None and grad_dtype not in (None, torch.float32, half):
        _refuse(name, "grad_dtype", grad, "fp16 and bf16 do not go together")
    if name == "64-true" and grad_dtype is not None:
        _refuse(name, "grad_dtype", grad, "gradients in fp64 are sent in fp64")
    model_dtype = model_dtype or compute
    is_rounded = model_dtype is not None and model_dtype != torch.float32
    return PrecisionPolicy(
        compute_dtype=compute,
        model_dtype=model_dtype if is_rounded else None,
        grad_dtype=grad_dtype,
        keep_fp32=keep_fp32,
        default_keep_fp32=_USUALLY_FP32 if is_rounded else (),
    )


def _scaler(
    name: str, loss_scale: float | None, knobs: Mapping[str, float | None]
) -> LossScaler | None:
    chosen = {key: value for key, value in knobs.items() if value is not None}
    if name != "16-mixed":
        for option, value in {"loss_scale": loss_scale, **chosen}.items():
            if value is not None:
                _refuse(name, option, value, "only '16-mixed' scales losses")
        return None
    for option, least in _LEAST.items():
        _check_number(option, chosen.get(option, least), least, is_whole=True)
    _check_number("initial_scale_power", chosen.get("initial_scale_power", 0), most=127)
    _check_number("loss_scale", loss_scale or 0.0, 0)
    _check_number("min_loss_scale", chosen.get("min_loss_scale", 1.0), _TINY)
    if loss_scale:
        for option, value in chosen.items():
            raise MisconfigurationException(
                f"`loss_scale={loss_scale}` fixes the scale, so `{option}={value}` has no effect."
                " Drop one of the two; `loss_scale=0` adapts the scale."
            )
        return LossScaler(scale=loss_scale, is_dynamic=False, window=1)
    power, least_scale = chosen.get("initial_scale_power", 16), chosen.get("min_loss_scale", 1.0)
    if least_scale > 2.0**power:
        raise MisconfigurationException(
            f"`min_loss_scale={least_scale}` is larger than the scale to begin with, which"
            f" `initial_scale_power={power}` makes {2.0**power:g}."
        )
    return LossScaler(
        scale=2.0**power,
        is_dynamic=True,
        window=int(chosen.get("loss_scale_window", 2000)),
        hysteresis=int(chosen.get("hysteresis", 1)),
        min_scale=least_scale,
    )


def _check_number(
    option: str, value: Any, least: float = 0, most: float = _HUGE, *, is_whole: bool = False
) -> None:
    is_number = isinstance(value, int | float) and least <= value <= most
    if not is_number or (is_whole and value != int(value)):
        kind = "an integer" if is_whole else "a number"
        limits = f"at least {least:g}" if most == _HUGE else f"{least:g} to {most:g}"
        raise ValueError(f"`{option}` must be {kind} of {limits}, got {value!r}.")


def _refuse(precision: str, option: str, value: Any, reason: str) -> None:
    raise MisconfigurationException(
        f"`precision={precision!r}` and `{option}={value!r}` contradict each other: {reason}."
    )


# -- from Lightning's plugins


def _class_for(mixin: type, plain: type[Precision]) -> type:
    if (mixin, plain) not in _classes:
        body: dict[str, Any] = {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
        _classes[mixin, plain] = type(plain.__name__, (mixin, plain), body)
    return _classes[mixin, plain]


def _rebuild(mixin: type, plain: type[Precision], state: dict[str, Any]) -> Precision:
    plugin: Precision = object.__new__(_class_for(mixin, plain))
    plugin.__dict__.update(state)
    return plugin


def adapt_precision(plugin: Precision) -> ZeroPrecision:
    """Turn one of Lightning's precision plugins into ours, in place.

    Raises:
        MisconfigurationException: for plugins whose arithmetic is not known to work on sharded
            parameters.
    """
    if isinstance(plugin, ZeroPrecision):
        return plugin
    plain = type(plugin)
    if plain not in _PLAIN_CLASSES.values():
        raise MisconfigurationException(
            f"The precision plugin {plain.__name__} is not supported by ZeroStrategy. Supported are"
            f" {', '.join(_PLAIN_CLASSES)}: pass Trainer(precision=...) or ZeroPrecision(...)."
        )
    scaler = getattr(plugin, "scaler", None)
    ours = None if scaler is None else loss_scaler_like(scaler)
    plugin.__class__ = _class_for(ZeroPrecision, plain)
    assert isinstance(plugin, ZeroPrecision)
    plugin._set_up(plugin.precision, _policy(plugin.precision, None, (), None), ours)
    return plugin
