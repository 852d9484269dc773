"""What a parameter does when it is used outside of a module call.

[Note: parameter identity] The user's ``nn.Parameter`` objects stay in the module. While a module
call uses a unit its parameters are plain ones; at all other times their ``__class__`` is a subclass
with ``__torch_function__``, which

- answers questions about shape, dtype, device, hooks and the like directly;
- completes updates that are still on their way (replicated weights), or gathers the one parameter
  into memory of its own (sharded weights, collective), before any other use. The gather is
  differentiable: its gradient goes to the parameter;
- writes in-place changes back to the shards, at once for an operation and at the next boundary for
  an alias that was handed out (``p.data``, ``p.detach()``, views);
- serves ``p.grad`` from the sharded gradients, and takes changes of it;
- is copied and pickled as a plain, full parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils import _pytree as pytree

from lightning_zero.engine.buffer import ParamHandle
from lightning_zero.engine.transforms import outside_of_transforms
from lightning_zero.errors import ShardedParameterError

_METADATA_METHODS = frozenset(
    [
        "__hash__",
        "__len__",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "size",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "get_device",
        "is_inference",
        "is_shared",
        "is_pinned",
        "is_conj",
        "is_neg",
        "requires_grad_",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "retain_grad",
        "has_names",
        "_is_view",
        "untyped_storage",
    ]
)
_STRIDE_METHODS = frozenset({"stride", "is_contiguous", "storage_offset"})
_DIFFERENTIATORS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


class ParamAccess(Protocol):
    """How the guard reaches the values behind parameters. Implemented by the engine."""

    detaches_to_itself: bool
    """``param.detach()`` gives the parameter: a state dict is being made of shards."""

    def is_in_place(self, handle: ParamHandle) -> bool:
        """Whether a read gives the parameter's own memory."""

    def dtype_of(self, handle: ParamHandle) -> torch.dtype:
        """The dtype that the parameter has at the moment; see [Note: master weights]."""

    def read(self, handle: ParamHandle) -> Tensor:
        """The full value: the own memory if ``is_in_place``, else a copy (collective)."""

    def write(self, handle: ParamHandle, value: Tensor) -> None:
        """Set the parameter from a full value."""

    def assign(self, handle: ParamHandle, value: Tensor) -> None:
        """Set the parameter from a full value whose memory becomes the parameter's."""

    def track(self, handle: ParamHandle, value: Tensor) -> None:
        """``value`` has been handed out and may be changed by its holder."""

    def gradient(self, handle: ParamHandle) -> Tensor | None:
        """The reduced gradient, or None (collective)."""

    def set_gradient(self, handle: ParamHandle, value: Tensor | None) -> None:
        """Replace the gradient."""


class _Gone:
    """The access of parameters that were left sharded when their run ended."""

    detaches_to_itself = False

    def is_in_place(self, handle: ParamHandle) -> bool:
        return False

    def dtype_of(self, handle: ParamHandle) -> torch.dtype:
        return handle.placeholder.dtype

    def read(self, handle: ParamHandle) -> Tensor:
        raise ShardedParameterError(
            f"Parameter '{handle.fqn}' was left sharded: the run that sharded it ended with"
            f" `gather_after_fit=False` or by an"
            " exception. Load its weights from a checkpoint, or keep `gather_after_fit=True`."
        )

    def write(self, handle: ParamHandle, value: Tensor) -> None:
        if value.shape != handle.placeholder.shape:
            raise ValueError(
                f"Parameter '{handle.fqn}' has shape {tuple(handle.placeholder.shape)}, got"
                f" {tuple(value.shape)}."
            )
        release([handle])
        handle.set_data(value)

    assign = write

    def track(self, handle: ParamHandle, value: Tensor) -> None: ...

    def gradient(self, handle: ParamHandle) -> Tensor | None:
        return None

    def set_gradient(self, handle: ParamHandle, value: Tensor | None) -> None: ...


# By identity of the parameter: it is alive, since its handle holds it. Nothing is stamped on the
# parameter itself.
_guarded: dict[int, tuple[ParamHandle, ParamAccess]] = {}
_guard_classes: dict[type, type] = {}


def register(handle: ParamHandle, access: ParamAccess) -> None:
    """Prepare a parameter for guarding."""
    plain = handle.plain_class
    if plain not in _guard_classes:
        _guard_classes[plain] = type("ZeroParameter", (_Guarded, plain), {"__module__": __name__})
    handle.guard_class = _guard_classes[plain]
    _guarded[id(handle.param)] = (handle, access)


def release(handles: list[ParamHandle]) -> None:
    """Make parameters plain for good."""
    for handle in handles:
        handle.param.__class__ = handle.plain_class
        _guarded.pop(id(handle.param), None)


