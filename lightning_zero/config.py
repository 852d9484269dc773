"""The configuration of a sharded run, validated once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch

MEBIBYTE = 1 << 20
NVME_PATH = "LIGHTNING_ZERO_NVME_PATH"
"""Environment variable with the folder of "nvme", where none is given."""

_PLACES = (None, "cpu", "nvme")


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """What rests in host memory or on disk instead of the device's memory."""

    optimizer: str | None = None
    """Where optimizer state, master weights and gradients rest: "cpu", "nvme" or None."""

    params: str | None = None
    """Where the parameters of stage 3 rest: "cpu", "nvme" or None."""

    nvme_path: str | None = None
    """A folder on a local disk, for "nvme". None: the environment variable
    ``LIGHTNING_ZERO_NVME_PATH``.
    """

    pin_memory: bool | int = True
    """Whether host memory that the device copies from or to may be page-locked, or how many bytes
    of it, of all ranks of a machine together. True: at most half of the machine's memory.
    """

    staging_bytes: int = 512 * MEBIBYTE
    """Host memory through which files are read and written, of all ranks of a machine together.
    Units are made small enough for it; a single module that needs more gets more.
    """

    during: str = "always"
    """When: "training" (`fit`), "evaluation" (optimizer state only rests elsewhere while a fit is
    validating, parameters in `validate`, `test` and `predict`), or "always".
    """

    delayed_update: bool | int = False
    """Step in the background of the next forward and backward, which still use the old weights; a
    number: after so many ordinary steps.
    """

    force: bool = False
    """Offload to "cpu" even where the model is in host memory anyway."""

    def __post_init__(self) -> None:
        self._check_places()
        if self.during not in ("training", "evaluation", "always"):
            raise ValueError(
                f"`during` must be 'training', 'evaluation' or 'always', got {self.during!r}."
            )
        if self.pin_memory < 0:
            raise ValueError(f"`pin_memory` must be a bool or bytes, got {self.pin_memory!r}.")
        if self.staging_bytes < 1:
            raise ValueError(f"`staging_bytes` must be at least 1, got {self.staging_bytes!r}.")
        if self.delayed_update < 0:
            raise ValueError(
                "`delayed_update` must be a bool or a number of steps, got"
                f" {self.delayed_update!r}."
            )
        is_for_delay = self.optimizer == "cpu" and self.during != "evaluation"
        if self.delay_after is not None and not is_for_delay:
            raise ValueError(
                "`delayed_update` is for an optimizer that steps on the host while the device"
                f" trains: optimizer='cpu', got optimizer={self.optimizer!r},"
                f" during={self.during!r}."
            )

    def _check_places(self) -> None:
        for name in ("optimizer", "params"):
            if getattr(self, name) not in _PLACES:
                raise ValueError(
                    f"The {name} can be offloaded to 'cpu' or 'nvme', got {getattr(self, name)!r}."
                )
        if self.optimizer is None and self.params is None:
            raise ValueError("Nothing is offloaded: choose a place for the optimizer or params.")
        uses_nvme = "nvme" in (self.optimizer, self.params)
        if uses_nvme and self.folder is None:
            raise ValueError(
                "Offloading to 'nvme' needs a folder on a local disk: pass `nvme_path=...`, or set"
                f" the environment variable {NVME_PATH}."
            )
        if self.nvme_path is not None and not uses_nvme:
            raise ValueError(
                f"`nvme_path={str(self.nvme_path)!r}` is given, but nothing is offloaded to 'nvme'."
            )

    @property
    def delay_after(self) -> int | None:
        """After how many ordinary steps updates are delayed; None: never."""
        if isinstance(self.delayed_update, bool):
            return 0 if self.delayed_update else None
        return self.delayed_update

    @property
    def folder(self) -> str | None:
        """The folder of "nvme"."""
        return self.nvme_path or os.environ.get(NVME_PATH)


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

    offload: OffloadConfig | None = None
    """What rests in host memory or on disk; None: nothing."""

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
        if self.offload is not None and self.offload.params is not None and self.stage != 3:
            raise ValueError(
                f"Parameters can be offloaded at stage 3 only, where they are sharded; got stage"
                f" {self.stage} with params={self.offload.params!r}. Pass stage=3, or offload the"
                " optimizer alone."
            )
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
