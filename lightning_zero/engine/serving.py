"""Reads of parameters by rank 0 alone, while hooks look at a checkpoint that is about to be saved.

[Note: rank 0 may look alone] What hooks see in ``checkpoint["state_dict"]`` are sharded parameters,
and most such hooks write files on rank 0 only. Between the moment that the state dict is made and
the moment that it is saved rank 0 therefore asks for what it reads, and the other ranks, when they
come to the next thing that all ranks do together, serve what it has asked for. They may look at the
same values in the same order, as code does that runs on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from lightning_zero.comm.collectives import Collectives
from lightning_zero.engine.buffer import ParamHandle
from lightning_zero.errors import ShardedParameterError

Read = Callable[[ParamHandle], Tensor]


class Serving:
    """Serves the reads of rank 0.

    Args:
        handles: all parameters, in the same order on every rank.
        collectives: the ranks.
        read: reads one parameter; collective.
    """

    def __init__(
        self, handles: Sequence[ParamHandle], collectives: Collectives, read: Read
    ) -> None:
        self._handles, self._collectives, self._do_read = handles, collectives, read
        self._number = {handle: number for number, handle in enumerate(handles)}
        self.is_open = False

    def read(self, handle: ParamHandle) -> Tensor:
        """A value, on rank 0 or on a rank that looks at what rank 0 looks at.

        Raises:
            ShardedParameterError: on another rank, if rank 0 does not look at it.
        """
        if self._collectives.rank == 0:
            self._exchange(self._number[handle])
            return self._do_read(handle)
        for asked, value in self._served():
            if asked is handle:
                return value
        raise ShardedParameterError(
            f"Rank {self._collectives.rank} looks at parameter '{handle.fqn}' in a checkpoint that"
            " is about to be saved, and rank 0 does not, or did before. Look at values on rank 0"
            " alone, or on all ranks in the same order."
        )

    def meet(self) -> None:
        """All ranks have come to something that they do together. Collective."""
        if not self.is_open:
            return
        if self._collectives.rank == 0:
            self._exchange(None)
        else:
            for _ in self._served():
                pass

    def _served(self) -> Iterator[tuple[ParamHandle, Tensor]]:
        while True:
            number = self._exchange(None)
            if number is None:
                return
            handle = self._handles[number]
            yield handle, self._do_read(handle)

    def _exchange(self, number: int | None) -> int | None:
        """What rank 0 asks for; None if it asks for nothing more."""
        label = "what hooks of rank 0 read of a checkpoint"
        asked: list[int | None] = self._collectives.all_gather_object(number, label)
        return asked[0]
