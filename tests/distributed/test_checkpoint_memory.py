"""Saving and loading take little memory besides the state itself."""

from __future__ import annotations

import ctypes
import gc
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
SLACK = 6 * MB  # buffers of files


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


class _MallocInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated_bytes() -> int:
    """Memory that malloc has given out, to tensors as well as to Python, and not got back.

    What the process holds besides is nobody's need: freed memory that is kept for reuse, of which
    there is more or less by the order in which threads have freed and asked.
    """
    describe = ctypes.CDLL(None).mallinfo2
    describe.restype = _MallocInfo
    info = describe()
    return int(info.uordblks + info.hblkhd)


@contextmanager
def growth(found: list[int]) -> Iterator[None]:
    """Appends by how much the memory of this process grew at most."""
    gc.collect()  # nothing that is freed on the way makes up for what is taken
    start, peak, is_over = allocated_bytes(), 0, threading.Event()

    def look() -> None:
        nonlocal peak
        while not is_over.is_set():
            peak = max(peak, allocated_bytes())
            time.sleep(0.001)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        found.append(max(peak, allocated_bytes()) - start)


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
            # one file is put together on rank 0: weights and two moments, and one of them gathered
            whole = 4 * MODEL if save_format == "full" and rank == 0 else 0
            assert saving <= whole + SLACK + LAYER, (stage, rank, saving / MB)
            two_halves = MODEL  # of the moments
            assert two_halves <= loading <= two_halves + LAYER + SLACK, (stage, rank, loading / MB)
