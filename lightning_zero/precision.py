"""The precision plugin: Lightning's own, with clipping that knows of sharded gradients.

Lightning chooses the plugin by the type of its own strategies, so ours gets a generic one and turns
it into a subclass of the same name (checkpoints store the plugin's state under that name).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.engine.optimizer import driver_of

if TYPE_CHECKING:
    from lightning.fabric.utilities.types import Steppable
    from lightning.pytorch import LightningModule

_SUPPORTED = (Precision, HalfPrecision, MixedPrecision, DoublePrecision)
_classes: dict[type, type] = {}


class ZeroPrecision(Precision):
    """Mixed into Lightning's precision plugins by :func:`adapt_precision`."""

    def __reduce__(self) -> Any:
        # started with spawn: the class was made here and cannot be found by its name
        return _rebuild, (type(self).__mro__[2], self.__dict__)

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
            engine.begin_backward()
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


def _rebuild(plain: type[Precision], state: dict[str, Any]) -> Precision:
    plugin = plain.__new__(plain)
    plugin.__dict__.update(state)
    return adapt_precision(plugin)


def adapt_precision(plugin: Precision) -> Precision:
    """Turn one of Lightning's precision plugins into ours, in place.

    Raises:
        MisconfigurationException: for plugins whose arithmetic is not known to work on sharded
            parameters.
    """
    plain = type(plugin)
    if isinstance(plugin, ZeroPrecision):
        return plugin
    if getattr(plugin, "scaler", None) is not None:
        raise MisconfigurationException(
            "`precision='16-mixed'` (loss scaling) is not supported by ZeroStrategy yet. Use"
            " 'bf16-mixed' or '32-true'."
        )
    if plain not in _SUPPORTED:
        raise MisconfigurationException(
            f"The precision plugin {plain.__name__} is not supported by ZeroStrategy. Supported"
            f" are the plugins behind"
            " '32-true', 'bf16-mixed', 'bf16-true', '16-true' and '64-true'."
        )
    if plain not in _classes:
        body: dict[str, Any] = {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
        _classes[plain] = type(plain.__name__, (ZeroPrecision, plain), body)
    plugin.__class__ = _classes[plain]
    return plugin