def abandon(handles: list[ParamHandle]) -> None:
    """Leave parameters sharded for good: every use raises :class:`ShardedParameterError`."""
    for handle in handles:
        register(handle, _Gone())
        handle.param.__class__ = handle.guard_class
        _guarded[id(handle.param)] = (handle, _Gone())


def handle_of(param: nn.Parameter) -> tuple[ParamHandle, ParamAccess] | None:
    """The handle of a parameter that is being sharded, whatever class it has at the moment."""
    return _guarded.get(id(param))


class _ReadParameter(torch.autograd.Function):
    """A parameter's full value in memory of its own; the gradient goes to the parameter."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, handle: ParamHandle, access: ParamAccess) -> Tensor:
        with torch.enable_grad():  # as where it is read: it tells what is recomputed
            return access.read(handle)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _Guarded(nn.Parameter):
    """Mixed into the class of a parameter. See [Note: parameter identity]."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DIFFERENTIATORS:
            return _differentiate(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            name = getattr(func, "__name__", "")
            if name in ("__get__", "__set__", "__delete__"):
                return _attribute(func, name, args)
            if name == "_has_compatible_shallow_copy_type":
                return func(*args, **kwargs)
            if args and isinstance(args[0], _Guarded):
                answer = _answer(func, name, args, kwargs)
                if answer is not NotImplemented:
                    return answer
            return _operate(func, name, args, kwargs)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: torch does not tell subclasses of it, and DDP reduces the parameter no more."""
        # no RuntimeError: torch's parametrizations would put other words in its place
        raise TypeError(
            f"Parameter '{_guarded[id(self)][0].fqn}': its memory can not be exchanged by `set_`"
            " while it is sharded. Parametrizations that do so are registered or removed before the"
            " run begins; values are changed by `param.data = value` or `param.copy_(value)`."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) in memo:
            return cast(nn.Parameter, memo[id(self)])
        copied = _plain_copy(self)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, proto: Any) -> Any:
        return _plain_copy(self).__reduce_ex__(proto)


def _answer(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What can be said or done without the full value; ``NotImplemented`` for everything else."""
    param = args[0]
    handle, access = _guarded[id(param)]
    if name in ("to", "cpu", "cuda") and isinstance(access, _Gone):
        return param  # the strategy's teardown moves the module to the CPU
    if name in _STRIDE_METHODS:
        return func(handle.view, *args[1:], **kwargs)
    if name in _METADATA_METHODS:
        return func(*args, **kwargs)
    if name == "element_size":
        return access.dtype_of(handle).itemsize
    if name == "detach" and access.detaches_to_itself:
        return param
    if access.is_in_place(handle):
        return NotImplemented
    if name == "data_ptr":
        raise ShardedParameterError(
            f"Parameter '{handle.fqn}' is sharded, and has no address of its own. Ask a tensor that"
            " you hold (`param.data`), or do it inside `lightning_zero.full_params`."
        )
    if name in ("__repr__", "__format__"):
        return _describe(param)
    if name == "copy_" and not (torch.is_grad_enabled() and param.requires_grad):
        return _overwrite(*args, **kwargs)
    return NotImplemented


def _overwrite(param: nn.Parameter, *args: Any, **kwargs: Any) -> nn.Parameter:
    handle, access = _guarded[id(param)]
    value = torch.empty(param.shape, dtype=access.dtype_of(handle), device=param.device)
    args = tuple(_unguarded(arg) if isinstance(arg, Tensor) else arg for arg in args)
    access.write(handle, value.copy_(*args, **kwargs))
    return param


def _plain_copy(param: nn.Parameter) -> nn.Parameter:
    handle, access = _guarded[id(param)]
    with torch._C.DisableTorchFunctionSubclass():
        value = access.read(handle)
        is_own = access.is_in_place(handle)
        copied = (value.clone() if is_own else value).as_subclass(handle.plain_class)
        copied.requires_grad_(param.requires_grad)
    return copied


def _describe(param: nn.Parameter) -> str:
    handle, access = _guarded[id(param)]
    return (
        f"Parameter '{handle.fqn}' (sharded; shape {tuple(param.shape)}, dtype"
        f" {access.dtype_of(handle)},"
        f" device {param.device};"
        " print it inside `lightning_zero.full_params`)"
    )


def _attribute(func: Callable[..., Any], kind: str, args: tuple[Any, ...]) -> Any:
    param, name = args[0], getattr(getattr(func, "__self__", None), "__name__", "")
    handle, access = _guarded[id(param)]
    if name in ("grad", "_grad"):
        if kind == "__get__":
            return access.gradient(handle)
        access.set_gradient(handle, args[1] if kind == "__set__" else None)
        return None
    if name == "dtype":
        return access.dtype_of(handle)
    if name in ("itemsize", "nbytes"):
        return access.dtype_of(handle).itemsize * (param.numel() if name == "nbytes" else 1)
    if name == "data":
        if kind == "__get__":
            return _hand_out(handle, access)
        _assign(param, args[1])
        return None
    if name in ("T", "mT", "H", "mH", "real", "imag"):
        return _operate(func, name, args, {})
    return func(*args)


def _assign(param: nn.Parameter, value: Tensor) -> None:
    """``param.data = value``; see [Note: assigned data]."""
    if value is param:
        return
    handle, access = _guarded[id(param)]
    if isinstance(value, _Guarded):
        raise RuntimeError(
            f"Parameter '{handle.fqn}' was assigned another parameter's data, which would make them"
            " one. Assign a copy: `param.data = other.detach().clone()`."
        )
    if (value.shape, value.dtype) != (param.shape, access.dtype_of(handle)):
        raise ValueError(
            f"Parameter '{handle.fqn}' has shape {tuple(param.shape)} and dtype"
            f" {access.dtype_of(handle)}, got data of shape {tuple(value.shape)} and dtype"
            f" {value.dtype}. A sharded parameter keeps both during a run."
        )
    access.assign(handle, value)


def _differentiate(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Differentiate with respect to parameters: they are meant as leaves of the graph, not as
    values.
    """
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, _Guarded)]
    handles = [_guarded[id(leaf)][0] for leaf in leaves]
    for handle in handles:
        handle.param.__class__ = handle.plain_class
    try:
        return func(*args, **kwargs)
    finally:
        for handle in handles:
            handle.param.__class__ = handle.guard_class


def _unguarded(value: Tensor) -> Tensor:
    entry = _guarded.get(id(value)) if isinstance(value, _Guarded) else None
    return value if entry is None else entry[1].read(entry[0])


def _hand_out(handle: ParamHandle, access: ParamAccess) -> Tensor:
    with outside_of_transforms():
        value = access.read(handle)
        if access.is_in_place(handle):
            value = value.detach()
    access.track(handle, value)
    return value


def _operate(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an operation on the full values and write back what it changed."""
    used: dict[int, _Use] = {}
    needs_grad = torch.is_grad_enabled() and name != "detach"

    def replace(leaf: Any) -> Any:
        if not isinstance(leaf, _Guarded):
            return leaf
        handle, access = _guarded[id(leaf)]
        if access.is_in_place(handle):
            access.read(handle)  # waits for updates that are on their way
            in_place.append((handle, access))
            return leaf
        if id(leaf) not in used:
            with outside_of_transforms():
                value = (
                    _ReadParameter.apply(leaf, handle, access)  # type: ignore[no-untyped-call]
                    if needs_grad and leaf.requires_grad
                    else access.read(handle)
                )
            used[id(leaf)] = _Use(handle, access, value, value._version, value.grad_fn)
        return used[id(leaf)].value

    in_place: list[tuple[ParamHandle, ParamAccess]] = []
    args, kwargs = pytree.tree_map(replace, (args, kwargs))
    result = func(*args, **kwargs)
    for handle, access in in_place:
        for alias in _aliases(result, handle.view):
            if alias is not handle.param:
                access.track(handle, alias)
    is_writer = _may_write(func, name, kwargs)
    for use in used.values():
        result = _after(use, result, is_writer=is_writer)
    return result


def _may_write(func: Callable[..., Any], name: str, kwargs: dict[str, Any]) -> bool:
    """Whether an operation may change what it is given without counting versions up: fused
    optimizers do, and operations that others have registered need not declare it.
    """
    if isinstance(func, OpOverload | OpOverloadPacket):
        return not str(func).startswith("aten.")
    return (name.endswith("_") and not name.endswith("__")) or "out" in kwargs


class _Use(NamedTuple):
    """A parameter's value as an operation got it."""

    handle: ParamHandle
    access: ParamAccess
    value: Tensor
    version: int
    grad_fn: Any


def _after(use: _Use, result: Any, *, is_writer: bool) -> Any:
    handle, access, value, version, grad_fn = use
    if is_writer or value._version != version:
        if value.grad_fn is not grad_fn:  # autograd has recorded the change
            raise RuntimeError(
                f"Parameter '{handle.fqn}' is a leaf that requires grad and can not be changed in"
                f" place outside of torch.no_grad()."
            )
        access.write(handle, value.detach())
    if result is value:
        return handle.param
    if not value.requires_grad and _aliases(result, value):
        access.track(handle, value)
    return result


def _aliases(result: Any, value: Tensor) -> list[Tensor]:
    """The tensors in a result that share the memory of ``value``."""
    storage = value.untyped_storage()._cdata
    return [
        leaf
        for leaf in pytree.tree_leaves(result)
        if isinstance(leaf, Tensor)
        and leaf.layout is torch.strided
        and not torch._C._functorch.is_functorch_wrapped_tensor(leaf)
        and leaf.untyped_storage()._cdata == storage
    ]
