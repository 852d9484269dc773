"""From a parameter's gradient to this rank's shard of the average over all ranks.

[Note: reduction order] Gradients are copied into the bucket of their flat buffer as they arrive and
buckets are reduced in *one fixed order* on all ranks. A bucket whose gradients are not complete
holds up the later ones until the backward ends; then the ranks tell each other which parameters got
gradients, and what is left is reduced where any rank has a gradient, zeros standing in for missing
ones. So ranks that use different parameters can not deadlock and get what
DDP(find_unused_parameters=True) gives. The order is learned from rank 0's first backward.

A parameter that got no gradient on any rank has none afterwards, as with ``grad=None``.

[Note: gradient dtypes] A gradient is multiplied by 1/N and cast to the *wire* dtype in one pass, so
that the average can not overflow where no gradient does. (In half precision by the next lower power
of two, which does not round; the rest follows after the reduction.) The shards are in the dtype
that the optimizer steps, fp32 for master weights, and never scaled: the loss scale of a backward is
taken out when its gradients have been reduced, so gradients of different scales may meet. What
stage 1 adds up before it is sent is added up in the shards' dtype, unscaled too, and sent in that
dtype unless another one is asked for.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.comm.collectives import Collectives
from lightning_zero.engine.bucket import GradBucket
from lightning_zero.engine.buffer import FlatBuffer, ParamHandle
from lightning_zero.engine.local_grads import LocalGrads
from lightning_zero.engine.placement import Placement
from lightning_zero.pending import Pending

_MAX_IN_FLIGHT = 2
_CASTABLE = (torch.float32, torch.bfloat16, torch.float16)


class _Reduction(NamedTuple):
    """A reduction under way: of which bucket, where the sum goes, whether it has to be added to the
    shard, the size of what is sent, and what the sum over the ranks is multiplied with.
    """

    bucket: GradBucket
    out: Tensor
    is_addend: bool
    pending: Pending
    nbytes: int
    scale: float


class GradReducer:
    """Collects, reduces and keeps the gradients of all flat buffers.

    Args:
        buffers: all flat buffers, in the order of the module.
        collectives: the ranks to average over.
        placement: UNREDUCED keeps full local gradients while synchronization is blocked; SHARDED
            reduces every backward.
        wire_dtype: what floating-point gradients are sent in; None: see [Note: gradient dtypes].

    Attributes:
        loss_scale: of the last backward.
        is_blocked: whether an accumulation window is open; see :meth:`blocked`.
        keeps_unreduced: whether gradients stay full and local while it is.
        pending: parameters whose gradients no step has used yet.
        peak_bytes: the most that unreduced gradients have taken.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        collectives: Collectives,
        placement: Placement,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self._collectives = collectives
        self._average = 1.0 / collectives.world_size
        self._wire_dtype = wire_dtype
        self.loss_scale = 1.0
        self.keeps_unreduced = placement is Placement.UNREDUCED
        self._has_window = False
        self.pending: set[ParamHandle] = set()
        self.buckets = {buffer: GradBucket(buffer) for buffer in buffers}
        self._order = [self.buckets[buffer] for buffer in reversed(buffers)]
        # None once the ranks have agreed on the order
        self._ready_order: list[GradBucket] | None = []
        self._next_launch = 0
        self._in_flight: deque[_Reduction] = deque()
        self._seen: dict[ParamHandle, Tensor] = {}
        self._scales: list[tuple[Collection[ParamHandle], Tensor]] = []
        self.is_blocked = False
        self.local = LocalGrads(self)
        self.peak_bytes = 0

    # -- during backward

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """An accumulation window (Lightning's ``block_backward_sync``). Every rank enters it."""
        self.is_blocked = True
        # not left to the gradients: a rank whose step returns None has to send the same dtype
        self._has_window |= self.keeps_unreduced
        try:
            yield
        finally:
            self.is_blocked = False

    def begin_backward(self, loss_scale: float = 1.0) -> None:
        """A backward begins whose loss has been multiplied by ``loss_scale``."""
        self._apply_scales()
        self.write_back()
        self.loss_scale = loss_scale
        self._next_launch = 0
        for bucket in self._order:
            bucket.begin_backward()

    @property
    def _holds_sums(self) -> bool:
        """Whether ``unreduced`` adds up the backwards of an accumulation window."""
        return self._is_postponed or self._has_window

    def _unreduced_scale(self, bucket: GradBucket) -> float:
        """What the gradients in ``unreduced`` are multiplied with, besides the loss scale that they
        may carry.
        """
        if self._holds_sums:
            return self._average / self.loss_scale
        is_rounded = self._wire_dtype_of(bucket).itemsize < bucket.dtype.itemsize
        return 2.0 ** math.floor(math.log2(self._average)) if is_rounded else self._average

    def _carried(self, bucket: GradBucket) -> float:
        """The gradients in ``unreduced`` are the true ones times this."""
        scale = self._unreduced_scale(bucket)
        return self._average if self._holds_sums else scale * self.loss_scale

    def _wire_dtype_of(self, bucket: GradBucket) -> torch.dtype:
        if bucket.dtype in _CASTABLE and self._wire_dtype is not None:
            return self._wire_dtype
        return bucket.dtype if self._holds_sums else bucket.buffer.dtype

    def add(self, handle: ParamHandle, grad: Tensor, *, is_final: bool) -> bool:
        """Take the gradient of a parameter; whether all of its buffer have arrived.

        Args:
            handle: the parameter.
            grad: its gradient.
            is_final: False if more may follow in this backward (recomputation runs several
                backwards within one).
        """
        if grad.layout is not torch.strided:
            raise NotImplementedError(
                f"Parameter '{handle.fqn}' has a sparse gradient, which can not be sharded. Use"
                " dense gradients (`sparse=False` for embeddings)."
            )
        bucket = self.buckets[handle.buffer]
        # what is added up is added up in the shard's dtype
        is_sum = self._holds_sums or not is_final
        dtype = bucket.dtype if is_sum else self._wire_dtype_of(bucket)
        bucket.add(handle, grad, self._unreduced_scale(bucket), dtype)
        return self.arrive(handle, is_final=is_final)

    def arrive(self, handle: ParamHandle, *, is_final: bool) -> bool:
        """Count a gradient that has been taken, or waits with its parameter; see :meth:`add`."""
        bucket = self.buckets[handle.buffer]
        bucket.arrived += is_final
        is_complete = bucket.arrived >= bucket.expected
        if is_complete and not self._is_postponed:
            if self._ready_order is not None and not bucket.is_launched:
                self._ready_order.append(bucket)
            self._launch_complete()
        return is_complete

    @property
    def _is_postponed(self) -> bool:
        return self.keeps_unreduced and self.is_blocked

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
            reduction.bucket is bucket for reduction in self._in_flight
        ):
            self._finish_oldest()
        unreduced, rest = self._take_for_wire(bucket)
        layout = bucket.buffer.layout
        is_addend = any(bucket.has_grad) or bucket.is_launched
        if is_addend or bucket.is_resting:  # reduce first, then add or move away
            own = layout.shard_range(self._collectives.rank)
            out = unreduced[own.start : own.stop]
            if unreduced.dtype != bucket.dtype:
                out = torch.empty_like(out, dtype=bucket.dtype)
        else:
            out = bucket.held_shard()
        bucket.is_launched = True
        label = f"the gradients of {bucket.buffer.name}"
        pending = self._collectives.start_reduce_scatter(unreduced, out, label, bucket.buffer.index)
        size = unreduced.numel() * unreduced.element_size()
        self._in_flight.append(_Reduction(bucket, out, is_addend, pending, size, rest))
        self.peak_bytes = max(self.peak_bytes, self.unreduced_bytes())

    def _take_for_wire(self, bucket: GradBucket) -> tuple[Tensor, float]:
        """The unreduced bucket in the dtype in which it is sent, and what the sum over the ranks
        has to be multiplied with; the same on all ranks.
        """
        wire = self._wire_dtype_of(bucket)
        unreduced = bucket.take_unreduced(wire)
        if not self._holds_sums:
            before = self._unreduced_scale(bucket)
            return unreduced.to(wire), self._average / before / self.loss_scale
        if wire == bucket.dtype:
            return unreduced, 1.0
        return unreduced.mul_(self.loss_scale).to(wire), 1.0 / self.loss_scale

    def _finish_oldest(self) -> None:
        reduction = self._in_flight.popleft()
        reduction.pending.wait()
        reduction.bucket.receive(reduction.out, reduction.scale, is_addend=reduction.is_addend)

    def end_backward(self) -> None:
        """A backward has ended: reduce what is left and agree on what was used. Collective.

        Buckets without any gradient here are reduced too, before the ranks talk to each other:
        another rank may be waiting for them already.
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
        self._has_window = False
        for bucket, flags in used.items():
            bucket.has_grad = [old or new for old, new in zip(bucket.has_grad, flags, strict=True)]
            self.pending.update(
                handle for handle, flag in zip(bucket.buffer.handles, flags, strict=True) if flag
            )
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

    @property
    def world_size(self) -> int:
        """Number of ranks that are averaged over."""
        return self._collectives.world_size

    def expect_sums(self) -> None:
        """Unreduced gradients of an accumulation window have been put in from outside."""
        self._has_window = True

    def settle(self) -> None:
        """Bring everything into the buckets: reductions, changes by hooks, clipping."""
        self.local.spill()
        self._apply_scales()
        self.wait()
        self.write_back()

    def wait(self) -> None:
        """Finish all reductions that are under way."""
        while self._in_flight:
            self._finish_oldest()

    def reduce_postponed(self) -> None:
        """Reduce gradients that an accumulation window kept local, if there are any on any rank.

        Collective.
        """
        is_kept = self.local.spill() or self.keeps_unreduced
        if is_kept and any(bucket.unreduced is not None for bucket in self._order):
            self.begin_backward(self.loss_scale)
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
            value = bucket.unreduced_view(handle).to(bucket.dtype) / self._carried(bucket)
            self._seen[handle] = value
            return value
        return None

    def local_gradient(self, handle: ParamHandle) -> Tensor | None:
        """A copy of the gradient that waits to be sent, with its loss scale; None if rounded."""
        bucket = self.buckets[handle.buffer]
        view = bucket.unreduced_view(handle)
        return view / self._unreduced_scale(bucket) if view.dtype == bucket.dtype else None

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
            with bucket.shard_or_new().fill() as shard:
                shard.zero_()
        bucket.has_grad[handle.index] = True
        self._seen[handle] = value

    def write_back(self) -> None:
        """Take over changes of gradients that were handed out."""
        if not self._seen:
            return
        for handle, value in self._seen.items():
            buffer, bucket = handle.buffer, self.buckets[handle.buffer]
            if not bucket.has_grad[handle.index]:  # seen inside an accumulation window
                carried = self._carried(bucket)
                bucket.unreduced_view(handle).copy_(value.detach() * carried)
                continue
            where = buffer.own_range(handle)
            if len(where):
                mine = buffer.flatten(handle, value.detach())[where.start : where.stop]
                with bucket.shard_or_new().use(write=True) as shard:
                    buffer.own_piece(handle, shard).copy_(mine)
        self._seen.clear()

    def zero(self, handles: Collection[ParamHandle], *, set_to_none: bool) -> None:
        """Drop the gradients of some parameters (``zero_grad``).

        Local, but every rank has to do it.
        """
        if set_to_none:  # what would be dropped need not be scaled before
            self._scales = [(h, f) for h, f in self._scales if not set(h) <= set(handles)]
        self._apply_scales()
        self.wait()
        handles = self.local.drop(handles, set_to_none=set_to_none)
        for handle in handles:
            self._seen.pop(handle, None)
            self.pending.discard(handle)
        for bucket in {self.buckets[handle.buffer]: None for handle in handles}:
            bucket.forget(handles, keep_zeros=not set_to_none)

    def regions(self, handles: Collection[ParamHandle], *, write: bool = False) -> Iterator[Tensor]:
        """This rank's pieces of the reduced gradients of some parameters, as few tensors as
        possible, each until the next one is asked for; ``write``: they are going to be changed.
        """
        self._apply_scales()
        yield from self._each_region(self._runs(handles), write=write)

    def squares(self, handles: Collection[ParamHandle]) -> list[Tensor]:
        """The squared norms of the regions, as fp64 scalars."""
        self._apply_scales()
        runs = self._runs(handles)
        return [bucket.square(*run) for bucket in runs for run in runs[bucket]]

    @staticmethod
    def _each_region(runs: dict[GradBucket, list[list[int]]], *, write: bool) -> Iterator[Tensor]:
        buckets = list(runs)
        # not strict: a rank may have no part of any of them
        for bucket, following in zip(buckets, [*buckets[1:], None], strict=False):
            with bucket.shard_or_new().use(write=write) as shard:
                if following is not None:
                    following.shard_or_new().start_load()
                for start, stop in runs[bucket]:
                    yield shard[start:stop]

    def _runs(self, handles: Collection[ParamHandle]) -> dict[GradBucket, list[list[int]]]:
        """Per bucket, the parts of its shard that hold gradients of these parameters."""
        self.wait()
        self.write_back()
        found: dict[GradBucket, list[list[int]]] = {}
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
                    found.setdefault(bucket, []).append(run)
                else:
                    run[1] = stop
        return found

    def scale_later(self, handles: Collection[ParamHandle], factor: Tensor) -> None:
        """Multiply the gradients of some parameters by a 0-d factor, at the latest before anybody
        looks at them.
        """
        self._scales.append((handles, factor))

    def take_scale(
        self, handles: Collection[ParamHandle], *, stays_due: bool = False
    ) -> Tensor | None:
        """The factor by which the caller has to multiply the gradients of these parameters, None
        for 1; ``stays_due``: the caller does so in a copy.
        """
        scales, self._scales = self._scales, []
        mine = [entry for entry in scales if entry[0] is handles]
        self._scales = [entry for entry in scales if entry[0] is not handles]
        if len(mine) == 1 and not self._scales:
            self._scales = mine if stays_due else []
            return mine[0][1]
        self._scales = scales
        self._apply_scales()
        return None

    def _apply_scales(self) -> None:
        scales, self._scales = self._scales, []
        for handles, factor in scales:
            for region in self._each_region(self._runs(handles), write=True):
                region.mul_(factor.to(region.device))

    # -- accounting

    def unreduced_bytes(self) -> int:
        """Bytes of full gradients that are being collected or reduced."""
        waiting = [bucket.unreduced for bucket in self._order if bucket.unreduced is not None]
        return sum(t.numel() * t.element_size() for t in waiting) + sum(
            reduction.nbytes for reduction in self._in_flight
        )

    def shard_bytes(self) -> int:
        """Bytes of the reduced gradients that are not offloaded."""
        return sum(bucket.shard.nbytes for bucket in self._order if bucket.shard is not None)

    def drop_all(self) -> None:
        """Forget all gradients, also those on their way. Local, but every rank has to do it."""
        self._in_flight.clear()
        self._scales.clear()
        self._has_window = False
        self.zero({h for buffer in self.buckets for h in buffer.handles}, set_to_none=True)

    def close(self) -> None:
        """Drop all gradients; nothing may be under way."""
        self._in_flight.clear()
        self._seen.clear()
        self.local.close()
        for bucket in self._order:
            bucket.close()
