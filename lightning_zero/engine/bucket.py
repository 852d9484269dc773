"""The gradients of one flat buffer, before and after their reduction."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from lightning_zero.engine.buffer import FlatBuffer, ParamHandle


class GradBucket:
    """The gradients of one flat buffer.

    Attributes:
        unreduced: this rank's gradients divided by the number of ranks, laid out like the flat
            buffer; None if there are none.
        is_written: per slot, whether ``unreduced`` holds a gradient.
        is_used: per slot, whether this rank has had a gradient since the ranks last agreed.
        shard: this rank's slice of the reduced gradients; None before the first reduction.
        has_grad: per slot, whether ``shard`` holds a gradient (the same on all ranks). Slots
            without one are zero in ``shard`` as long as any other slot has one.
        dtype: of ``shard``, the same as of the weights that are stepped.
        arrived, expected: gradients that came and that can come in this backward.
        is_launched: whether the bucket has been reduced in this backward.
    """

    def __init__(self, buffer: FlatBuffer) -> None:
        self.buffer = buffer
        num_slots = len(buffer.handles)
        self.dtype = buffer.master_dtype
        self.unreduced: Tensor | None = None
        self.is_written = [False] * num_slots
        self.is_used = [False] * num_slots
        self.shard: Tensor | None = None
        self.has_grad = [False] * num_slots
        self.arrived = self.expected = 0
        self.is_launched = False

    def begin_backward(self) -> None:
        """Count afresh."""
        self.arrived, self.is_launched = 0, False
        self.expected = sum(handle.param.requires_grad for handle in self.buffer.handles)

    def add(self, handle: ParamHandle, grad: Tensor, scale: float, dtype: torch.dtype) -> None:
        """Add ``grad * scale`` to a slot: one casting copy, or an addition where there is something
        already. The first gradient settles the dtype of ``unreduced``.
        """
        if self.unreduced is None:
            self.unreduced = torch.empty(
                self.buffer.layout.numel, dtype=dtype, device=self.buffer.device
            )
        view = self.unreduced_view(handle)
        if self.is_written[handle.index]:
            view.add_(grad, alpha=scale)
        elif scale == 1.0:
            view.copy_(grad)
        elif grad.dtype == self.unreduced.dtype:
            torch.mul(grad, scale, out=view)
        else:  # `out` would get what was rounded to the dtype of the gradient
            view.copy_(grad).mul_(scale)
        self.is_written[handle.index] = self.is_used[handle.index] = True

    def unreduced_view(self, handle: ParamHandle) -> Tensor:
        """The slot of a parameter in ``unreduced``, which must be there."""
        assert self.unreduced is not None
        return handle.strided(self.unreduced, self.buffer.layout.slots[handle.index].offset)

    def take_unreduced(self, dtype: torch.dtype) -> Tensor:
        """The complete unreduced bucket, zeros where nothing was written; the bucket itself is
        empty afterwards.
        """
        layout = self.buffer.layout
        unreduced, self.unreduced = self.unreduced, None
        if unreduced is None:
            unreduced = torch.zeros(layout.numel, dtype=dtype, device=self.buffer.device)
        else:
            for gap in layout.gaps():
                unreduced[gap.start : gap.stop].zero_()
            for slot, is_written in zip(layout.slots, self.is_written, strict=True):
                if not is_written:
                    unreduced[slot.offset : slot.stop].zero_()
        self.is_written = [False] * len(self.is_written)
        return unreduced

    def shard_or_new(self) -> Tensor:
        """The shard; if there is none yet, zeros."""
        if self.shard is None:
            layout = self.buffer.layout
            self.shard = torch.zeros(
                layout.shard_numel, dtype=self.dtype, device=self.buffer.device
            )
        return self.shard

    def forget(self, handles: Collection[ParamHandle], *, keep_zeros: bool) -> None:
        """Drop the gradients of some parameters, or set them to zero."""
        dropped = [handle in handles for handle in self.buffer.handles]
        for index in (i for i, is_dropped in enumerate(dropped) if is_dropped):
            self.is_written[index] = self.is_used[index] = False
            self.has_grad[index] = keep_zeros and self.has_grad[index]
        if not any(self.is_written):
            self.unreduced = None
        if self.shard is not None and any(self.has_grad):
            for (_, start, stop), is_dropped in zip(self.buffer.own_pieces(), dropped, strict=True):
                if is_dropped:
                    self.shard[start:stop].zero_()
