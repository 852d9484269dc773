"""What the engine asks of a group of ranks, and how NCCL and a single rank do it. gloo has its own
exchange (gloo.py).

Every method is collective: all ranks call it, in the same order, with the same shapes. ``label``
names the operation in error messages; ``tag`` tells operations of different buffers apart, so that
ranks which disagree never swap data.
"""

from __future__ import annotations

import abc
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm.watch import StallWatch
from lightning_zero.errors import RankMismatchError
from lightning_zero.pending import Pending

_ORDER_BITS = 32


class OwnedRange(NamedTuple):
    """Elements ``start .. stop`` of a tensor, owned by ``rank``."""

    rank: int
    start: int
    stop: int


@dataclass
class CommCounters:
    """Collectives that this rank took part in and payload bytes that it sent."""

    all_gathers: int = 0
    reduce_scatters: int = 0
    all_reduces: int = 0
    broadcasts: int = 0
    sent_bytes: int = 0

    def reset(self) -> None:
        """Set all counters to zero."""
        for counter in fields(self):
            setattr(self, counter.name, 0)


def nbytes(tensor: Tensor) -> int:
    """Bytes of the elements of a tensor."""
    return tensor.numel() * tensor.element_size()


class Collectives(abc.ABC):
    """Moves flat buffers between the ranks of one group."""

    def __init__(self, rank: int, world_size: int, watch: StallWatch | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.counters = CommCounters()
        self.watch = watch

    @abc.abstractmethod
    def start_all_gather(self, flat: Tensor, shard: Tensor, label: str, tag: int) -> Pending:
        """Fill ``flat`` (world_size * n elements) with the shards (n elements) of all ranks, in
        rank order.

        ``shard`` may be this rank's slice of ``flat``. It must not change before the wait.
        """

    @abc.abstractmethod
    def start_reduce_scatter(self, flat: Tensor, out: Tensor, label: str, tag: int) -> Pending:
        """Sum ``flat`` over the ranks and put this rank's slice of the sum into ``out``.

        ``out`` may be this rank's slice of ``flat``, or of a wider dtype. ``flat`` must not change
        before the wait and is undefined after it.
        """

    @abc.abstractmethod
    def start_gather_ranges(
        self, out: Tensor, ranges: Iterable[OwnedRange], label: str, tag: int
    ) -> Pending:
        """Send each range of the 1-D tensor ``out`` from its owner to all ranks, in place."""

    @abc.abstractmethod
    def start_all_reduce(self, tensor: Tensor, op: Any, label: str) -> Pending:
        """Reduce a small tensor over the ranks, in place. ``op`` is a ``ReduceOp``."""

    @abc.abstractmethod
    def any_rank(self, flags: list[bool], device: torch.device, label: str) -> list[bool]:
        """Which of the flags are set on any rank. Blocks the host."""

    @abc.abstractmethod
    def broadcast(self, tensor: Tensor, label: str) -> None:
        """Send rank 0's contiguous tensor to all ranks, in place."""

    @abc.abstractmethod
    def all_gather_object(self, value: Any, label: str) -> list[Any]:
        """The picklable ``value`` of every rank, in rank order."""


class SingleRank(Collectives):
    """The group of one rank: nothing moves."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def start_all_gather(self, flat: Tensor, shard: Tensor, label: str, tag: int) -> Pending:
        """See the base class."""
        if shard.data_ptr() != flat.data_ptr():
            flat.copy_(shard)
        return Pending()

    def start_reduce_scatter(self, flat: Tensor, out: Tensor, label: str, tag: int) -> Pending:
        """See the base class."""
        if out.data_ptr() != flat.data_ptr():
            out.copy_(flat)
        return Pending()

    def start_gather_ranges(
        self, out: Tensor, ranges: Iterable[OwnedRange], label: str, tag: int
    ) -> Pending:
        """See the base class."""
        return Pending()

    def start_all_reduce(self, tensor: Tensor, op: Any, label: str) -> Pending:
        """See the base class."""
        return Pending()

    def any_rank(self, flags: list[bool], device: torch.device, label: str) -> list[bool]:
        """See the base class."""
        return flags

    def broadcast(self, tensor: Tensor, label: str) -> None:
        """See the base class."""

    def all_gather_object(self, value: Any, label: str) -> list[Any]:
        """See the base class."""
        return [value]


class GroupCollectives(Collectives):
    """What all process groups have in common: small reductions, broadcasts and objects."""

    def __init__(self, group: dist.ProcessGroup, watch: StallWatch) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), watch)
        self.watch: StallWatch = watch
        self.is_stale = False  # the groups are not fit for another run
        self._group = group
        self._watch = watch

    def use_groups(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Talk over other groups of the same ranks from now on."""
        self._group = groups[-1]
        self.is_stale = False

    def _pending(
        self,
        works: list[Any],
        label: str,
        then: Callable[[], None] | None = None,
        *,
        is_read: bool = False,
    ) -> Pending:
        def finish() -> None:
            with self._watch.waiting(label, is_read=is_read):
                for work in works:
                    work.wait()
            if then is not None:
                then()

        return Pending(finish)

    def start_all_reduce(self, tensor: Tensor, op: Any, label: str) -> Pending:
        """See the base class."""
        self.counters.all_reduces += 1
        self.counters.sent_bytes += 2 * nbytes(tensor) * (self.world_size - 1) // self.world_size
        return self._pending(
            [dist.all_reduce(tensor, op=op, group=self._group, async_op=True)], label
        )

    def any_rank(self, flags: list[bool], device: torch.device, label: str) -> list[bool]:
        """See the base class."""
        on_device = torch.tensor(flags, dtype=torch.uint8, device=device)
        self.start_all_reduce(on_device, dist.ReduceOp.MAX, label).wait()
        with self._watch.waiting(label):  # on CUDA the host is blocked here
            return [bool(flag) for flag in on_device.tolist()]

    def broadcast(self, tensor: Tensor, label: str) -> None:
        """See the base class."""
        self.counters.broadcasts += 1
        self.counters.sent_bytes += nbytes(tensor) if self.rank == 0 else 0
        raw = tensor.view(-1).view(torch.uint8)
        self._pending(
            [dist.broadcast(raw, group_src=0, group=self._group, async_op=True)], label
        ).wait()

    def all_gather_object(self, value: Any, label: str) -> list[Any]:
        """See the base class."""
        values: list[Any] = [None] * self.world_size
        with self._watch.waiting(label):
            dist.all_gather_object(values, value, group=self._group)
        return values


class NativeCollectives(GroupCollectives):
    """The backend's own collectives (NCCL), which run on streams of their own.

    Gathers and reductions use different groups, hence different streams, so that they do not queue
    behind each other. ``wait`` orders the current stream after the collective and does not block
    the host.
    """

    def __init__(
        self, gather_group: dist.ProcessGroup, reduce_group: dist.ProcessGroup, watch: StallWatch
    ) -> None:
        super().__init__(reduce_group, watch)
        self._gather_group = gather_group
        self._order = 0

    def use_groups(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """See the base class."""
        super().use_groups(groups)
        self._gather_group = groups[0]

    def start_all_gather(self, flat: Tensor, shard: Tensor, label: str, tag: int) -> Pending:
        """See the base class."""
        self._note(tag)
        self.counters.all_gathers += 1
        self.counters.sent_bytes += nbytes(shard) * (self.world_size - 1)
        out, own = (
            flat.view(torch.uint8),
            shard.view(torch.uint8),
        )  # any dtype, the backend need not know it
        return self._pending(
            [dist.all_gather_into_tensor(out, own, group=self._gather_group, async_op=True)], label
        )

    def start_reduce_scatter(self, flat: Tensor, out: Tensor, label: str, tag: int) -> Pending:
        """See the base class."""
        self._note(~tag)
        self.counters.reduce_scatters += 1
        own = out if out.dtype == flat.dtype else flat.view(self.world_size, -1)[self.rank]
        self.counters.sent_bytes += nbytes(own) * (self.world_size - 1)
        source, target = (torch.view_as_real(t) if t.is_complex() else t for t in (flat, own))
        work = dist.reduce_scatter_tensor(target, source, group=self._group, async_op=True)

        def widen() -> None:
            out.copy_(own)

        return self._pending([work], label, None if own is out else widen)

    def start_gather_ranges(
        self, out: Tensor, ranges: Iterable[OwnedRange], label: str, tag: int
    ) -> Pending:
        """See the base class."""
        self.counters.all_gathers += 1
        works = []
        for owned in ranges:
            raw = out[owned.start : owned.stop].view(torch.uint8)
            self.counters.sent_bytes += nbytes(raw) if owned.rank == self.rank else 0
            works.append(
                dist.broadcast(raw, group_src=owned.rank, group=self._gather_group, async_op=True)
            )
        return self._pending(works, label, is_read=True)

    def any_rank(self, flags: list[bool], device: torch.device, label: str) -> list[bool]:
        """See the base class.

        Raises:
            RankMismatchError: if the ranks have not started the same collectives in the same order
                since the last call. The backend matches them by order alone, so data of different
                units may have been mixed up; the step must not happen.
        """
        bits = [bool(self._order >> i & 1) for i in range(_ORDER_BITS)]
        self._order = 0
        found = super().any_rank([*flags, *bits, *(not bit for bit in bits)], device, label)
        seen_set, seen_unset = found[-2 * _ORDER_BITS : -_ORDER_BITS], found[-_ORDER_BITS:]
        if any(a and b for a, b in zip(seen_set, seen_unset, strict=True)):
            raise RankMismatchError(
                "The ranks gathered or reduced different units, or in another order. Under"
                " stage 3 every rank has to use the same modules in the same order. Where they take"
                " different paths, wrap the code in `lightning_zero.full_params(module)` or use"
                " stage 2."
            )
        return found[: len(flags)]

    def _note(self, operation: int) -> None:
        """Fold an operation into the fingerprint of their order."""
        self._order = zlib.crc32(operation.to_bytes(8, "little", signed=True), self._order)
