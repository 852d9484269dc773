"""Other tools that look through module calls: transforms of ``torch.func``, tracing, export."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack


def is_in_transform() -> bool:
    """Whether a transform of ``torch.func`` is under way."""
    return torch._C._functorch.maybe_current_level() is not None


_NOTHING = contextlib.nullcontext()


def outside_of_transforms() -> AbstractContextManager[object]:
    """Inside, tensors are plain: a gather is no part of what is transformed, just as a parameter
    that a transformed function uses is a constant to it.
    """
    return temporarily_clear_interpreter_stack() if is_in_transform() else _NOTHING


def tracer() -> str | None:
    """The tool that records the present module call instead of computing it, if there is one."""
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    return "torch.export" if torch.compiler.is_exporting() else None
