"""A double of the collectives that makes a missing wait visible on a machine without a GPU.

On CUDA a collective runs on another stream: its result is undefined until somebody waits, and its
memory must not be freed before. Here nothing is moved before the wait, the target is poisoned, and
the wait refuses memory that has been freed.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from lightning_zero import ZeroStrategy
from lightning_zero.comm.collectives import OwnedRange
from lightning_zero.comm.gloo import GlooExchange
from lightning_zero.pending import Pending


def _poison(tensor: Tensor) -> None:
    tensor.fill_(float("nan") if tensor.is_floating_point() else 77)


def _must_be_there(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.numel():
            assert tensor.untyped_storage().nbytes() > 0, "freed before the wait"


class DeferredExchange(GlooExchange):
    """Moves data when the caller waits, and not before."""

    def start_all_gather(self, flat: Tensor, shard: Tensor, label: str, tag: int) -> Pending:
        slices = flat.view(self.world_size, -1)
        for rank in self._peers():
            _poison(slices[rank])
        start = super().start_all_gather

        def move() -> None:
            _must_be_there(flat, shard)
            start(flat, shard, label, tag).wait()

        return Pending(move)

    def start_reduce_scatter(self, flat: Tensor, out: Tensor, label: str, tag: int) -> Pending:
        if out.untyped_storage()._cdata != flat.untyped_storage()._cdata:
            _poison(out)
        start = super().start_reduce_scatter

        def move() -> None:
            _must_be_there(flat, out)
            start(flat, out, label, tag).wait()

        return Pending(move)

    def start_gather_ranges(
        self, out: Tensor, ranges: Iterable[OwnedRange], label: str, tag: int
    ) -> Pending:
        ranges, start = list(ranges), super().start_gather_ranges
        for owned in ranges:
            if owned.rank != self.rank:
                _poison(out[owned.start : owned.stop])
        return Pending(lambda: start(out, ranges, label, tag).wait())


class DeferredZeroStrategy(ZeroStrategy):
    """A strategy whose collectives move nothing before the wait."""

    def setup_environment(self) -> None:
        super().setup_environment()
        self._collectives.__class__ = DeferredExchange

    def teardown(self) -> None:
        super().teardown()
        if self._collectives.world_size > 1:
            self._collectives.__class__ = GlooExchange
