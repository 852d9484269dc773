"""What autograd keeps of gathered weights between forward and backward: their place, not memory.

[Note: saved weights] While a module call is under way a saved-tensor hook replaces tensors that
live in a gathered unit by where they lie in it; unpacking one in backward brings the unit back.
That saves memory and is not needed for the numbers: memory is dropped and never emptied
([Note: who owns storage]), so weights that others keep are right as they are, by a custom function
on its ``ctx``, by activation checkpointing, by ``save_on_cpu`` or hooks of the user's own. Where
such hooks are installed ours stand back. Who keeps a parameter *object* would find a placeholder in
it later. So modules compute with aliases of frozen parameters there, and a unit stays whole until
the next step if somebody holds one of its objects when a call ends (aliases of trained ones would
change the order in which autograd adds). It stays as well inside of ``torch.func``, which allows no
hooks, and of ``full_params``.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_zero.engine.buffer import FlatBuffer
from lightning_zero.engine.guard import handle_of
from lightning_zero.engine.transforms import is_in_transform
from lightning_zero.engine.units import ZeroUnit
from lightning_zero.errors import ShardedParameterError

if TYPE_CHECKING:
    from lightning_zero.engine.engine import ZeroEngine


class _Kept(NamedTuple):
    """A tensor as it is. Autograd leaves the check of its version to whoever installs hooks."""

    tensor: Tensor
    version: int


class _Placed(NamedTuple):
    """A view of gathered weights; ``witness`` has its version counter and no memory."""

    unit: ZeroUnit
    buffer: FlatBuffer
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    witness: Tensor
    version: int


class _Call(NamedTuple):
    """A module call under way: our hooks if it has installed them, the frozen parameters that it
    uses aliases of, and those that somebody may keep, with how many held them before.
    """

    installed: saved_tensors_hooks | None
    replaced: list[tuple[dict[str, Any], str, nn.Parameter]]
    used: Sequence[nn.Parameter]
    num_holders: int


class SavedTensors:
    """Installs the hooks of an engine around module calls."""

    def __init__(self, engine: ZeroEngine) -> None:
        self._engine = weakref.ref(engine)
        self._by_storage = engine.weights.by_storage
        self._calls: list[_Call] = []
        self._hooks = self._pack, self._unpack

    def enter(
        self, module: nn.Module, units: Sequence[ZeroUnit], used: Sequence[nn.Parameter]
    ) -> None:
        """A call of ``module`` begins, its weights are gathered in ``units``; ``used``: those that
        it may give to saved-tensor hooks of its own.
        """
        call = _Call(None, [], (), 0)
        if is_in_transform():  # no hooks are allowed, and nothing tells when it has ended
            for unit in units:
                unit.is_in_graph = True
        elif torch.is_grad_enabled():
            top = torch._C._autograd._top_saved_tensors_default_hooks(True)
            is_foreign = top is not None and top[0] is not self._hooks[0]
            if not any(unit.num_holds for unit in units):  # else they outlast the call anyway
                if is_foreign:
                    used = list({param: None for _, _, param in self._places(module, units)})
                num_holders = _num_holders(used) if used else 0  # before others take hold here
                installed = self._install() if top is None else None
                replaced = self._replace_frozen(module, units) if is_foreign else []
                call = _Call(installed, replaced, used, num_holders)
        self._calls.append(call)

    def leave(self, units: Sequence[ZeroUnit] = ()) -> None:
        """The innermost call has ended, perhaps with an exception."""
        if not self._calls:
            return
        call = self._calls.pop()
        while call.replaced:
            params, name, param = call.replaced.pop()
            params[name] = param
            del param  # not to be counted
        if call.installed is not None:
            self._uninstall(call.installed)
        if call.used and _num_holders(call.used) > call.num_holders:
            for unit in units:
                unit.is_in_graph = True

    def _install(self) -> saved_tensors_hooks | None:
        autograd: Any = torch._C._autograd  # its stub does not know the question
        if not autograd._saved_tensors_hooks_is_enabled():
            return None
        installed = saved_tensors_hooks(*self._hooks)
        installed.__enter__()
        return installed

    def _uninstall(self, installed: saved_tensors_hooks) -> None:
        """Take our hooks away, and not those that somebody has put over them during the call and
        means to stay longer.
        """
        over = []
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        while top is not None and top[0] is not self._hooks[0]:
            over.append(top)
            torch._C._autograd._pop_saved_tensors_default_hooks()
            top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if top is not None:
            installed.__exit__()
        for pack, unpack in reversed(over):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)

    def _places(
        self, module: nn.Module, units: Sequence[ZeroUnit]
    ) -> Iterator[tuple[dict[str, Any], str, nn.Parameter]]:
        """Where a module and those below it have parameters of these units."""
        engine = self._engine()
        for below in () if engine is None else module.modules():
            params: dict[str, Any] = below._parameters
            for name, param in params.items():
                entry = None if param is None else handle_of(param)
                if entry is not None and engine is not None and engine.unit_of(entry[0]) in units:
                    yield params, name, param

    def _replace_frozen(
        self, module: nn.Module, units: Sequence[ZeroUnit]
    ) -> list[tuple[dict[str, Any], str, nn.Parameter]]:
        """Put aliases of its frozen parameters into a module; returns what has to be put back."""
        replaced = [place for place in self._places(module, units) if not place[2].requires_grad]
        for params, name, param in replaced:
            params[name] = param.detach()
        return replaced

    def explain(self, error: BaseException | None, module: nn.Module) -> None:
        """Say in an error of ``torch.func`` what its user can do about our hooks."""
        is_installed = any(call.installed is not None for call in self._calls)
        if isinstance(error, RuntimeError) and is_installed and "saved tensor hooks" in str(error):
            error.args = (
                f"`torch.func` is used in the forward of {type(module).__name__}, whose weights are"
                " sharded, and allows no hooks for saved tensors. Call the module inside"
                " `lightning_zero.full_params(module)`, or use stage 2.",
            )

    def reset(self) -> None:
        """No module call is under way, also if an exception has skipped the ends of some."""
        while self._calls:
            self.leave()

    def _pack(self, tensor: Tensor) -> _Kept | _Placed:
        with torch._C.DisableTorchFunctionSubclass():
            placed = self._place_of(tensor)
            if placed is not None:
                return placed
            # without detaching, an output saved by its own node would keep itself alive
            kept = tensor if tensor.grad_fn is None else tensor.detach()
            return _Kept(kept, tensor._version)

    def _place_of(self, tensor: Tensor) -> _Placed | None:
        if tensor.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(
            tensor
        ):
            return None
        found = self._by_storage.get(tensor.untyped_storage().data_ptr())
        view = tensor
        if found is None and isinstance(tensor, nn.Parameter):
            # a parameter itself that is a placeholder at the moment
            entry, engine = handle_of(tensor), self._engine()
            unit = None if entry is None or engine is None else engine.unit_of(entry[0])
            if entry is not None and unit is not None:
                found, view = (unit, entry[0].buffer), entry[0].view
        if found is None:
            return None
        unit, buffer = found
        if tensor.dtype != buffer.dtype or tensor.is_conj() or tensor.is_neg():
            return None  # no plain view of the buffer: it holds the memory
        witness = tensor.detach()
        witness.data = tensor.new_empty(0)
        return _Placed(
            unit,
            buffer,
            view.size(),
            view.stride(),
            view.storage_offset(),
            witness,
            tensor._version,
        )

    def _unpack(self, saved: _Kept | _Placed) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(saved, _Kept):
                _check_version(saved.tensor, saved.version, saved.tensor.shape)
                return saved.tensor
            _check_version(saved.witness, saved.version, saved.size)
            engine = self._engine()
            if engine is None or engine.is_closed:
                raise ShardedParameterError(
                    f"A backward needs weights of {saved.unit.name} as they were during a run that"
                    " has ended, and they are sharded no more. Call `backward` before `fit` ends,"
                    " or run the forward again."
                )
            engine.need_in_backward(saved.unit)
            return saved.buffer.full.as_strided(saved.size, saved.stride, saved.offset)


def _check_version(tensor: Tensor, version: int, shape: torch.Size) -> None:
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace"
            f" operation: {tuple(shape)} is at version {tensor._version}; expected version"
            f" {version}"
        )


def _num_holders(params: Collection[nn.Parameter]) -> int:
    """How many hold the parameters as objects of Python, whether or not graphs hold them too."""
    count: int = sum(map(sys.getrefcount, params))
    if _GRAPHS_HOLD_OBJECTS:
        with torch._C.DisableTorchFunctionSubclass():
            untyped: Collection[Any] = params
            count -= sum(param._use_count() > 1 for param in untyped)
    return count


def _graphs_hold_objects() -> bool:
    """Whether a tensor that is used by C++ counts as a holder of its object of Python."""
    param = nn.Parameter(torch.empty(1))
    count = sys.getrefcount(param)
    view = param.view(1)
    return view is not None and sys.getrefcount(param) > count


_GRAPHS_HOLD_OBJECTS = _graphs_hold_objects()  # versions of torch differ
