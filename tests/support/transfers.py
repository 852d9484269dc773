"""A double of the copies between device and host that shows a missing wait on the CPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lightning_zero import ZeroStrategy
from lightning_zero.config import OffloadConfig
from lightning_zero.offload.transfer import Transfers
from lightning_zero.pending import Pending
from tests.support.runs import fine_strategy


def make_strategy(stage: int, **options: Any) -> Strategy:
    """A stage with units as small as they get and an `OffloadConfig` of ``options``."""
    strategy = fine_strategy(f"zero{stage}")
    assert isinstance(strategy, ZeroStrategy)
    strategy.configure_offload(OffloadConfig(**options))
    return strategy


class LateTransfers(Transfers):
    """Copies nothing before somebody waits for it; until then the target holds NaN.

    Work that is given to the stream of uploads sees the uploads before it, as on CUDA. What a
    download reads must not change while it is under way.
    """

    is_on_host = False  # shards rest where they would if the device had memory of its own

    def __init__(self, device: torch.device, *, pins: bool = True) -> None:
        super().__init__(device, pins=pins)
        self._late: list[Pending] = []
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def uploading(self, after: Any = None) -> Iterator[None]:
        with self._lock:
            late, self._late = self._late, []
            for pending in late:
                pending.wait()
        yield

    def upload(self, target: Tensor, source: Tensor, after: Any = None) -> Pending:
        content = source.clone()

        def copy() -> None:
            with torch.no_grad():
                target.copy_(content)

        with self._lock:
            self.uploaded_bytes += target.numel() * target.element_size()
            copying = Pending(copy)
            target.fill_(float("nan"))
            self._late.append(copying)

        def finish() -> None:
            with self._lock:
                copying.wait()

        return Pending(finish)

    def download(self, target: Tensor, source: Tensor) -> Pending:
        self.downloaded_bytes += source.numel() * source.element_size()
        content = source.clone()
        target.fill_(float("nan"))

        def finish() -> None:
            assert torch.equal(source.view(torch.uint8), content.view(torch.uint8)), (
                "a gradient was changed while it was being copied to the host"
            )
            target.copy_(content)

        return Pending(finish)
