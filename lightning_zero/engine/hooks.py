"""Everything that is attached to the user's module, and removed from it again.

[Note: how a unit is noticed] Every module whose own parameters, or all of whose parameters, belong
to a unit has a forward pre-hook and a forward hook; the first says that the unit is needed and the
second that this call is over. In backward, tensors that autograd
saved are the witnesses: while a step runs, a saved-tensor hook marks those that live in a gathered
unit, and unpacking one brings the unit back. That needs no knowledge of what modules return, and
works for hidden outputs, gradient penalties and custom functions alike. A unit whose parameters get
no gradients is released when the gradients of its inputs have been computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from lightning_zero.engine.buffer import ParamHandle
from lightning_zero.engine.guard import handle_of
from lightning_zero.engine.units import ZeroUnit

if TYPE_CHECKING:
    from lightning_zero.engine.engine import ZeroEngine


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What a hook becomes in a copy of the module."""


def _make_nothing() -> Callable[..., None]:
    return _nothing


class _ModuleHook:
    """A hook on one module that does nothing in copies of it.

    Holds the engine and the module weakly.
    """

    def __init__(self, module: nn.Module, engine: ZeroEngine, units: list[ZeroUnit]) -> None:
        self._module, self._engine, self._units = weakref.ref(module), weakref.ref(engine), units
        self._act_uncompiled = torch.compiler.disable(
            self._act
        )  # compiled modules break their graph here

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        return self._act_uncompiled(module, *args)

    def _act(self, module: nn.Module, *args: Any) -> Any:
        raise NotImplementedError

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> Any:
        return _make_nothing, ()

    def _engine_for(self, module: nn.Module) -> ZeroEngine | None:
        return self._engine() if module is self._module() else None


class _Enter(_ModuleHook):
    def _act(self, module: nn.Module, *args: Any) -> Any:
        engine = self._engine_for(module)
        if engine is None:
            return None
        engine.calls.enter()
        watched = [unit for unit in self._units if engine.enter(unit)]
        return watch_inputs(engine, watched, *args) if watched else None


class _Leave(_ModuleHook):
    def _act(self, module: nn.Module, *args: Any) -> Any:
        engine = self._engine_for(module)
        if engine is None:
            return None
        output = args[-1]
        if engine.weights.has_storage_of_its_own:
            output = keep_no_views(engine.weights.by_storage, module, output)
        for unit in self._units:
            engine.weights.leave(unit)
        return engine.calls.leave(output)


def keep_no_views(by_storage: dict[int, ZeroUnit], module: nn.Module, output: Any) -> Any:
    """Replace views of gathered weights that outlive the call by (differentiable) copies.

    They are looked for in the output and in the attributes of the module: a module may return
    ``self.table[:n]`` or leave ``self.weight.t()`` on itself, and the unit's memory will be freed.
    """

    def is_view(value: Any) -> bool:
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return False
        if isinstance(value, nn.Parameter) and handle_of(value) is not None:
            return False
        return value.untyped_storage().data_ptr() in by_storage

    def own(value: Any) -> Any:
        return value.clone() if is_view(value) else value

    for holder in (module, output):
        attributes = getattr(holder, "__dict__", None) or {}
        for key in [key for key, value in attributes.items() if is_view(value)]:
            attributes[key] = attributes[key].clone()
    if isinstance(output, Tensor) or output is None:
        return own(output)
    return pytree.tree_map(own, output)


def watch_inputs(
    engine: ZeroEngine, units: list[ZeroUnit], args: Any, kwargs: Any
) -> tuple[Any, Any] | None:
    """Pass inputs that require grad as aliases whose gradient tells that the backward of the units
    has passed.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    watched = [
        i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    if not watched:
        return None
    missing = len(watched)
    engine_ref = weakref.ref(engine)
    for unit in units:
        unit.open_inputs += 1

    def on_grad(grad: Tensor) -> None:
        nonlocal missing
        missing -= 1
        engine = engine_ref()
        if missing or engine is None:
            return
        for unit in units:
            unit.open_inputs -= 1
            if unit.open_inputs <= 0:
                engine.weights.done(unit)

    for i in watched:
        leaves[i] = leaves[i].view_as(leaves[i])
        leaves[i].register_hook(on_grad)
    return pytree.tree_unflatten(leaves, spec)  # type: ignore[no-any-return]


def attach_module_hooks(
    root: nn.Module, engine: ZeroEngine, unit_of: dict[nn.Parameter, ZeroUnit]
) -> list[RemovableHandle]:
    """Hook every module that tells of a unit. See [Note: how a unit is noticed].

    Where weights are rounded every module is hooked: reads depend on whether a call is under way.
    """
    has_masters = any(unit.has_masters for unit in engine.units)
    handles = []
    for module in root.modules():
        units = {unit_of[p]: None for p in module.parameters(recurse=False) if p in unit_of}
        below = {unit_of[p]: None for p in module.parameters() if p in unit_of}
        if len(below) == 1 and module is not root:
            units.update(below)
        if units or has_masters:
            enter, leave = _Enter(module, engine, list(units)), _Leave(module, engine, list(units))
            handles.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, always_call=True))
    return handles


def attach_grad_hook(handle: ParamHandle, engine: ZeroEngine) -> RemovableHandle:
    """Have the engine take the parameter's gradient as soon as it has been accumulated."""
    engine_ref = weakref.ref(engine)

    def take(param: Tensor) -> None:
        engine = engine_ref()
        if engine is not None:
            engine.on_gradient(handle)

    with torch._C.DisableTorchFunctionSubclass():
        hook: RemovableHandle = handle.param.register_post_accumulate_grad_hook(take)
    return hook


class _Saved(NamedTuple):
    unit: ZeroUnit | None
    tensor: Tensor
    version: int


def watch_saved_tensors(
    engine: ZeroEngine, by_storage: dict[int, ZeroUnit]
) -> torch.autograd.graph.saved_tensors_hooks:
    """A context in which tensors saved for backward remember the gathered unit they live in."""

    def pack(tensor: Tensor) -> _Saved:
        with torch._C.DisableTorchFunctionSubclass():
            unit = None
            entry = handle_of(tensor) if isinstance(tensor, nn.Parameter) else None
            if entry is not None:  # a parameter itself, perhaps a placeholder at the moment
                unit = engine.unit_of(entry[0])
            elif tensor.layout is torch.strided:
                unit = by_storage.get(tensor.untyped_storage().data_ptr())
            # without detaching, an output saved by its own node would keep itself alive
            kept = tensor if tensor.grad_fn is None else tensor.detach()
            return _Saved(unit, kept, tensor._version)

    def unpack(saved: _Saved) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            if (
                saved.tensor._version != saved.version
            ):  # autograd leaves this check to whoever installs such hooks
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an"
                    " inplace operation:"
                    f" {tuple(saved.tensor.shape)} is at version {saved.tensor._version};"
                    f" expected version {saved.version}"
                )
            if saved.unit is not None:
                engine.need_in_backward(saved.unit)
            return saved.tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
