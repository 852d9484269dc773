"""Which dtype each parameter has where: as model weight, as master weight.

See [Note: master weights].
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import nn

from lightning_zero.config import PrecisionPolicy

_HALF = (torch.float16, torch.bfloat16)


class ParamDtypes(NamedTuple):
    """The dtypes of one parameter: what modules compute with, and what an optimizer steps."""

    model: torch.dtype
    master: torch.dtype


def param_dtypes(module: nn.Module, policy: PrecisionPolicy) -> dict[nn.Parameter, ParamDtypes]:
    """The dtypes of all parameters of ``module``.

    Raises:
        ValueError: if an entry of ``keep_fp32`` fits nothing, or a parameter is in the other half
            precision than the policy.
    """
    named = named_in(module, policy.keep_fp32)
    usual = {
        param
        for submodule in module.modules()
        # some of torch.nn.utils work in a hook of the module
        for worker in (submodule, *submodule._forward_pre_hooks.values())
        if isinstance(worker, policy.default_keep_fp32)
        for param in submodule.parameters()
    }
    return {
        param: _dtypes(name, param, policy, is_named=param in named, is_usual=param in usual)
        for name, param in module.named_parameters()
    }


def _dtypes(
    name: str, param: nn.Parameter, policy: PrecisionPolicy, *, is_named: bool, is_usual: bool
) -> ParamDtypes:
    own, compute = param.dtype, policy.compute_dtype
    if is_named and own in (torch.float32, *_HALF):
        return ParamDtypes(torch.float32, torch.float32)
    if own not in (torch.float32, *_HALF) or compute is None:
        return ParamDtypes(own, own)
    if own not in (torch.float32, compute):
        raise ValueError(
            f"Parameter '{name}' is in {own}, but the precision of this run computes in {compute}:"
            f" the two do not go together. Build the module in float32 or in {compute}, choose the"
            f" precision that fits {own}, or name the parameter in `keep_fp32`."
        )
    if own is torch.float32 and not is_usual:
        return ParamDtypes(policy.model_dtype or own, torch.float32)
    return ParamDtypes(own, torch.float32)


def named_in(module: nn.Module, entries: tuple[type | str, ...]) -> set[nn.Parameter]:
    """The parameters that the entries of ``keep_fp32`` name.

    Raises:
        ValueError: if an entry fits nothing.
    """
    named: set[nn.Parameter] = set()
    unused = set(entries)
    for path, submodule in module.named_modules(remove_duplicate=False):
        own = {f"{path}.{key}" if path else key: p for key, p in submodule._parameters.items()}
        for entry in entries:
            found = [p for name, p in own.items() if p is not None and _fits(entry, name, p)]
            if _fits(entry, path, submodule):
                found += submodule.parameters()
            if found:
                unused.discard(entry)
            named.update(found)
    if unused:
        missing = ", ".join(repr(e) if isinstance(e, str) else e.__name__ for e in unused)
        raise ValueError(
            f"No module or parameter fits the entries {missing} of `keep_fp32`. Names are dotted"
            " paths as in `named_parameters()`, in which wildcards like '*.router' are allowed."
        )
    return named


def _fits(entry: type | str, path: str, thing: object) -> bool:
    if isinstance(entry, str):
        return fnmatchcase(path, entry)
    return isinstance(thing, entry)
