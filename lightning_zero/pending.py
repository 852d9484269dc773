"""The one handle that every ``start_x`` returns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial


class Pending:
    """An asynchronous action that has been started.

    Args:
        finish: called by the first :meth:`wait`; it blocks (CPU) or orders the current stream after
            the action (CUDA). ``None`` means that there is nothing to wait for.
        poll: whether ``finish`` would return at once; None: not known before the wait.
    """

    __slots__ = ("_finish", "_poll")

    def __init__(
        self, finish: Callable[[], None] | None = None, poll: Callable[[], bool] | None = None
    ) -> None:
        self._finish, self._poll = finish, poll

    @property
    def is_done(self) -> bool:
        """Whether :meth:`wait` is known to return at once."""
        return self._finish is None or (self._poll is not None and self._poll())

    def wait(self) -> None:
        """Order the caller after the action.

        Calling it again is free. Raises what the action raised, every time: what it has left
        half-done must not pass for done later.
        """
        finish, self._finish = self._finish, None
        if finish is None:
            return
        try:
            finish()
        except Exception as failure:
            self._finish = partial(_fail, failure)
            raise
        except BaseException:  # Ctrl-C: the action goes on
            self._finish = finish
            raise


def _fail(failure: Exception) -> None:
    raise failure
