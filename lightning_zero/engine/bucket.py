"""The gradients of one flat buffer, before and after their reduction."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from lightning_zero.engine.buffer import FlatBuffer, ParamHandle
from lightning_zero.engine.shard import HeldShard, Shard


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
        wants_squares: whether norms of the gradients have been asked for.
    """

    def __init__(self, buffer: FlatBuffer) -> None:
        self.buffer = buffer
        num_slots = len(buffer.handles)
        self.dtype = buffer.master_dtype
        self.unreduced: Tensor | None = None
        self.is_written = [False] * num_slots
        self.is_used = [False] * num_slots
        self.shard: Shard | None = None
        self._spare: Shard | None = None
        self.wants_squares = False
        self._square: tuple[int, int, Tensor, int] | None = None
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

    def shard_or_new(self) -> Shard:
        """The shard; if there is none yet, zeros."""
        if self.shard is None:
            self.shard = self._new_shard()
            with self.shard.fill() as content:
                content.zero_()
        return self.shard

    def _new_shard(self) -> Shard:
        """A shard with undefined content."""
        buffer, numel = self.buffer, self.buffer.layout.shard_numel
        if buffer.offload is None or buffer.places.grad is None:
            return HeldShard(torch.empty(numel, dtype=self.dtype, device=buffer.device))
        label = f"the gradients of {buffer.name}"
        return buffer.offload.empty(numel, self.dtype, buffer.places.grad, label, pinned=True)

    @property
    def is_resting(self) -> bool:
        """Whether the shard rests on an offload device, and not where it is reduced."""
        return self.buffer.places.grad is not None

    def held_shard(self) -> Tensor:
        """The shard that does not rest elsewhere, to be overwritten by a reduction."""
        self.shard = self.shard or self._new_shard()
        with self.shard.fill() as content:
            return content  # valid outside, too

    def receive(self, reduced: Tensor, scale: float, *, is_addend: bool) -> None:
        """Add what a reduction has brought, times ``scale``, to the shard, or replace it."""
        if is_addend:
            with self.shard_or_new().use(write=True) as shard:
                shard.add_(reduced.to(shard.device), alpha=scale)
                square = self._square_of(shard)
            self._note_square(square)
            return
        if scale != 1.0:
            reduced.mul_(scale)
        if not self.is_resting:
            return
        assert self.buffer.offload is not None
        if self.buffer.offload.is_delayed:  # a step may still be reading the other one
            self.shard, self._spare = self._spare, self.shard
        self.shard = self.shard or self._new_shard()
        with self.shard.fill() as shard:
            downloaded = self.buffer.offload.transfers.download(shard, reduced)
        self.shard.step = downloaded
        self._note_square(self._square_of(reduced))

    def _square_of(self, content: Tensor) -> tuple[int, int, Tensor] | None:
        """The squared norm of what is going to leave memory, if norms are asked for."""
        pieces = [piece for piece in self.buffer.own_pieces() if piece[1] < piece[2]]
        if not (self.is_resting and self.wants_squares and pieces):
            return None
        start, stop = pieces[0][1], pieces[-1][2]
        return start, stop, squared_norm(content[start:stop])

    def _note_square(self, square: tuple[int, int, Tensor] | None) -> None:
        assert self.shard is not None
        self._square = None if square is None else (*square, self.shard.version)

    def square(self, start: int, stop: int) -> Tensor:
        """The squared norm of elements ``start .. stop`` of the shard, as fp64 scalar."""
        self.wants_squares = True
        shard = self.shard_or_new()
        if self._square is not None:
            first, last, square, version = self._square
            if (first, last, version) == (start, stop, shard.version):
                return square
        with shard.use() as content:
            return squared_norm(content[start:stop])

    def forget(self, handles: Collection[ParamHandle], *, keep_zeros: bool) -> None:
        """Drop the gradients of some parameters, or set them to zero."""
        dropped = [handle in handles for handle in self.buffer.handles]
        for index in (i for i, is_dropped in enumerate(dropped) if is_dropped):
            self.is_written[index] = self.is_used[index] = False
            self.has_grad[index] = keep_zeros and self.has_grad[index]
        if not any(self.is_written):
            self.unreduced = None
        if self.shard is not None and any(self.has_grad):
            with self.shard.use(write=True) as shard:
                for (_, start, stop), is_dropped in zip(
                    self.buffer.own_pieces(), dropped, strict=True
                ):
                    if is_dropped:
                        shard[start:stop].zero_()

    def close(self) -> None:
        """Give all memory back."""
        self.unreduced = None
        for shard in (self.shard, self._spare):
            if shard is not None:
                shard.free()
        self.shard = self._spare = None


def squared_norm(content: Tensor) -> Tensor:
    """The sum of squares of a 1-D tensor, added up in fp32 (fp64 if it is fp64), as fp64 scalar."""
    dtype = torch.promote_types(content.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(content, dtype=dtype)
    return norm.double().square()
