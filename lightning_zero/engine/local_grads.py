"""Gradients while the user's own hooks can see them: before this rank's part has left it.

[Note: gradients in hooks] A gradient is taken in a hook of the node that accumulates it, which runs
after all hooks of the parameter, whenever they were registered; DDP's reducer does so too. A hook
that runs inside the accumulation (``register_post_accumulate_grad_hook``) sees in ``p.grad``
what DDP shows there: what was there before plus this backward's own gradient of this rank, and what
it leaves there is averaged. So the gradients of parameters with such hooks wait in ``p.grad``
itself for the rest of an accumulation window, at every stage, and what an earlier backward has
averaged already is put back there before the next one begins (collective). ``p.grad`` has the dtype
of the master weight then, and the loss scale during the backward, as under DDP.

Elsewhere during a backward ``p.grad`` is what was there before until the parameter's turn comes,
then this rank's own gradient; an error if that has been sent already, never anything else.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_zero.engine.buffer import ParamHandle
from lightning_zero.errors import ShardedParameterError

if TYPE_CHECKING:
    from lightning_zero.engine.grads import GradReducer


def in_backward() -> bool:
    """Whether this thread is running a backward."""
    return torch._C._current_graph_task_id() != -1


_NO_STEP = (
    " an optimizer step there uses gradients that no other rank has seen, so the ranks would drift"
    " apart. Step after the backward; memory for gradients and optimizer state is sharded already."
)


def refuse_step_in_backward() -> None:
    """Raise if an optimizer is being stepped by a gradient hook."""
    if in_backward():
        raise RuntimeError(f"An optimizer was stepped inside of a backward:{_NO_STEP}")


def _own(handle: ParamHandle) -> Tensor | None:
    """What is in the parameter's own ``grad``, whatever the guard shows."""
    with torch._C.DisableTorchFunctionSubclass():
        return handle.param.grad


def _set_own(handle: ParamHandle, value: Tensor | None) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        handle.param.grad = value


def _versions(handle: ParamHandle) -> tuple[int, int]:
    with torch._C.DisableTorchFunctionSubclass():
        return handle.param._version, handle.view._version


def _is_watched(handle: ParamHandle) -> bool:
    """Whether the user has a hook inside the parameter's accumulation."""
    with torch._C.DisableTorchFunctionSubclass():
        return bool(handle.param._post_accumulate_grad_hooks)


