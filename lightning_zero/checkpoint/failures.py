"""What can go wrong with a checkpoint, and how all ranks learn of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from lightning_zero.comm.collectives import Collectives
from lightning_zero.errors import ZeroError

T = TypeVar("T")


class CheckpointError(ZeroError):
    """A checkpoint can not be written or does not hold what is asked of it."""


class CorruptCheckpointError(CheckpointError):
    """A file of a checkpoint is not what was written; the message names the file."""


@dataclass
class _Outcome(Generic[T]):
    value: T | None = None
    error: str | None = None


def together(collectives: Collectives, what: str, action: Callable[[], T]) -> list[T]:
    """Do something on every rank; nobody goes on before all have done it.

    Collective. ``what`` names the action in the errors of all ranks.

    Returns:
        What the action returned, by rank. It is pickled.

    Raises:
        CheckpointError: on all ranks if the action raised on any; names those ranks and the causes.
    """
    cause: Exception | None = None
    outcome: _Outcome[T] = _Outcome()
    try:
        outcome.value = action()
    except Exception as error:
        cause = error
        outcome.error = str(error) if isinstance(error, CheckpointError) else describe(error)
    outcomes: list[_Outcome[T]] = collectives.all_gather_object(outcome, what)
    failed = {rank: o.error for rank, o in enumerate(outcomes) if o.error is not None}
    if failed:
        causes = "; ".join(f"rank {rank}: {error}" for rank, error in failed.items())
        raise CheckpointError(f"Failed: {what}. {causes}") from cause
    return [o.value for o in outcomes]  # type: ignore[misc]


def describe(error: BaseException) -> str:
    """An error as part of another's message."""
    return f"{type(error).__name__}: {error}"


def some(names: list[str], limit: int = 10) -> str:
    """A list of names for an error message, cut if it is long."""
    shown = ", ".join(f"'{name}'" for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
