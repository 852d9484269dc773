"""What can not be sharded, found before anything is."""

from __future__ import annotations

from collections.abc import Iterator, ValuesView
from typing import NamedTuple

import torch
from torch import Tensor, nn


def check_module(module: nn.Module) -> None:
    """Raise an error that says the way out if ``module`` can not be sharded."""
    for name, param in module.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"Parameter '{name}' has no shape yet (lazy module). Run a forward in"
                f" `configure_model` or `setup` so that"
                " it is initialised before training begins."
            )
        own_dispatch = getattr(type(param), "__torch_function__", None)
        plain = getattr(nn.Parameter, "__torch_function__", None)
        if getattr(own_dispatch, "__func__", own_dispatch) is not getattr(
            plain, "__func__", plain
        ) or (type(param.data) is not Tensor):
            raise NotImplementedError(
                f"Parameter '{name}' is a {type(param).__name__} holding a"
                f" {type(param.data).__name__}; only plain tensors can"
                " be sharded. Convert it to a plain nn.Parameter, or train with strategy='ddp'."
            )
    for name, submodule in module.named_modules():
        if isinstance(submodule, torch.jit.ScriptModule):
            raise NotImplementedError(
                f"Module '{name}' is a TorchScript module, whose use of parameters can not be"
                " followed. Pass the Python module, or train with strategy='ddp'."
            )
        if getattr(submodule, "sparse", False) and isinstance(
            submodule, nn.Embedding | nn.EmbeddingBag
        ):
            raise NotImplementedError(
                f"Module '{name}' asks for sparse gradients, which can not be sharded. Pass"
                f" `sparse=False`, or train with"
                " strategy='ddp'."
            )


def names_on_meta(module: nn.Module) -> list[str]:
    """The parameters and buffers of ``module`` that have no values."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return [name for name, tensor in tensors if tensor.is_meta]


def check_materialized(module: nn.Module) -> None:
    """Raise ``ValueError`` if parameters or buffers have no values."""
    on_meta = names_on_meta(module)
    if on_meta:
        shown = ", ".join(f"'{name}'" for name in on_meta[:5])
        more = f" and {len(on_meta) - 5} more" if len(on_meta) > 5 else ""
        raise ValueError(
            f"{shown}{more} are on the meta device: they have shapes and no values. Build these"
            " layers on a real device in `__init__` or `configure_model`, or fill them there with"
            " `to_empty(device=...)` and their `reset_parameters()`, or with loaded weights."
        )


class _Memory(NamedTuple):
    """Where a tensor lies."""

    start: int
    stop: int
    name: str
    tensor: Tensor

    @property
    def what(self) -> str:
        """The tensor in words."""
        kind = "parameter" if isinstance(self.tensor, nn.Parameter) else "tensor"
        return f"{kind} '{self.name}'"


def check_aliases(module: nn.Module, device: torch.device) -> None:
    """Raise ``NotImplementedError`` if a parameter shares memory with another tensor of the module.

    Under DDP what is written to one of them changes the other. A sharded parameter has memory of
    its own. What has yet to be moved to ``device`` is no matter: DDP's move separates it, too.
    """
    reached: list[_Memory] = []  # those that end behind the start of the one in turn
    for memory in sorted(_memories(module, device), key=lambda memory: memory[:2]):
        reached = [other for other in reached if other.stop > memory.start]
        for other in reached:
            has_param = any(isinstance(m.tensor, nn.Parameter) for m in (other, memory))
            if has_param and _overlap(other, memory):
                raise NotImplementedError(_shared(other, memory))
        reached.append(memory)


def _overlap(left: _Memory, right: _Memory) -> bool:
    """Whether two tensors have elements in common; their extents overlap (columns may not)."""
    itemsize = left.tensor.element_size()
    if itemsize != right.tensor.element_size() or (right.start - left.start) % itemsize:
        return True
    size = (max(left.stop, right.stop) - left.start) // itemsize
    is_used = torch.zeros(size, dtype=torch.bool)
    is_used.as_strided(left.tensor.shape, left.tensor.stride(), 0).fill_(True)
    offset = (right.start - left.start) // itemsize
    return bool(is_used.as_strided(right.tensor.shape, right.tensor.stride(), offset).any())


def _memories(module: nn.Module, device: torch.device) -> Iterator[_Memory]:
    """The memory of parameters, buffers and other tensors that modules hold as attributes."""
    seen: set[int] = set()
    for name, tensor in _tensors(module):
        if id(tensor) in seen or tensor.device.type != device.type or not tensor.numel():
            continue
        seen.add(id(tensor))
        if tensor.layout is not torch.strided or type(tensor) not in (Tensor, nn.Parameter):
            continue
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            _check_dense(name, tensor)
        extent = 1 + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        start = tensor.data_ptr()
        yield _Memory(start, start + extent * tensor.element_size(), name, tensor)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
    for path, submodule in module.named_modules():
        if submodule._forward_pre_hooks:
            continue  # they make such tensors anew (spectral norm)
        registered = ("_parameters", "_buffers", "_modules")
        for name, value in submodule.__dict__.items():
            if name in registered:
                continue
            held = value.values() if isinstance(value, dict) else value
            for entry in held if isinstance(held, list | tuple | ValuesView) else (value,):
                if isinstance(entry, Tensor):
                    yield (f"{path}.{name}" if path else name), entry


def _check_dense(name: str, param: nn.Parameter) -> None:
    if any(s == 0 and n > 1 for n, s in zip(param.shape, param.stride(), strict=True)):
        raise NotImplementedError(
            f"Parameter '{name}' of shape {tuple(param.shape)} and stride {param.stride()} uses the"
            " same memory for several of its elements (`expand`), so it can not be updated in"
            " place. Make it a dense tensor: nn.Parameter(tensor.contiguous())."
        )


def _shared(left: _Memory, right: _Memory) -> str:
    how = "the same memory" if left[:2] == right[:2] else "a part of their memory"
    both_are_params = isinstance(left.tensor, nn.Parameter) and isinstance(
        right.tensor, nn.Parameter
    )
    owners = [m.name.rpartition(".") for m in (left, right)]
    target, source = (f"{path}{dot}{name}" for path, dot, name in reversed(owners))
    way_out = (
        f"To tie them, use one Parameter object in both places (`module.{target} ="
        f" module.{source}`); to train them apart, give one of them a copy (`.detach().clone()`)."
        if both_are_params
        else "Read the parameter where it is needed, or keep a copy (`.detach().clone()`)."
    )
    return (
        f"The {left.what} and the {right.what} share {how}. ZeRO gives each parameter a place of"
        f" its own, so the one would not follow the other. {way_out}"
    )
