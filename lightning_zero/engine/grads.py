"""From a parameter's gradient to this rank's shard of the average over all ranks.

[Note: reduction order] Gradients are copied into the bucket of their flat buffer as they arrive and
buckets are reduced in *one fixed order* on all ranks. A bucket whose gradients are not complete
holds up the later ones until the backward ends; then the ranks tell each other which parameters got
gradients, and what is left is reduced where any rank has a gradient, zeros standing in for missing
ones. So ranks that use different parameters can not deadlock and get what
DDP(find_unused_parameters=True) gives. The order is learned from rank 0's first backward.

A parameter that got no gradient on any rank has none afterwards, as with ``grad=None``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from lightning_zero.comm.collectives import Collectives
from lightning_zero.engine.buffer import FlatBuffer, ParamHandle
from lightning_zero.engine.placement import Placement
from lightning_zero.pending import Pending

_MAX_IN_FLIGHT = 2


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
        arrived, expected: gradients that came and that can come in this backward.
        is_launched: whether the bucket has been reduced in this backward.
    """

    def __init__(self, buffer: FlatBuffer) -> None:
        self.buffer = buffer
        num_slots = len(buffer.handles)
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

    def add(self, handle: ParamHandle, grad: Tensor, scale: float) -> None:
        """Add ``grad * scale`` to a slot: one casting copy, or an addition where there is something
        already.
        """
        if self.unreduced is None:
            self.unreduced = torch.empty(
                self.buffer.layout.numel, dtype=self.buffer.dtype, device=self.buffer.device
            )
        view = self.unreduced_view(handle)
        if self.is_written[handle.index]:
            view.add_(grad, alpha=scale)
        elif scale == 1.0:
            view.copy_(grad)
        else:
            torch.mul(grad, scale, out=view)
        self.is_written[handle.index] = self.is_used[handle.index] = True

    def unreduced_view(self, handle: ParamHandle) -> Tensor:
        """The slot of a parameter in ``unreduced``, which must be there."""
        assert self.unreduced is not None
        return handle.strided(self.unreduced, self.buffer.layout.slots[handle.index].offset)

    def take_unreduced(self) -> Tensor:
        """The complete unreduced bucket, zeros where nothing was written; the bucket itself is
        empty afterwards.
        """
        layout = self.buffer.layout
        unreduced, self.unreduced = self.unreduced, None
        if unreduced is None:
            unreduced = torch.zeros(
                layout.numel, dtype=self.buffer.dtype, device=self.buffer.device
            )
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
            self.shard = torch.zeros(
                self.buffer.layout.shard_numel, dtype=self.buffer.dtype, device=self.buffer.device
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


class GradReducer:
    """Collects, reduces and keeps the gradients of all flat buffers.

    Args:
        buffers: all flat buffers, in the order of the module.
        collectives: the ranks to average over.
        placement: UNREDUCED keeps full local gradients while synchronization is blocked; SHARDED
            reduces every backward.

    Attributes:
        is_blocked: whether an accumulation window is open (Lightning's ``block_backward_sync``).
        peak_bytes: the most that unreduced gradients have taken.
    """

    def __init__(
        self, buffers: Sequence[FlatBuffer], collectives: Collectives, placement: Placement
    ) -> None:
        self._collectives = collectives
        self._scale = 1.0 / collectives.world_size
        self._keeps_unreduced = placement is Placement.UNREDUCED
        self.buckets = {buffer: GradBucket(buffer) for buffer in buffers}
        self._order = [self.buckets[buffer] for buffer in reversed(buffers)]
        self._ready_order: (
            list[GradBucket] | None
        ) = []  # None once the ranks have agreed on the order
        self._next_launch = 0
        self._in_flight: deque[tuple[GradBucket, Tensor | None, Pending, int]] = deque()
        self._seen: dict[ParamHandle, Tensor] = {}
        self._scales: list[tuple[Collection[ParamHandle], Tensor]] = []
        self.is_blocked = False
        self.peak_bytes = 0

    # -- during backward

    def begin_backward(self) -> None:
        """A backward begins."""
        self._apply_scales()
        self.write_back()
        self._next_launch = 0
        for bucket in self._order:
            bucket.begin_backward()

    def add(self, handle: ParamHandle, grad: Tensor, *, is_final: bool) -> bool:
        """Take the gradient of a parameter.

        Args:
            handle: the parameter.
            grad: its gradient.
            is_final: False if more may follow in this backward (recomputation runs several
                backwards within one).

        Returns:
            Whether all gradients of the parameter's buffer have arrived.
        """
        if grad.layout is not torch.strided:
            raise NotImplementedError(
                f"Parameter '{handle.fqn}' has a sparse gradient, which can not be sharded. Use"
                f" dense gradients"
                " (`sparse=False` for embeddings)."
            )
        bucket = self.buckets[handle.buffer]
        bucket.add(handle, grad, self._scale)
        bucket.arrived += is_final
        is_complete = bucket.arrived >= bucket.expected
        if is_complete and not self._is_postponed:
            if self._ready_order is not None and not bucket.is_launched:
                self._ready_order.append(bucket)
            self._launch_complete()
        return is_complete

    @property
    def _is_postponed(self) -> bool:
        return self._keeps_unreduced and self.is_blocked

    def _launch_complete(self) -> None:
        """Reduce the complete buckets that no incomplete one precedes."""
        while self._next_launch < len(self._order):
            bucket = self._order[self._next_launch]
            if bucket.arrived < bucket.expected:
                return
            self._next_launch += 1
            if bucket.expected:
                self._launch(bucket)

    def _launch(self, bucket: GradBucket) -> None:
        while len(self._in_flight) >= _MAX_IN_FLIGHT or any(
            entry[0] is bucket for entry in self._in_flight
        ):
            self._finish_oldest()
        unreduced = bucket.take_unreduced()
        size = unreduced.numel() * unreduced.element_size()
        addend: Tensor | None = None
        if any(bucket.has_grad) or bucket.is_launched:  # accumulate: reduce in place, then add
            own = bucket.buffer.layout.shard_range(self._collectives.rank)
            out = addend = unreduced[own.start : own.stop]
        elif bucket.shard is None:
            layout = bucket.buffer.layout
            out = bucket.shard = torch.empty(
                layout.shard_numel, dtype=unreduced.dtype, device=unreduced.device
            )
        else:
            out = bucket.shard
        bucket.is_launched = True
        label = f"the gradients of {bucket.buffer.name}"
        pending = self._collectives.start_reduce_scatter(unreduced, out, label, bucket.buffer.index)
        self._in_flight.append((bucket, addend, pending, size))
        self.peak_bytes = max(self.peak_bytes, self.unreduced_bytes())

    def _finish_oldest(self) -> None:
        bucket, addend, pending, _ = self._in_flight.popleft()
        pending.wait()
        if addend is not None:
            bucket.shard_or_new().add_(addend)

    def end_backward(self) -> None:
        """A backward has ended: reduce what is left and agree on what was used. Collective.

        Buckets without any gradient here are reduced too, before the ranks talk to each other:
            another rank may be
        waiting for them already.
        """
        if self._is_postponed:
            self.peak_bytes = max(self.peak_bytes, self.unreduced_bytes())
            return
        for bucket in self._order[self._next_launch :]:
            if bucket.expected:
                self._launch(bucket)
        self._next_launch = len(self._order)
        used, left_over = self._agree()
        for bucket in self._order:
            if left_over[bucket]:
                self._launch(bucket)
        for bucket, flags in used.items():
            bucket.has_grad = [old or new for old, new in zip(bucket.has_grad, flags, strict=True)]
            bucket.is_used = [False] * len(flags)
        if self._ready_order is not None:
            self._agree_on_order()

    def _agree(self) -> tuple[dict[GradBucket, list[bool]], dict[GradBucket, bool]]:
        """Per bucket: which slots any rank used, and whether any rank has gradients that came after
        the reduction.
        """
        buckets = list(self.buckets.values())
        flags = [
            flag for bucket in buckets for flag in (*bucket.is_used, bucket.unreduced is not None)
        ]
        if flags:
            device = buckets[0].buffer.device
            flags = self._collectives.any_rank(flags, device, "the list of used parameters")
        used, left_over, start = {}, {}, 0
        for bucket in buckets:
            stop = start + len(bucket.is_used)
            used[bucket], left_over[bucket] = flags[start:stop], flags[stop]
            start = stop + 1
        return used, left_over

    def _agree_on_order(self) -> None:
        """From now on reduce in the order in which rank 0's buckets were complete in its first
        backward.
        """
        assert self._ready_order is not None
        ready = {bucket.buffer.index: None for bucket in self._ready_order}
        mine = [*ready, *(b.buffer.index for b in self._order if b.buffer.index not in ready)]
        agreed = self._collectives.all_gather_object(mine, "the order of reductions")[0]
        by_index = {bucket.buffer.index: bucket for bucket in self._order}
        self._order = [by_index[index] for index in agreed]
        self._ready_order = None

    # -- between backward and step

    def wait(self) -> None:
        """Finish all reductions that are under way."""
        while self._in_flight:
            self._finish_oldest()

    def reduce_postponed(self) -> None:
        """Reduce gradients that an accumulation window kept local, if there are any on any rank.

        Collective.
        """
        if self._keeps_unreduced and any(bucket.unreduced is not None for bucket in self._order):
            self.begin_backward()
            was_blocked, self.is_blocked = self.is_blocked, False
            self.end_backward()
            self.is_blocked = was_blocked

    def gradient(self, handle: ParamHandle) -> Tensor | None:
        """The full reduced gradient of a parameter, in memory of its own; None if it has none.
        Collective.

        Changes of the returned tensor are taken over before the gradients are used. Inside an
        accumulation window with unreduced gradients it is this rank's own gradient so far, as under
        DDP.
        """
        self._apply_scales()
        if handle in self._seen:
            return self._seen[handle]
        bucket = self.buckets[handle.buffer]
        self.wait()
        if bucket.has_grad[handle.index]:
            value = handle.buffer.gather_one(handle, bucket.shard_or_new(), "the gradient")
            self._seen[handle] = value
            return value
        if bucket.is_written[handle.index]:
            value = bucket.unreduced_view(handle) / self._scale
            self._seen[handle] = value
            return value
        return None

    def set_gradient(self, handle: ParamHandle, value: Tensor | None) -> None:
        """Replace the reduced gradient of a parameter. Every rank, with the same value."""
        self._apply_scales()
        self.wait()
        bucket = self.buckets[handle.buffer]
        self._seen.pop(handle, None)
        if value is None:
            bucket.forget({handle}, keep_zeros=False)
            return
        if not any(bucket.has_grad):
            bucket.shard_or_new().zero_()
        bucket.has_grad[handle.index] = True
        self._seen[handle] = value

    def write_back(self) -> None:
        """Take over changes of gradients that were handed out."""
        if not self._seen:
            return
        rank = self._collectives.rank
        for handle, value in self._seen.items():
            buffer, bucket = handle.buffer, self.buckets[handle.buffer]
            if not bucket.has_grad[handle.index]:  # seen inside an accumulation window
                torch.mul(value.detach(), self._scale, out=bucket.unreduced_view(handle))
                continue
            own, slot = buffer.layout.shard_range(rank), buffer.layout.slots[handle.index]
            piece = buffer.layout.piece(handle.index, rank)
            if piece.numel:
                flat = buffer.flatten(handle, value.detach())
                mine = flat[piece.start - slot.offset : piece.stop - slot.offset]
                bucket.shard_or_new()[piece.start - own.start : piece.stop - own.start].copy_(mine)
        self._seen.clear()

    def zero(self, handles: Collection[ParamHandle], *, set_to_none: bool) -> None:
        """Drop the gradients of some parameters (``zero_grad``).

        Local, but every rank has to do it.
        """
        self._apply_scales()
        self.wait()
        for handle in handles:
            self._seen.pop(handle, None)
        for bucket in {self.buckets[handle.buffer]: None for handle in handles}:
            bucket.forget(handles, keep_zeros=not set_to_none)

    def regions(self, handles: Collection[ParamHandle]) -> list[Tensor]:
        """This rank's pieces of the reduced gradients of some parameters, as few tensors as
        possible.
        """
        self._apply_scales()
        return self._regions(handles)

    def _regions(self, handles: Collection[ParamHandle]) -> list[Tensor]:
        self.wait()
        self.write_back()
        found = []
        for bucket in {self.buckets[handle.buffer]: None for handle in handles}:
            run: list[int] | None = None
            for (handle, start, stop), has_grad in zip(
                bucket.buffer.own_pieces(), bucket.has_grad, strict=True
            ):
                if start == stop:
                    continue
                if not has_grad or handle not in handles:
                    run = None
                elif run is None:
                    run = [start, stop]
                    found.append((bucket, run))
                else:
                    run[1] = stop
        return [bucket.shard_or_new()[start:stop] for bucket, (start, stop) in found]

    def scale_later(self, handles: Collection[ParamHandle], factor: Tensor) -> None:
        """Multiply the gradients of some parameters by a 0-d factor, at the latest before anybody
        looks at them.
        """
        self._scales.append((handles, factor))

    def take_scale(self, handles: Collection[ParamHandle]) -> Tensor | None:
        """The factor by which the caller has to multiply the gradients of these parameters, None
        for 1.
        """
        scales, self._scales = self._scales, []
        mine = [entry for entry in scales if entry[0] is handles]
        self._scales = [entry for entry in scales if entry[0] is not handles]
        if len(mine) == 1 and not self._scales:
            return mine[0][1]
        self._scales = scales
        self._apply_scales()
        return None

    def _apply_scales(self) -> None:
        scales, self._scales = self._scales, []
        for handles, factor in scales:
            for region in self._regions(handles):
                region.mul_(factor)

    # -- accounting

    def unreduced_bytes(self) -> int:
        """Bytes of full gradients that are being collected or reduced."""
        waiting = [bucket.unreduced for bucket in self._order if bucket.unreduced is not None]
        return sum(t.numel() * t.element_size() for t in waiting) + sum(
            entry[3] for entry in self._in_flight
        )

    def shard_bytes(self) -> int:
        """Bytes of the reduced gradients."""
        shards = [bucket.shard for bucket in self._order if bucket.shard is not None]
        return sum(t.numel() * t.element_size() for t in shards)

    def close(self) -> None:
        """Drop all gradients; nothing may be under way."""
        self._in_flight.clear()
        self._seen.clear()
        for bucket in self._order:
            bucket.unreduced = bucket.shard = None
