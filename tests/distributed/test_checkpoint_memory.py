"""Saving and loading take little memory besides the state itself."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_zero import ZeroStrategy
from tests.support.distributed import run_on_ranks
from tests.support.models import regression_loader
from tests.support.runs import make_trainer

MB = 1 << 20
WIDTH, LAYERS = 1024, 12
LAYER = 4 * WIDTH * WIDTH  # 4 MB, the largest tensor
MODEL = LAYERS * LAYER
SLACK = 8 * MB  # buffers of files, and what the allocator keeps


class Wide(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def anonymous_bytes() -> int:
    """Memory of the process that is no file's."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None
    return int(found.group(1)) * 1024


@contextmanager
def growth(found: list[int]) -> Iterator[None]:
    """Appends by how much the memory of this process grew at most."""
    start, peak, is_over = anonymous_bytes(), 0, threading.Event()

    def look() -> None:
        nonlocal peak
        while not is_over.is_set():
            peak = max(peak, anonymous_bytes())
            time.sleep(0.002)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        found.append(peak - start)


class Measured(ZeroStrategy):
    """Notes how much memory grows while it saves, and while it loads states of optimizers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.saving: list[int] = []
        self.loading: list[int] = []

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with growth(self.saving):
            super().save_checkpoint(*args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        with growth(self.loading):
            super().load_optimizer_state_dict(checkpoint)


def save_and_load(stage: int, save_format: str, path: Path) -> tuple[int, int]:
    class Saves(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(path)

    make = partial(Measured, stage, save_format=save_format)
    data = partial(regression_loader, 2, 3, (WIDTH,))
    first = make_trainer(make, callbacks=[Saves()])
    first.fit(Wide(), data())
    second = make_trainer(make, max_epochs=2)
    second.fit(Wide(), data(), ckpt_path=path)
    return first.strategy.saving[0], second.strategy.loading[0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("save_format", ["sharded", "full"])
def test_saving_and_loading_take_little_memory(save_format: str, tmp_path: Path) -> None:
    for stage in (1, 3):
        path = tmp_path / f"{stage}.ckpt"
        for rank, (saving, loading) in enumerate(
            run_on_ranks(save_and_load, 2, stage, save_format, path)
        ):
            # one file is put together on rank 0
            whole = 3 * MODEL * 2 if save_format == "full" and rank == 0 else 0
            assert saving <= whole + SLACK + LAYER, (stage, rank, saving / MB)
            assert loading <= MODEL + LAYER + SLACK, (
                stage,
                rank,
                loading / MB,
            )  # two moments' half
