"""The configuration of a sharded run, validated once."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch

MEBIBYTE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """What a user can choose about a sharded run."""

    stage: int = 3
    """ZeRO stage: 1 shards optimizer state, 2 also gradients, 3 also model weights."""

    bucket_bytes: int = MEBIBYTE
    """Modules smaller than this are gathered and reduced together with their neighbours, in bytes
    of weights.
    """

    window_bytes: int | None = None
    """Upper bound for weights gathered at the same time under stage 3, in bytes. The unit in use
    and the next one are
    always allowed. None: twice the median unit.
    """

    broadcast_buffers: bool = True
    """Send rank 0's buffers to all ranks before a training forward, as DDP does by default."""

    gather_after_fit: bool = True
    """Give the module its full weights back when a run ends.

    False leaves placeholders that say so.
    """

    unit_classes: tuple[type, ...] = ()
    """Modules of these classes are gathered as one unit each, whatever their size."""

    save_format: str = "full"
    """How checkpoints are saved: "full", one ordinary Lightning file, or "sharded", a folder into
    which every rank writes its part.
    """

    stall_timeout: timedelta = timedelta(seconds=20)
    """How long all ranks may wait for different operations before they stop with an error."""

    def __post_init__(self) -> None:
        if self.stage not in (1, 2, 3):
            raise ValueError(f"`stage` must be 1, 2 or 3, got {self.stage!r}.")
        if self.bucket_bytes < 1:
            raise ValueError(f"`bucket_bytes` must be at least 1, got {self.bucket_bytes!r}.")
        if self.window_bytes is not None and self.window_bytes < 0:
            raise ValueError(
                f"`window_bytes` must be None or at least 0, got {self.window_bytes!r}."
            )
        if self.save_format not in ("full", "sharded"):
            raise ValueError(
                f"`save_format` must be 'full' or 'sharded', got {self.save_format!r}."
            )
        if self.stall_timeout <= timedelta(0):
            raise ValueError(f"`stall_timeout` must be positive, got {self.stall_timeout!r}.")
        for cls in self.unit_classes:
            if not isinstance(cls, type):
                raise ValueError(f"`unit_classes` must hold module classes, got {cls!r}.")


@dataclass(frozen=True, kw_only=True)
class PrecisionPolicy:
    """Which dtypes a sharded run uses. The default leaves every parameter as it is.

    [Note: master weights] With a ``compute_dtype``, every parameter in fp32 or in that dtype is
    stepped in fp32: this rank's shard is its master weight, and the model weight that modules use
    is a rounded copy. Outside of module calls the parameter is its master weight: it presents
    itself in fp32, and so it is saved and given back.
    """

    compute_dtype: torch.dtype | None = None
    """The half precision of "mixed" training; None: no masters, parameters are stepped as they are.
    """

    model_dtype: torch.dtype | None = None
    """What fp32 parameters are rounded to for modules; None: they stay in fp32."""

    grad_dtype: torch.dtype | None = None
    """Gradients are sent in this; None: as they were computed, or in fp32 what was added up in
    fp32 before it is sent.
    """

    keep_fp32: tuple[type | str, ...] = ()
    """Module classes, and names of modules or parameters (with wildcards), whose parameters are
    neither rounded nor in half precision.
    """

    default_keep_fp32: tuple[type, ...] = ()
    """Classes of modules and of their forward pre-hooks: parameters of theirs that were built in
    fp32 are not rounded.
    """
