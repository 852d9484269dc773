"""The one handle that every ``start_x`` returns."""

from __future__ import annotations

from collections.abc import Callable


class Pending:
    """An asynchronous action that has been started.

    Args:
        finish: called by the first :meth:`wait`; it blocks (CPU) or orders the current stream after
            the action (CUDA). ``None`` means that there is nothing to wait for.
    """

    __slots__ = ("_finish",)

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self._finish = finish

    def wait(self) -> None:
        """Order the caller after the action.

        Calling it again is free. Raises what the action raised.
        """
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
