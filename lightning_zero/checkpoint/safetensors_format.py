"""Files in the safetensors format: a JSON header with places, then nothing but the tensors' bytes.

Written here, one tensor after the other, because the ``safetensors`` package wants all of a file's
tensors in memory at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from lightning_zero.checkpoint.checksum import BLOCK
from lightning_zero.checkpoint.envelope import count
from lightning_zero.checkpoint.failures import CheckpointError
from lightning_zero.checkpoint.files import memory_of

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Entry(NamedTuple):
    """One tensor of a file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        return count(self.shape) * self.dtype.itemsize


Batches = Callable[[Sequence[Entry]], Iterator[Mapping[str, Tensor]]]


def split(entries: Sequence[Entry], max_bytes: int | None) -> list[list[Entry]]:
    """Distribute tensors over files, in their order.

    Args:
        entries: the tensors.
        max_bytes: of a file; a larger tensor gets one of its own. None: one file for all.
    """
    files: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if files[-1] and max_bytes is not None and size + entry.nbytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(entry)
        size += entry.nbytes
    return files


def write(
    path: Path, entries: Sequence[Entry], batches: Batches, aliases: Mapping[str, str]
) -> None:
    """Write one file; the caller syncs it.

    Args:
        path: of the new file.
        entries: what is in it.
        batches: gives the tensors in the order in which they are asked for, a few at a time.
        aliases: names that stand for tensors under other names, noted in the header as
            ``safetensors.torch.save_model`` does.

    Raises:
        CheckpointError: if the format has no name for a dtype; names the tensors.
    """
    ordered, header = _layout(entries, aliases)
    with path.open("xb") as file:
        file.write(header)
        for batch in batches(ordered):
            for tensor in batch.values():
                file.write(memory_of(tensor))


def compare(
    path: Path, entries: Sequence[Entry], batches: Batches, aliases: Mapping[str, str]
) -> None:
    """Check that a file is what :func:`write` writes with the same arguments, byte by byte.

    Raises:
        CheckpointError: names the tensor that differs.
    """
    ordered, header = _layout(entries, aliases)
    with path.open("rb") as file:
        if file.read(len(header)) != header:
            raise CheckpointError(f"the header of '{path}' is not what was written")
        for batch in batches(ordered):
            for name, tensor in batch.items():
                if not _is_next(file, memory_of(tensor)):
                    raise CheckpointError(f"'{name}' in '{path}' is not what was written")
        if file.read(1):
            raise CheckpointError(f"'{path}' is longer than what was written")


def _is_next(file: BinaryIO, expected: memoryview) -> bool:
    for start in range(0, len(expected), BLOCK):
        part = expected[start : start + BLOCK]
        if file.read(len(part)) != part.tobytes():  # comparing a memoryview is ten times slower
            return False
    return True


def _layout(entries: Sequence[Entry], aliases: Mapping[str, str]) -> tuple[list[Entry], bytes]:
    """The tensors in the file's order and its header."""
    unknown = [f"{e.name} ({e.dtype})" for e in entries if e.dtype not in NAMES]
    if unknown:
        raise CheckpointError(f"safetensors has no dtype for {', '.join(unknown)}")
    # wide dtypes first, so that every tensor is aligned
    ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    names = {entry.name for entry in entries}
    noted = {alias: name for alias, name in aliases.items() if name in names}
    header: dict[str, object] = {"__metadata__": {"format": "pt", **noted}}
    place = 0
    for entry in ordered:
        header[entry.name] = {
            "dtype": NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [place, place + entry.nbytes],
        }
        place += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return ordered, len(text).to_bytes(8, "little") + text