class LocalGrads:
    """What :class:`~lightning_zero.engine.grads.GradReducer` does not hold yet.

    See [Note: gradients in hooks].
    """

    def __init__(self, grads: GradReducer) -> None:
        self._grads = grads
        self._kept: dict[ParamHandle, None] = {}
        self._is_mid_window = False
        self._taken: set[ParamHandle] = set()
        self._accumulating: dict[ParamHandle, tuple[int, int]] = {}
        self._prehooks: dict[ParamHandle, RemovableHandle] = {}

    # -- during backward

    def begin_backward(self, handles: Iterable[ParamHandle], loss_scale: float) -> None:
        """A backward is about to begin: put earlier gradients where hooks look for them.

        Collective if a parameter with hooks has a gradient that has been averaged; inside of a
        backward nothing can be put back.
        """
        self._taken.clear()
        self._accumulating.clear()
        watched = [handle for handle in handles if _is_watched(handle)]
        if in_backward() or not (watched or self._kept):
            return
        with torch.no_grad():
            for handle in watched:
                if handle not in self._prehooks:
                    self._watch(handle)
                self._put_back(handle)
            self._multiply(loss_scale)

    def _watch(self, handle: ParamHandle) -> None:
        this = weakref.ref(self)

        def begin(grads: tuple[Tensor, ...]) -> None:
            local = this()
            if local is not None:
                local._accumulating[handle] = _versions(handle)

        with torch._C.DisableTorchFunctionSubclass():
            handle.param.grad_dtype = self._grads.buckets[handle.buffer].dtype
            node = torch.autograd.graph.get_gradient_edge(handle.param).node
            self._prehooks[handle] = node.register_prehook(begin)

    def _put_back(self, handle: ParamHandle) -> None:
        if not self._has_earlier(handle):
            return
        bucket = self._grads.buckets[handle.buffer]
        if self._is_mid_window and bucket.has_grad[handle.index]:
            raise RuntimeError(
                f"A hook was registered by `register_post_accumulate_grad_hook` on parameter"
                f" '{handle.fqn}' within an accumulation window, whose earlier gradients have been"
                " averaged already. Register it before the window begins, or use stage 1."
            )
        earlier = self._grads.gradient(handle)
        assert earlier is not None
        self._grads.set_gradient(handle, None)
        own = _own(handle)
        _set_own(handle, earlier if own is None else earlier + own)
        self._kept[handle] = None

    def _has_earlier(self, handle: ParamHandle) -> bool:
        bucket = self._grads.buckets[handle.buffer]
        return bucket.has_grad[handle.index] or bucket.is_written[handle.index]

    def _multiply(self, factor: float) -> None:
        if factor != 1.0:
            for handle in self._kept:
                own = _own(handle)
                if own is not None:
                    _set_own(handle, own * factor)

    def is_accumulating(self, handle: ParamHandle) -> bool:
        """Whether the hooks of this very parameter are running."""
        return handle in self._accumulating

    def refuse_write(self, handle: ParamHandle) -> None:
        """Raise if the parameter itself is being changed by one of its gradient hooks."""
        if handle in self._accumulating:
            raise ShardedParameterError(
                f"A gradient hook changed parameter '{handle.fqn}' itself:{_NO_STEP}"
            )

    def take(self, handle: ParamHandle, *, is_final: bool) -> Tensor | None:
        """The gradient that a parameter got, after its hooks; None if there is none, or if it stays
        for the next backward.
        """
        if self._accumulating.get(handle, _versions(handle)) != _versions(handle):
            self.refuse_write(handle)
        self._accumulating.pop(handle, None)
        is_watched = _is_watched(handle)
        if is_watched and self._misses_some(handle):
            raise RuntimeError(
                f"The gradient of parameter '{handle.fqn}', which has hooks from"
                f" `register_post_accumulate_grad_hook`, came in parts that its hooks could not see"
                f" together. Run backwards by `self.manual_backward(...)`, checkpoint with"
                f" `use_reentrant=False`, and register the hooks before the backward."
            )
        self._taken.add(handle)
        own = _own(handle)
        if is_watched and (self._grads.is_blocked or not is_final):
            self._kept[handle] = None
            return None
        self._kept.pop(handle, None)
        _set_own(handle, None)
        return self._zeros(handle) if own is None and is_watched else own

    def _zeros(self, handle: ParamHandle) -> Tensor:
        """What DDP sends for a gradient that a hook has dropped."""
        dtype = self._grads.buckets[handle.buffer].dtype
        return torch.zeros_like(handle.placeholder, dtype=dtype)

    def _misses_some(self, handle: ParamHandle) -> bool:
        return self._has_earlier(handle) or (handle in self._taken and handle not in self._kept)

    def end_backward(self) -> None:
        """All gradients are there. What no later backward adds to goes to the buckets."""
        self._accumulating.clear()
        self._is_mid_window = self._grads.is_blocked
        if self._is_mid_window:
            self._multiply(1.0 / self._grads.loss_scale)
        else:
            self._give_all(is_final=False)
        self._taken.clear()

    def _give_all(self, *, is_final: bool) -> None:
        kept, self._kept = self._kept, {}
        for handle in kept:
            own = _own(handle)
            _set_own(handle, None)
            if own is not None:
                self._grads.add(handle, own, is_final=is_final)

    # -- between backwards

    def spill(self) -> bool:
        """Hand everything to the buckets, as a sum that has not been reduced; whether there was
        anything.
        """
        if not self._kept:
            return False
        self._grads.expect_sums()
        with torch.no_grad():
            self._multiply(self._grads.loss_scale)
            self._give_all(is_final=False)
        return True

    def drop(self, handles: Collection[ParamHandle], *, set_to_none: bool) -> list[ParamHandle]:
        """``zero_grad``: returns those whose gradients in the buckets are to be dropped.

        Inside of a backward DDP overwrites, when the backward ends, what has been taken.
        """
        for handle in handles:
            own = _own(handle)
            if own is not None:
                _set_own(handle, None if set_to_none else torch.zeros_like(own))
        if not in_backward():
            return list(handles)
        return [handle for handle in handles if handle not in self._taken]

    # -- `p.grad`

    def read(self, handle: ParamHandle) -> Tensor | None:
        """What ``p.grad`` is."""
        own = _own(handle)
        if own is not None:
            return own
        if not in_backward():
            return self._grads.gradient(handle)
        if handle in self._accumulating:
            return None
        bucket = self._grads.buckets[handle.buffer]
        if bucket.is_written[handle.index] and not bucket.has_grad[handle.index]:
            local = self._grads.local_gradient(handle)
            if local is not None:
                return local
        if handle not in self._taken and not bucket.has_grad[handle.index]:
            return None
        raise RuntimeError(
            f"`grad` of parameter '{handle.fqn}' was read during the backward, but this rank's own"
            f" gradient is not there any more: it has been sent, or averaged with the other ranks'."
            f" Read it in a hook of this parameter (`register_post_accumulate_grad_hook`), or when"
            f" the backward has ended."
        )

    def write(self, handle: ParamHandle, value: Tensor | None) -> None:
        """``p.grad = value``."""
        own = _own(handle)
        if not in_backward():
            if own is not None:
                _set_own(handle, value)
            else:
                self._grads.set_gradient(handle, value)
        elif own is not None or handle in self._accumulating:
            _set_own(handle, value)
        elif handle not in self._taken:
            if self._has_earlier(handle):
                self._grads.set_gradient(handle, None)
            _set_own(handle, value)
        elif self._grads.is_blocked:
            raise RuntimeError(
                f"`grad` of parameter '{handle.fqn}' was changed during the backward of an"
                f" accumulation window, after it had been taken. Change it in a hook of this"
                f" parameter (`register_post_accumulate_grad_hook`), or when the backward has"
                f" ended."
            )  # outside of a window DDP overwrites such a change when the backward ends

    def close(self) -> None:
        """Leave nothing on the parameters."""
        for handle in self._kept:
            _set_own(handle, None)
        self._kept.clear()
        for handle, prehook in self._prehooks.items():
            prehook.remove()
            with torch._C.DisableTorchFunctionSubclass():
                handle.param.grad = None
                handle.param.grad_dtype = handle.param.dtype
        self._prehooks.clear()
