"""What rests in host memory or on disk in a run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer

from lightning_zero.checkpointing import CheckpointingStrategy
from lightning_zero.config import OffloadConfig, PrecisionPolicy
from lightning_zero.engine.offload import Offload, OffloadCounts
from lightning_zero.engine.offload_forecast import offload_forecast
from lightning_zero.engine.parking import parked_states
from lightning_zero.engine.placement import Placement, placements_of
from lightning_zero.offload_devices import (
    OffloadPlaces,
    active_places,
    announce_nothing,
    open_offload,
)


class OffloadingStrategy(CheckpointingStrategy):
    """The part of :class:`~lightning_zero.ZeroStrategy` that offloads."""

    _parking: Offload | None = None

    def configure_offload(self, offload: OffloadConfig) -> None:
        """Choose what rests elsewhere; before the run begins.

        Raises:
            MisconfigurationException: if another choice has been made.
        """
        if self.engine is not None or self.config.offload not in (None, offload):
            raise MisconfigurationException(
                f"Offloading is configured twice: {self.config.offload} and {offload}. Use either"
                " the strategy's options or one OffloadCallback."
            )
        self.config = replace(self.config, offload=offload)

    def offload_places(self, *, is_fitting: bool) -> OffloadPlaces:
        """What of the user's choice applies to this run; says so if nothing does."""
        places = active_places(self.config.offload, self.root_device, is_fitting=is_fitting)
        if is_fitting and self.config.offload is not None:
            announce_nothing(self.config.offload, self.root_device)
        return places

    @property
    def parking_place(self) -> str | None:
        """Where optimizer state rests while a fit evaluates: "cpu", "nvme" or None."""
        return active_places(
            self.config.offload, self.root_device, is_fitting=True, is_parking=True
        ).states

    def shards_weights(self, places: OffloadPlaces) -> bool:
        """Whether every rank holds only its shard of the model weights."""
        placements = placements_of(
            self.config.stage, self.world_size, offloads_weights=places.params is not None
        )
        return placements.weight is Placement.SHARDED

    def open_offload(
        self, optimizers: list[Optimizer], places: OffloadPlaces, policy: PrecisionPolicy
    ) -> Offload | None:
        """Where the shards of a run will rest; None if nothing is offloaded. Collective."""
        config = self.config.offload
        if config is None or not any(places):
            return None
        if places.states is None and optimizers and self.root_device.type != "cpu":
            raise MisconfigurationException(
                "Parameters that rest elsewhere are stepped on the host: offload the optimizer,"
                f" too (optimizer='cpu' or 'nvme' besides params='{places.params}')."
            )
        assert self.lightning_module is not None
        needed = offload_forecast(
            self.lightning_module,
            optimizers,
            policy,
            places.states,
            places.params,
            is_on_host=self.root_device.type == "cpu",
            is_sharded=self.shards_weights(places),
            is_delayed=config.delay_after is not None,
        )
        return open_offload(config, places, self.root_device, self._collectives, needed)

    def offload_counts(self) -> OffloadCounts | None:
        """What offloading has cost this rank since the run began; None if nothing is offloaded."""
        offload = None if self.engine is None else self.engine.offload
        return None if offload is None else offload.counts()

    @contextlib.contextmanager
    def parked_states(self) -> Iterator[None]:
        """Inside, optimizer state rests where ``OffloadConfig.optimizer`` says. Every rank."""
        place, config = self.parking_place, self.config.offload
        if place is None or self.engine is None or config is None:
            yield
            return
        if self._parking is None:
            needed = {place: sum(driver.state_bytes() for driver in self.engine.drivers)}
            self._parking = open_offload(
                config, OffloadPlaces(place, None), self.root_device, self._collectives, needed
            )
        with parked_states(self.engine, self._parking):
            yield

    def close_parking(self) -> None:
        """Give back what :meth:`parked_states` has used."""
        parking, self._parking = self._parking, None
        if parking is not None:
            parking.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_parking": None}


def offload_config(
    optimizer: str | None, params: str | None, nvme_path: str | os.PathLike[str] | None
) -> OffloadConfig | None:
    """The strategy's options as configuration; None if there are none."""
    if optimizer is None and params is None and nvme_path is None:
        return None
    path = None if nvme_path is None else os.fspath(nvme_path)
    return OffloadConfig(optimizer=optimizer, params=params, nvme_path=path)
