"""The exchange for gloo: point-to-point messages straight into place, sums in rank order.

gloo's own reduce-scatter is an all-reduce (twice the bytes) and its all-gather is slow. Here each
rank sends every other rank just the part that this one needs, so a reduce-scatter or an all-gather
of n bytes moves n (N-1)/N bytes per rank, which is the least possible. The sum runs in rank order
whatever arrives first, so results do not depend on timing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_zero.comm.collectives import GroupCollectives, OwnedRange, nbytes
from lightning_zero.pending import Pending

_KINDS = 4  # tags of one buffer: gather, reduce, ranges, spare
_GATHER, _REDUCE, _RANGES = range(3)


def sum_in_rank_order(parts: list[Tensor], own_rank: int, out: Tensor) -> None:
    """``out = parts[0] + parts[1] + ...`` in that order and in the dtype of ``out``; all parts but
    the own one may be overwritten.
    """
    if out.dtype != parts[0].dtype:
        out.copy_(parts[0])
        for part in parts[1:]:
            out.add_(part)
        return
    total = parts[0]
    for rank, part in enumerate(parts[1:], start=1):
        # the own part may be needed later and belongs to the caller; a received one may hold the
        # running sum
        target = out if rank == len(parts) - 1 or total is parts[own_rank] else total
        total = torch.add(total, part, out=target)


class GlooExchange(GroupCollectives):
    """Point-to-point exchange over a gloo group (CPU tensors)."""

    def start_all_gather(self, flat: Tensor, shard: Tensor, label: str, tag: int) -> Pending:
        """See the base class."""
        self.counters.all_gathers += 1
        slices = flat.view(self.world_size, -1)
        works = self._exchange(
            [(rank, shard) for rank in self._peers()],
            [(rank, slices[rank]) for rank in self._peers()],
            tag * _KINDS + _GATHER,
            label,
        )
        if shard.data_ptr() != slices[self.rank].data_ptr():
            slices[self.rank].copy_(shard)
        return self._pending(works, label)

    def start_reduce_scatter(self, flat: Tensor, out: Tensor, label: str, tag: int) -> Pending:
        """See the base class."""
        self.counters.reduce_scatters += 1
        parts = list(flat.view(self.world_size, -1).unbind(0))
        received = {rank: torch.empty_like(parts[self.rank]) for rank in self._peers()}
        works = self._exchange(
            [(rank, parts[rank]) for rank in self._peers()],
            list(received.items()),
            tag * _KINDS + _REDUCE,
            label,
        )

        def add_up() -> None:
            ordered = [received.get(rank, parts[self.rank]) for rank in range(self.world_size)]
            sum_in_rank_order(ordered, self.rank, out)

        return self._pending(works, label, add_up)

    def start_gather_ranges(
        self, out: Tensor, ranges: Iterable[OwnedRange], label: str, tag: int
    ) -> Pending:
        """See the base class."""
        self.counters.all_gathers += 1
        sends, receives = [], []
        for owned in ranges:
            part = out[owned.start : owned.stop]
            if owned.rank == self.rank:
                sends += [(rank, part) for rank in self._peers()]
            else:
                receives.append((owned.rank, part))
        return self._pending(
            self._exchange(sends, receives, tag * _KINDS + _RANGES, label), label, is_read=True
        )

    def _peers(self) -> list[int]:
        # start with the next rank, so that not all ranks send to rank 0 first
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def _exchange(
        self,
        sends: list[tuple[int, Tensor]],
        receives: list[tuple[int, Tensor]],
        tag: int,
        label: str,
    ) -> list[Any]:
        try:
            works = [self._group.recv([part], rank, tag) for rank, part in receives if part.numel()]
            for rank, part in sends:
                if part.numel():
                    self.counters.sent_bytes += nbytes(part)
                    works.append(self._group.send([part], rank, tag))
        except RuntimeError as error:  # another rank has gone before this one has begun to wait
            raise self._watch.explain(error, label) from error
        return works
