"""Whether a module call is under way, and what calls outside of steps need.

Inside of module calls parameters are model weights, outside of them masters
([Note: master weights]). A module may have a function of its own recomputed in backward, where no
call of it is under way: there they are model weights as they were in the forward. Outside of
training and evaluation steps (sampling in callbacks) nobody has switched autocast on, which rounded
weights need: modules get fp32 inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_zero.engine.local_grads import in_backward


class ModuleCalls:
    """Counts the module calls under way. Runs the outermost one outside of a step in a context,
    and gives its outputs back in fp32, as a module with fp32 weights would.

    Args:
        context: makes the context; None if modules need none.
        device_type: where autocast is looked for.

    Attributes:
        depth: module calls under way.
    """

    def __init__(
        self, context: Callable[[], AbstractContextManager[Any]] | None, device_type: str
    ) -> None:
        self.depth = 0
        self._context, self._device_type = context, device_type
        self._is_in_step = False
        self._opened = contextlib.ExitStack()
        self._compute_dtype: torch.dtype | None = None

    @property
    def use_model_weights(self) -> bool:
        """Whether who reads a parameter now computes with it as a module does.

        A backward has gradients enabled only for what is recomputed in it, or is to be
        differentiated once more; hooks of gradients see masters.
        """
        if self.depth:
            return True
        return in_backward() and torch.is_grad_enabled()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A step, in which whoever runs it has set up what modules need."""
        self._close()
        self._is_in_step = True
        try:
            yield
        finally:
            self._is_in_step = False
            self.depth = 0  # if an exception has skipped the ends of calls

    def enter(self) -> None:
        """A module call begins."""
        self.depth += 1
        if self.depth > 1 or self._context is None or self._is_in_step:
            return
        if not in_backward() and not torch.is_autocast_enabled(self._device_type):
            self._opened.enter_context(self._context())
            self._compute_dtype = torch.get_autocast_dtype(self._device_type)

    def leave(self, output: Any) -> Any:
        """A module call has ended. Returns its output."""
        self.depth = max(0, self.depth - 1)
        dtype = self._compute_dtype
        if self.depth or dtype is None:
            return output
        self._close()
        return pytree.tree_map_only(
            Tensor, lambda value: value.float() if value.dtype == dtype else value, output
        )

    def _close(self) -> None:
        self.depth, self._compute_dtype = 0, None
        self._opened.close()
