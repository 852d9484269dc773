"""On a slow disk, reads and writes of several flat buffers and the next forward go on together."""

from __future__ import annotations

import threading
import time
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from lightning_zero.offload.disk_file import DiskFile
from tests.support.distributed import run_on_ranks
from tests.support.models import Regression, mlp, regression_loader
from tests.support.offload import strategy
from tests.support.runs import make_trainer

SECONDS = 0.02
NET = partial(mlp, 7, 13, 11, 9, 5)
LAST = "'net.6'"


class Move(NamedTuple):
    """One read or write of a slab."""

    what: str
    buffer: str
    is_read: bool
    start: float
    stop: float


class Timed(Regression):
    """Notes when a forward has used the first layer, and when the step has returned."""

    def __init__(self) -> None:
        super().__init__(NET, partial(torch.optim.AdamW, lr=1e-2))
        self.used: list[float] = []
        self.stepped: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net[0](batch[0])
        self.used.append(time.monotonic())
        return ((self.net[1:](hidden) - batch[1]) ** 2).mean()

    def on_train_batch_end(self, *_: Any) -> None:
        self.stepped.append(time.monotonic())


def train(stage: int, disk: str) -> tuple[list[Move], list[float], list[float]]:
    moves: list[Move] = []
    lock = threading.Lock()
    plain = DiskFile._move

    def slow(self: DiskFile, data: Any, offset: int, label: str, *, is_read: bool) -> None:
        start = time.monotonic()
        time.sleep(SECONDS)
        plain(self, data, offset, label, is_read=is_read)
        what, _, buffer = label.rpartition(" of ")
        with lock:
            moves.append(Move(what, buffer, is_read, start, time.monotonic()))

    module = Timed()
    make = partial(strategy, stage, optimizer="nvme", nvme_path=disk)
    with mock.patch.object(DiskFile, "_move", slow):
        make_trainer(make).fit(module, regression_loader())
    return moves, module.used, module.stepped


# On several ranks stages 1 and 2 wait for all their updates before they gather them.
@pytest.mark.parametrize(("stage", "num_ranks"), [(1, 1), (3, 1), (3, 2)])
def test_a_slow_disk_is_hidden(stage: int, num_ranks: int, tmp_path: Path) -> None:
    for moves, used, stepped in run_on_ranks(train, num_ranks, stage, str(tmp_path)):
        last = [
            move
            for move in moves
            if move.what == "'exp_avg'" and move.buffer == LAST and not move.is_read
        ]
        assert len(last) == len(used) == 5
        for number in range(1, 4):
            # what is written has just been stepped, and the next forward had begun before that
            assert used[number + 1] < last[number].start
            of_state = [
                move
                for move in moves
                if "exp_avg" in move.what
                and stepped[number] < move.start
                and move.stop < last[number].stop
            ]
            assert any(
                one.buffer != other.buffer and one.start < other.stop and other.start < one.stop
                for one, other in combinations(of_state, 2)
            ), of_state
