"""The training text: Python's standard library, which is on every machine that can run this."""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

# Tests, third-party packages, and files that are tables rather than code.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data"}
ONE_FILE_IN = 20  # goes to the validation text


# Indentation is written as one byte, its depth: control characters that no source contains.
DEEPEST = 8
_SPACES = re.compile(rb"^(?: {4}){1,%d}" % DEEPEST, re.MULTILINE)
_DEPTH = re.compile(rb"[\x01-\x%02x]" % DEEPEST)


class Corpus(NamedTuple):
    train: Tensor  # 1D uint8
    validation: Tensor  # 1D uint8


def pack(source: bytes) -> bytes:
    """The source with the indentation of every line in one byte.

    A quarter of the library is leading spaces, and a small model would learn little but to count
    them.
    """
    return _SPACES.sub(lambda match: bytes([len(match[0]) // 4]), source)


def unpack(text: bytes) -> bytes:
    """Text as `pack` writes it, back to spaces."""
    return _DEPTH.sub(lambda match: b"    " * match[0][0], text)


def read_corpus() -> Corpus:
    """All bytes of the standard library's sources, split by file.

    A file's side depends on its name alone, so it is the same on every rank and in every run.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    train, validation = bytearray(), bytearray()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if LEFT_OUT.isdisjoint(name.parts):
            digest = hashlib.sha256(name.as_posix().encode()).digest()
            side = validation if digest[0] % ONE_FILE_IN == 0 else train
            side += pack(path.read_bytes())
    return Corpus(
        torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(validation, dtype=torch.uint8)
    )


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text at given places: `context` bytes, and the byte after each of them."""

    def __init__(self, text: Tensor, starts: Sequence[int], context: int) -> None:
        self.text = text
        self.starts = starts
        self.context = context

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = self.starts[index]
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


class CorpusDataModule(LightningDataModule):
    """Batches of windows; one epoch is exactly `max_steps` training steps.

    Lightning gives each rank its own part of every epoch with a `DistributedSampler`. Counts are
    multiples of the global batch, so that it has nothing to pad and no window is counted twice.
    """

    def __init__(
        self, *, context: int, batch_size: int, max_steps: int, val_bytes: int, seed: int
    ) -> None:
        super().__init__()
        self.context = context
        self.batch_size = batch_size
        self.max_steps = max_steps
        self.val_bytes = val_bytes
        self.seed = seed
        self.corpus: Corpus | None = None

    def setup(self, stage: str) -> None:
        self.corpus = self.corpus or read_corpus()

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        assert self.corpus is not None
        text = self.corpus.train
        count = self.max_steps * self._global_batch_size()
        generator = torch.Generator().manual_seed(self.seed)
        starts = torch.randint(len(text) - self.context, (count,), generator=generator)
        return DataLoader(Windows(text, starts.tolist(), self.context), self.batch_size)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        assert self.corpus is not None
        text = self.corpus.validation
        batch = self._global_batch_size()
        wanted = min(self.val_bytes, len(text) - 1) // self.context
        count = max(wanted // batch, 1) * batch
        stride = (len(text) - self.context - 1) / max(count - 1, 1)
        starts = [int(index * stride) for index in range(count)]
        return DataLoader(Windows(text, starts, self.context), self.batch_size)

    def _global_batch_size(self) -> int:
        return self.batch_size * (self.trainer.world_size if self.trainer else 1)
