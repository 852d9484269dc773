"""Other tools that look through module calls: transforms of ``torch.func``, tracing, export."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack


def is_in_transform() -> bool:
    """Whether a transform of ``torch.func`` is under way."""
    return torch._C._functorch.maybe_current_level() is not None


@contextlib.contextmanager
def outside_of_transforms() -> Iterator[None]:
    """Inside, tensors are plain: a gather is no part of what is transformed, just as a parameter
    that a transformed function uses is a constant to it.
    """
    if not is_in_transform():
        yield
        return
    with temporarily_clear_interpreter_stack():
        yield


def tracer() -> str | None:
    """The tool that records the present module call instead of computing it, if there is one."""
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    return "torch.export" if torch.compiler.is_exporting() else None
