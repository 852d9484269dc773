"""Reads and writes of single parameters from anywhere in the user's code."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection

import torch
from torch import Tensor

from lightning_zero.comm.collectives import Collectives
from lightning_zero.engine.assigned import AssignedData
from lightning_zero.engine.buffer import ParamHandle
from lightning_zero.engine.calls import ModuleCalls
from lightning_zero.engine.grads import GradReducer
from lightning_zero.engine.serving import Serving
from lightning_zero.engine.weights import Weights


class EngineAccess:
    """The :class:`~lightning_zero.engine.guard.ParamAccess` of an engine.

    Values that were handed out as copies are remembered until nobody else holds their memory, and
    changes of them are written back at the next read or boundary.
    """

    def __init__(
        self,
        weights: Weights,
        grads: GradReducer,
        calls: ModuleCalls,
        handles: Collection[ParamHandle],
        collectives: Collectives,
    ) -> None:
        self._weights, self._grads, self._calls = weights, grads, calls
        self.assigned = AssignedData(handles, weights, collectives)
        self.detaches_to_itself = False
        self.serving: Serving | None = None
        self._aliases: list[tuple[ParamHandle, weakref.ref[Tensor]]] = []
        self._handed_out: list[tuple[ParamHandle, Tensor, int, bool]] = []

    def is_in_place(self, handle: ParamHandle) -> bool:
        """See :class:`~lightning_zero.engine.guard.ParamAccess`."""
        return self._weights.is_in_place(handle)

    def dtype_of(self, handle: ParamHandle) -> torch.dtype:
        """See :class:`~lightning_zero.engine.guard.ParamAccess`."""
        buffer = handle.buffer
        return buffer.dtype if self._calls.use_model_weights else buffer.shard.dtype

    def read(self, handle: ParamHandle) -> Tensor:
        """See :class:`~lightning_zero.engine.guard.ParamAccess`."""
        self.flush()
        if self.serving is not None and self.serving.is_open and not self.is_in_place(handle):
            return self.serving.read(handle)
        return self._weights.read(handle, is_rounded=self._calls.use_model_weights)

    @torch.no_grad()
    def write(self, handle: ParamHandle, value: Tensor) -> None:
        """See :class:`~lightning_zero.engine.guard.ParamAccess`."""
        self._grads.local.refuse_write(handle)
        self.flush()
        self._weights.write(handle, value)
        self.assigned.wrote(handle, value)

    @torch.no_grad()
    def assign(self, handle: ParamHandle, value: Tensor) -> None:
        """See :class:`~lightning_zero.engine.guard.ParamAccess`."""
        self.flush()
        value = value.detach()
        self.assigned.assign(handle, value)
        self._weights.write(handle, value)

    def track(self, handle: ParamHandle, value: Tensor) -> None:
        """See :class:`~lightning_zero.engine.guard.ParamAccess`."""
        if self.is_in_place(handle):
            self._aliases.append((handle, weakref.ref(value)))
            return
        # version -1: written back once in any case, for changes that no counter shows (numpy)
        version = value._version if self._grads.local.is_accumulating(handle) else -1
        self._handed_out.append((handle, value, version, False))

    def gradient(self, handle: ParamHandle) -> Tensor | None:
        """See :class:`~lightning_zero.engine.guard.ParamAccess`."""
        return self._grads.local.read(handle)

    def set_gradient(self, handle: ParamHandle, value: Tensor | None) -> None:
        """See :class:`~lightning_zero.engine.guard.ParamAccess`."""
        self._grads.local.write(handle, value)

    def flush(self) -> None:
        """Write changes of handed-out values back. Called at boundaries and before every read."""
        if self.assigned:
            self.assigned.pull()
        if not self._handed_out:
            return
        handed_out, self._handed_out = self._handed_out, []
        with torch.no_grad():
            while handed_out:
                handle, value, version, is_stale = handed_out.pop(0)
                if value._version != version:
                    if is_stale:
                        raise RuntimeError(
                            f"Parameter '{handle.fqn}' was changed through a tensor that was"
                            f" taken from it before the last"
                            " optimizer step. Under stage 3, and for master weights, such a tensor"
                            " is a copy; take `param.data` anew after a step."
                        )
                    self._grads.local.refuse_write(handle)
                    self._weights.write(handle, value)
                    self.assigned.wrote(handle, value)
                version = value._version
                # our own uses are 2 each; with more somebody else can still change it
                uses = torch._C._storage_Use_Count(value.untyped_storage()._cdata)
                if uses > 2 or sys.getrefcount(value) > 2:
                    self._handed_out.append((handle, value, version, is_stale))

    def complete_aliases(self) -> None:
        """Wait for the updates of parameters whose own memory somebody has taken.

        Reads of it can not be noticed. (Other values that are handed out are copies.)
        """
        self._aliases = [(handle, alias) for handle, alias in self._aliases if alias() is not None]
        for handle, _ in self._aliases:
            handle.buffer.pending.wait()

    def mark_stale(self) -> None:
        """The weights have been updated: values that were handed out before are old."""
        self.flush()
        self._handed_out = [
            (handle, value, version, True) for handle, value, version, _ in self._handed_out
        ]
