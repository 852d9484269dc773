"""Everything that is attached to the user's module, and removed from it again.

[Note: how a unit is noticed] Every module whose own parameters, or all of whose parameters, belong
to a unit has a forward pre-hook and a forward hook; the first says that the unit is needed and the
second that this call is over. In backward, the weights that autograd saved are the witnesses
([Note: saved weights]): unpacking one brings its unit back. That needs no knowledge of what modules
return, and works for hidden outputs, gradient penalties and custom functions alike. A unit all of
whose parameters are trained is released when their gradients have arrived; others make way when
their place in the window is needed.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Container
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from lightning_zero.engine.buffer import ParamHandle
from lightning_zero.engine.guard import handle_of
from lightning_zero.engine.transforms import outside_of_transforms, tracer
from lightning_zero.engine.units import ZeroUnit
from lightning_zero.errors import ShardedParameterError

if TYPE_CHECKING:
    from lightning_zero.engine.engine import ZeroEngine


class _Shed:
    """What a hook is in a copy of the module until it has been taken out of it."""

    def __call__(self, module: nn.Module, *args: Any) -> None:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook is self]:
                del hooks[key]


class _Shedder:
    """Lives as long as the memo of a deep copy and takes our hooks out of what was copied."""

    def __init__(self) -> None:
        self.places: list[tuple[dict[int, Any], int]] = []

    def __del__(self) -> None:
        for hooks, key in self.places:
            hooks.pop(key, None)


class _ModuleHook:
    """A hook on one module, which its copies do without.

    Holds the engine and the module weakly.
    """

    def __init__(self, module: nn.Module, engine: ZeroEngine, units: list[ZeroUnit]) -> None:
        self._module, self._engine, self._units = weakref.ref(module), weakref.ref(engine), units
        self._used_directly = _used_directly(module, engine, units)
        self._act_uncompiled = torch.compiler.disable(
            self._act
        )  # compiled modules break their graph here

    @property
    def __name__(self) -> str:
        # the one thing that TorchScript asks before it fails to compile the hook
        raise AttributeError(
            "a module that is being trained by ZeroStrategy has hooks that TorchScript can not"
            " compile. Script a copy, which has none: torch.jit.script(copy.deepcopy(module))"
        )

    def __deepcopy__(self, memo: dict[Any, Any]) -> _Shed:
        shedder = memo.setdefault(_Shedder, _Shedder())
        module = self._module()
        for hooks in () if module is None else (module._forward_pre_hooks, module._forward_hooks):
            copied = memo.get(id(hooks))
            if copied is not None:
                shedder.places += [(copied, key) for key, hook in hooks.items() if hook is self]
        return _Shed()

    def __reduce__(self) -> Any:
        return _Shed, ()

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        engine = self._engine() if module is self._module() else None
        if engine is None or self._is_traced(engine):
            return None
        return self._act_uncompiled(engine, module, *args)

    def _act(self, engine: ZeroEngine, module: nn.Module, *args: Any) -> Any:
        raise NotImplementedError

    def _is_traced(self, engine: ZeroEngine) -> bool:
        """Whether a tool records this call; it needs weights that are there for good."""
        tool = None if engine.saved is None else tracer()
        if tool is None:
            return False
        if not all(unit.num_holds for unit in self._units):
            raise ShardedParameterError(
                f"{tool} came to a module whose weights are sharded ({self._units[0].name}), and"
                " can not record how they are gathered. Call it inside"
                " `lightning_zero.full_params(module)` on every rank, or use stage 2."
            )
        return True


def _used_directly(
    module: nn.Module, engine: ZeroEngine, units: Container[ZeroUnit]
) -> list[nn.Parameter]:
    """The parameters that the module's forward may give to saved-tensor hooks of its own."""
    is_of_torch = type(module).__module__.startswith("torch.nn.modules.")
    if engine.saved is None or (is_of_torch and "forward" not in vars(module)):
        return []
    entries = {param: handle_of(param) for param in module.parameters()}
    return [p for p, entry in entries.items() if entry and engine.unit_of(entry[0]) in units]


class _Enter(_ModuleHook):
    def _act(self, engine: ZeroEngine, module: nn.Module, *args: Any) -> Any:
        engine.calls.enter()
        with outside_of_transforms():
            for unit in self._units:
                engine.enter(unit)
        if engine.saved is not None:
            engine.saved.enter(module, self._units, self._used_directly)
        return None


class _Leave(_ModuleHook):
    def _act(self, engine: ZeroEngine, module: nn.Module, *args: Any) -> Any:
        output = args[-1]
        if engine.saved is not None:
            if output is None:  # as it is after an exception
                engine.saved.explain(sys.exc_info()[1], module)
            engine.saved.leave(self._units)
            output = keep_no_views(engine.weights.by_storage, module, output)
        with outside_of_transforms():
            for unit in self._units:
                engine.weights.leave(unit)
        return engine.calls.leave(output)


def keep_no_views(by_storage: Container[int], module: nn.Module, output: Any) -> Any:
    """Replace views of gathered weights that outlive the call by (differentiable) copies.

    They are looked for in the output and in the attributes of the module: a module may return
    ``self.table[:n]`` or leave ``self.weight.t()`` on itself, and would hold the memory of a unit.
    """

    def is_view(value: Any) -> bool:
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return False
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            return False  # inside of a transform nothing is freed
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


class GradHook(NamedTuple):
    """A hook on the node that accumulates a gradient, which lives as long as somebody holds it."""

    node: Node
    hook: RemovableHandle

    def remove(self) -> None:
        """Take the hook off the node."""
        self.hook.remove()


def attach_grad_hooks(engine: ZeroEngine, attached: dict[ParamHandle, GradHook]) -> None:
    """Add the hooks of all parameters that require gradients and have none in ``attached`` yet."""
    with torch._C.DisableTorchFunctionSubclass():
        for handle in engine.handles:
            if handle not in attached and handle.param.requires_grad:
                attached[handle] = _attach_grad_hook(handle, engine)


def _attach_grad_hook(handle: ParamHandle, engine: ZeroEngine) -> GradHook:
    """Have the engine take the parameter's gradient as soon as it has been accumulated, after all
    hooks of the parameter. See [Note: gradients in hooks].
    """
    engine_ref = weakref.ref(engine)

    def take(*grads: Any) -> None:
        engine = engine_ref()
        if engine is not None:
            engine.on_gradient(handle)

    node = torch.autograd.graph.get_gradient_edge(handle.param).node
    return GradHook(node, node.register_hook(take))
