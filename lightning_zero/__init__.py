"""ZeRO stage 1, 2 and 3 training as a native PyTorch Lightning strategy.

Importing the package registers the strategy names ``zero1``, ``zero2`` and ``zero3``::

    import lightning_zero
    Trainer(strategy="zero3")
"""

from lightning_zero.callbacks.offload import OffloadCallback
from lightning_zero.checkpoint.consolidate import consolidate
from lightning_zero.checkpoint.foreign import convert
from lightning_zero.engine.memory import MemoryRow
from lightning_zero.errors import (
    LossScaleError,
    OffloadError,
    PeerFailedError,
    RankMismatchError,
    ShardedParameterError,
    ZeroError,
)
from lightning_zero.precision import ZeroPrecision
from lightning_zero.registration import register
from lightning_zero.strategy import ZeroStrategy, full_params

__version__ = "0.1.0"

__all__ = [
    "LossScaleError",
    "MemoryRow",
    "OffloadCallback",
    "OffloadError",
    "PeerFailedError",
    "RankMismatchError",
    "ShardedParameterError",
    "ZeroError",
    "ZeroPrecision",
    "ZeroStrategy",
    "consolidate",
    "convert",
    "full_params",
]

register()
