"""How a run ends that was broken off: what the ranks still do together.

[Note: the ending] Each rank that handles an error says so through the store, with its step, and
waits a few seconds for the others to do the same. If all of them are there and have made the same
steps, their shards make up whole weights. They then talk over groups that are made anew, because
the old ones may be shut down, or hold messages that nobody will read. The module gets its weights
back; and if every rank has an error of its own, rather than one that another rank has caused, a
checkpoint can be saved. Otherwise nothing is communicated any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_zero.comm.collectives import Collectives
from lightning_zero.comm.groups import renew_groups
from lightning_zero.comm.watch import is_lost_connection
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.errors import OffloadError, PeerFailedError, RankMismatchError, ZeroError

_CONSEQUENCES = (OffloadError, PeerFailedError, RankMismatchError)
_PATIENCE_SECONDS = 8.0
_PATIENCE_WITH_THE_LOST = 2.0


@dataclass(frozen=True)
class Ending:
    """What the ranks can still do after an error."""

    gathers: bool
    """All ranks are there, at the same step: weights can be gathered."""
    saves: bool
    """A checkpoint can be saved."""
    reason: str
    """Why not, in words."""


def agree_on_ending(
    error: BaseException | None, engine: ZeroEngine | None, collectives: Collectives
) -> Ending:
    """Find out what can still be done. Every rank that handles an error; takes some seconds if
    others do not. Raises nothing.
    """
    watch = collectives.watch
    is_caused = is_lost_connection(error)
    if watch is not None and is_caused:
        watch.await_reason()
    progress = None if engine is None else engine.progress
    state = {
        "error": "an unknown error" if error is None else f"{type(error).__name__}: {error}",
        "is_disk": isinstance(error, OffloadError),
        "is_own": not (is_caused or isinstance(error, _CONSEQUENCES)),
        "steps": None if progress is None else [progress.steps, progress.is_stepping],
        "backwards": None if progress is None else [progress.backwards, progress.is_in_backward],
    }
    states: list[dict[str, Any]] | None = [state]
    if watch is not None:
        is_lost = watch.reason is None and (is_caused or isinstance(error, PeerFailedError))
        patience = _PATIENCE_WITH_THE_LOST if is_lost else _PATIENCE_SECONDS
        is_reported = is_caused and watch.reason is not None
        states = watch.ask_all(None if is_reported else error, state, patience)
    ending = _judge(states)
    if not ending.gathers or engine is None or states is None:
        return ending
    first = states[0]["backwards"]
    keeps_gradients = ending.saves and all(s["backwards"] == first for s in states) and not first[1]
    return _try_to_meet(
        ending, collectives, lambda: engine.recover(keeps_gradients=keeps_gradients)
    )


def _judge(states: list[dict[str, Any]] | None) -> Ending:
    if states is None:
        return Ending(False, False, "not all ranks can be reached any more")
    causes = "; ".join(f"rank {rank}: {state['error']}" for rank, state in enumerate(states))
    if any(state["is_disk"] for state in states):
        return Ending(False, False, causes)
    if any(state["steps"] != states[0]["steps"] for state in states):
        return Ending(False, False, f"the ranks have not made the same steps. {causes}")
    is_own = all(state["is_own"] for state in states)
    return Ending(True, is_own, "" if is_own else causes)


def _try_to_meet(ending: Ending, collectives: Collectives, recover: Callable[[], None]) -> Ending:
    try:
        renew_groups(collectives)
        recover()
    except (ZeroError, RuntimeError) as error:
        return Ending(False, False, f"the ranks can not reach each other any more: {error}")
    return ending
