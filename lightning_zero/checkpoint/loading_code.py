"""Which tensors code of the user's looks at while a state dict is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

_METHODS = ("_load_from_state_dict", "load_state_dict", "set_extra_state")


def looked_at(module: nn.Module, state: Mapping[str, Any]) -> list[str]:
    """The keys of ``state`` that methods or hooks of the user's get to see, which have to be plain
    tensors. All other tensors are only copied into parameters and buffers.
    """
    prefixes = tuple(
        f"{name}." if name else "" for name, part in module.named_modules() if _looks(part)
    )
    return [key for key in state if key.startswith(prefixes)] if prefixes else []


def _looks(module: nn.Module) -> bool:
    if module._load_state_dict_pre_hooks:
        return True
    owners = (getattr(getattr(type(module), name), "__module__", "") for name in _METHODS)
    return not all(owner.startswith(("torch.", "lightning.")) for owner in owners)
