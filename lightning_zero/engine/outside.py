"""Module calls outside of training and evaluation steps: sampling in callbacks, for example.

There nobody has switched autocast on, which rounded model weights need: modules get fp32 inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class OutsideCalls:
    """Runs the outermost module call in a context, and gives its outputs back in fp32, as a module
    with fp32 weights would.

    Args:
        context: makes the context; None if modules need none.
        device_type: where autocast is looked for.

    Attributes:
        is_in_step: inside a step whoever runs it has set up what is needed.
    """

    def __init__(
        self, context: Callable[[], AbstractContextManager[Any]] | None, device_type: str
    ) -> None:
        self._context, self._device_type = context, device_type
        self._depth = 0
        self._opened = contextlib.ExitStack()
        self._compute_dtype: torch.dtype | None = None
        self.is_in_step = False

    @contextlib.contextmanager
    def step(self) -> Any:
        """A step; calls that were left by an exception before are forgotten."""
        self._close()
        self.is_in_step = True
        try:
            yield
        finally:
            self.is_in_step = False

    def enter(self) -> None:
        """A module call begins."""
        if self._context is None or self.is_in_step or torch._C._current_graph_task_id() != -1:
            return
        self._depth += 1
        if self._depth == 1 and not torch.is_autocast_enabled(self._device_type):
            self._opened.enter_context(self._context())
            self._compute_dtype = torch.get_autocast_dtype(self._device_type)

    def leave(self, output: Any) -> Any:
        """A module call has ended. Returns its output."""
        if not self._depth:
            return output
        self._depth -= 1
        if self._depth or self._compute_dtype is None:
            return output
        dtype = self._compute_dtype
        self._close()
        return pytree.tree_map_only(
            Tensor, lambda value: value.float() if value.dtype == dtype else value, output
        )

    def _close(self) -> None:
        self._depth, self._compute_dtype = 0, None
        self._opened.close()
