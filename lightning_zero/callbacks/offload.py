"""``OffloadCallback``: what rests in host memory or on disk, and what that costs per step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_zero.config import MEBIBYTE, OffloadConfig
from lightning_zero.engine.offload import OffloadCounts
from lightning_zero.strategy import ZeroStrategy


class OffloadCallback(Callback):
    """Lets optimizer state and parameters rest in host memory or on disk, with the same results.

    Logs after every optimizer step ``offload/moved_bytes`` (to and from the device and files, of
    this rank), ``offload/exposed_seconds`` (that training waited for them) and ``offload/overlap``
    (the part of the work that was hidden, from 0 to 1).

    Args:
        optimizer: "cpu" or "nvme": where optimizer state, master weights and gradients rest.
        params: "cpu" or "nvme": where the parameters of stage 3 rest.
        nvme_path: a folder on a local disk, for "nvme".
        pin_memory: whether host memory that the device copies from or to may be page-locked, or how
            many bytes of it per machine.
        during: "training": in ``fit``. "evaluation": while a fit validates, and inside of
            :meth:`parked`, optimizer state is moved away and back; parameters in ``validate``,
            ``test`` and ``predict``. "always": in ``fit``, ``validate``, ``test`` and ``predict``.
        staging_bytes: host memory through which files are read and written, per machine.
        delayed_update: step on the host while the next forward and backward run on the device with
            the old weights (ZeRO-Offload, section 5.2): hides the step, changes the results. A
            number: after so many ordinary steps, since weights change fastest at the beginning.
        force: offload to "cpu" even where the model is in host memory anyway.

    Raises:
        ValueError: if an option has a value that is not allowed, or contradicts another.
    """

    def __init__(  # noqa: PLR0913  (one name per choice)
        self,
        optimizer: Literal["cpu", "nvme"] | None = None,
        params: Literal["cpu", "nvme"] | None = None,
        *,
        nvme_path: str | os.PathLike[str] | None = None,
        pin_memory: bool | int = True,
        during: Literal["training", "evaluation", "always"] = "always",
        staging_bytes: int = 512 * MEBIBYTE,
        delayed_update: bool | int = False,
        force: bool = False,
    ) -> None:
        self.config = OffloadConfig(
            optimizer=optimizer,
            params=params,
            nvme_path=None if nvme_path is None else os.fspath(nvme_path),
            pin_memory=pin_memory,
            during=during,
            staging_bytes=staging_bytes,
            delayed_update=delayed_update,
            force=force,
        )
        self._strategy: ZeroStrategy | None = None
        self._before = OffloadCounts()
        self._parked = contextlib.ExitStack()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Configure the strategy."""
        strategy = trainer.strategy
        if not isinstance(strategy, ZeroStrategy):
            raise MisconfigurationException(
                f"OffloadCallback needs a ZeroStrategy, got {type(strategy).__name__}. Pass"
                " Trainer(strategy='zero2') or 'zero3'."
            )
        strategy.configure_offload(self.config)
        self._strategy, self._before = strategy, OffloadCounts()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what the last step has cost."""
        counts = None if self._strategy is None else self._strategy.offload_counts()
        if counts is None:
            return
        cost, self._before = counts - self._before, counts
        pl_module.log_dict(
            {
                "offload/moved_bytes": float(cost.moved_bytes),
                "offload/exposed_seconds": cost.exposed_seconds,
                "offload/overlap": cost.overlap,
            }
        )

    @contextlib.contextmanager
    def parked(self) -> Iterator[None]:
        """Inside, optimizer state rests elsewhere: to generate between training steps. Collective.

        Does nothing unless ``during="evaluation"``.
        """
        if self._strategy is None or self.config.during != "evaluation":
            yield
            return
        with self._strategy.parked_states():
            yield

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Move optimizer state away."""
        self._parked.enter_context(self.parked())

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Bring optimizer state back."""
        self._parked.close()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Forget what was moved away."""
        self._parked.pop_all()
