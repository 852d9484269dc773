"""The errors that lightning_zero raises besides ``ValueError`` and ``NotImplementedError``."""

from __future__ import annotations


class ZeroError(RuntimeError):
    """Base class of the errors that can occur while a sharded model is in use."""


class RankMismatchError(ZeroError):
    """Ranks wait for different operations, so none of them can ever finish; the message names who
    waits where.
    """


class PeerFailedError(ZeroError):
    """Another rank failed; the message quotes that rank's own error."""


class ShardedParameterError(ZeroError):
    """A parameter was used whose full value is not available any more; the message names it and the
    way out.
    """


class LossScaleError(ZeroError):
    """Gradients overflowed again and again at a loss scale that can not be lowered."""


class OffloadError(ZeroError):
    """Moving data between host memory and disk failed; the message names the file, what was being
    done, and the system's reason.
    """
