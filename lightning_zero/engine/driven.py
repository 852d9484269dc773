"""The class that a user's optimizer has while a driver steps its shards.

[Note: what becomes of the user's optimizer] The object stays the optimizer: its attributes, its
``param_groups`` with the module's own parameters, its hooks, its schedulers and its class, of which
it gets a subclass of the same layout. The methods of the user's class run on the object itself:
during a step its groups and its state are those of this rank's shards (the segments), at all other
times ``state`` shows full tensors ([Note: the state that users see]). ``state_dict`` and
``load_state_dict`` of the user's class and the hooks around them write and read its own format.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from lightning_zero.engine.optimizer import OptimizerDriver

DRIVER = "_zero_driver"
_classes: dict[type, type] = {}


def driver_of(optimizer: Any) -> OptimizerDriver | None:
    """The driver of an optimizer, or of Lightning's wrapper around it."""
    return getattr(optimizer, DRIVER, None)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """All parameters of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def check_methods(user: Optimizer) -> None:
    """Raise ``NotImplementedError`` if methods of the object itself were replaced, which would
    step it without its driver. Schedulers replace ``step`` by one that counts, and are expected.
    """
    for name in ("step", "zero_grad", "add_param_group", "state_dict", "load_state_dict"):
        method, own = user.__dict__.get(name), getattr(type(user), name)
        if getattr(method, "_wrapped_by_lr_sched", False):
            method = method.__wrapped__  # type: ignore[union-attr]
        if method is not None and inspect.unwrap(method) is not inspect.unwrap(own):
            raise NotImplementedError(
                f"`{name}` of the {type(user).__name__} object was replaced before training began,"
                " and what replaced it can not step shards. Override it in a subclass, or register"
                " a hook (register_step_pre_hook, register_step_post_hook, ...)."
            )


def drive(user: Optimizer, driver: OptimizerDriver) -> None:
    """Let ``driver`` step ``user`` from now on."""
    user.__dict__.pop("step", None)  # schedulers wrap it; ours tells them itself
    # gradients are unscaled here, never by a fused kernel
    user.__dict__.pop("_step_supports_amp_scaling", None)
    user.__dict__[DRIVER] = driver
    user.__class__ = _driven_class(type(user))


def overrides(plain: type, name: str) -> bool:
    """Whether the user's class has a method of its own in place of torch's."""
    return getattr(plain, name) is not getattr(Optimizer, name)


def bound_step(plain: type, user: Optimizer) -> Callable[..., Any]:
    """The ``step`` of the user's class without what torch has put around it, which calls hooks."""
    step: Any = plain.step  # type: ignore[attr-defined]
    # the code tells torch's wrapper from one that was put around it and copies its attributes
    if getattr(step, "__code__", None) is _step.__code__:
        step = step.__wrapped__
    # what somebody has put in its place (a mock) need not be a function
    return step.__get__(user, plain) if hasattr(step, "__get__") else step  # type: ignore[no-any-return]


def _driven_class(plain: type) -> type:
    # Methods in the class itself: another base would change the layout of some classes (ABC's), and
    # an object can not change its layout.
    if plain not in _classes:
        names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
        _classes[plain] = type(plain.__name__, (plain,), {**_METHODS, **names})
    return _classes[plain]


# Overrides of a driven optimizer. `self` may be Lightning's wrapper, which passes reads on.


def _unhooked_step(self: Any, *args: Any, **kwargs: Any) -> Any:
    driver: OptimizerDriver = getattr(self, DRIVER)
    driver.user._opt_called = True  # type: ignore[attr-defined]  # LRScheduler looks for it
    return driver.step(*args, **kwargs)


# torch calls the hooks around it, with the user's object, and names it in profiles
_unhooked_step.__name__ = "step"
_step = Optimizer.profile_hook_step(_unhooked_step)
_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
_step.hooked = True  # type: ignore[attr-defined]


def _zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
    getattr(self, DRIVER).zero_grad(*args, **kwargs)


def _add_param_group(self: Any, param_group: dict[str, Any]) -> None:
    getattr(self, DRIVER).add_param_group(param_group)


def _state_dict(self: Any) -> dict[str, Any]:
    state: dict[str, Any] = getattr(self, DRIVER).state.state_dict()
    return state


def _load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
    getattr(self, DRIVER).state.load_state_dict(state_dict)


def _reduce(self: Any, proto: Any) -> Any:
    """Copies and pickles are plain optimizers with the full state. Collective."""
    driver: OptimizerDriver = getattr(self, DRIVER)
    state = driver.user.__getstate__()
    state["state"] = driver.state.plain()
    return _new, (driver.plain_class,), state


def _new(plain: Any) -> Any:
    return plain.__new__(plain)


_METHODS: dict[str, Any] = {
    "step": _step,
    "zero_grad": _zero_grad,
    "add_param_group": _add_param_group,
    "state_dict": _state_dict,
    "load_state_dict": _load_state_dict,
    "__reduce_ex__": _reduce,
}
