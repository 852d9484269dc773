"""What is in a checkpoint folder, and whether it is what was written."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_zero.checkpoint.checksum import BLOCK
from lightning_zero.checkpoint.encoding import decode
from lightning_zero.checkpoint.failures import CheckpointError, CorruptCheckpointError, describe
from lightning_zero.checkpoint.files import CheckedFile, check_size, read_small_file
from lightning_zero.checkpoint.index import (
    MANIFEST,
    META,
    METADATA,
    Manifest,
    parse_manifest,
    parse_metadata,
)
from lightning_zero.checkpoint.kinds import in_words
from lightning_zero.checkpoint.workplace import recover

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass
class TensorPart:
    """What a rank holds (to save) or wants (to load) of one tensor.

    Attributes:
        shape: of the whole tensor.
        dtype: of the whole tensor.
        chunks: where each rectangle begins and a tensor of its shape, of any strides and device;
            there may be none.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Iterable[tuple[tuple[int, ...], Tensor]]


@dataclass
class FolderInfo:
    """What is in a checkpoint.

    Attributes:
        shapes, dtypes: of the tensors, by name.
        bytes: of all files together.
        files: the size of each file in bytes, by name; without the manifest's own.
        info: the facts that were given when it was saved; empty in a folder of another origin.
    """

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    bytes: int
    files: dict[str, int]
    info: dict[str, Any]

    @property
    def names(self) -> list[str]:
        """Of the tensors."""
        return list(self.shapes)


@dataclass
class OpenFolder:
    """The index of a folder that has been read.

    Attributes:
        path: the folder.
        metadata: DCP's.
        manifest: None if the folder was not written here.
        tensors: the tensors by name, without what else DCP may have put there.
    """

    path: Path
    metadata: Metadata
    manifest: Manifest | None

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> OpenFolder:
        """Read the index and check the sizes of all files.

        Raises:
            CheckpointError: if it is not a checkpoint.
            CorruptCheckpointError: if a file is missing, has another size, or the index is damaged.
        """
        path, manifest = _find(path)
        records = {} if manifest is None else manifest.files
        for name, record in records.items():
            try:
                check_size(path / name, (path / name).stat().st_size, record)
            except FileNotFoundError:
                raise CorruptCheckpointError(f"'{path / name}' is missing") from None
        data = read_small_file(path / METADATA, records.get(METADATA))
        metadata = parse_metadata(data, path / METADATA)
        if manifest is not None:
            used = {place.relative_path for place in metadata.storage_data.values()}
            for name in sorted({METADATA, META, *used} - set(records)):
                raise CorruptCheckpointError(f"'{path / MANIFEST}' does not mention '{name}'")
        return cls(path, metadata, manifest)

    def __post_init__(self) -> None:
        entries = self.metadata.state_dict_metadata.items()
        self.tensors = {n: t for n, t in entries if isinstance(t, TensorStorageMetadata)}


def read_meta(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The ``meta`` of a checkpoint; tensors on the CPU. For tensors of the folder there are
    :class:`~lightning_zero.checkpoint.index.Placeholder` objects.

    Raises:
        CheckpointError: see :func:`read_encoded`, and if it holds objects of classes that are not
            there.
        CorruptCheckpointError: see :func:`read_encoded`.
    """
    meta: dict[str, Any] = decode(read_encoded(path))
    return meta


def read_encoded(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What ``meta.pt`` holds, as plain data ([Note: held objects]).

    Raises:
        CheckpointError: if it is not a checkpoint or was written by DCP alone.
        CorruptCheckpointError: if ``meta.pt`` is damaged or holds anything but data.
    """
    path, manifest = _find(path)
    if manifest is None:
        raise CheckpointError(f"'{path}' was not written by lightning_zero: it has no {META}")
    data = read_small_file(path / META, manifest.files.get(META))
    try:
        meta: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:
        raise CorruptCheckpointError(
            f"'{path / META}' is not safe to load: {describe(error)}"
        ) from error
    return meta


def read_info(path: str | os.PathLike[str]) -> FolderInfo:
    """What is in a checkpoint; its sizes are checked.

    Raises:
        CheckpointError, CorruptCheckpointError: see :meth:`OpenFolder.open`.
    """
    folder = OpenFolder.open(path)
    if folder.manifest is not None:
        files = {name: record.nbytes for name, record in folder.manifest.files.items()}
    else:
        files = {f.name: f.stat().st_size for f in folder.path.iterdir() if f.is_file()}
    return FolderInfo(
        {name: tuple(tensor.size) for name, tensor in folder.tensors.items()},
        {name: tensor.properties.dtype for name, tensor in folder.tensors.items()},
        sum(files.values()),
        files,
        folder.manifest.info if folder.manifest is not None else {},
    )


def verify(
    path: str | os.PathLike[str], *, every_byte: bool, progress: Progress | None = None
) -> None:
    """Check a checkpoint: its index and the sizes of all files, and with ``every_byte`` all bytes.

    Raises:
        CorruptCheckpointError: names the file that is not what was written.
        CheckpointError: if there is nothing to check against.
    """
    folder = OpenFolder.open(path)
    if folder.manifest is None:
        raise CheckpointError(f"'{path}' was not written by lightning_zero: it has no {MANIFEST}")
    read_encoded(path)
    if not every_byte:
        return
    files = folder.manifest.files
    done, total = 0, sum(record.nbytes for record in files.values())
    buffer = memoryview(bytearray(8 * BLOCK))
    for name, record in files.items():
        with CheckedFile(folder.path / name, record) as file:
            for start in range(0, record.nbytes, len(buffer)):
                part = buffer[: min(len(buffer), record.nbytes - start)]
                file.read_into(start, part)
                done += len(part)
                if progress is not None:
                    progress(done, total)


def _find(path: str | os.PathLike[str]) -> tuple[Path, Manifest | None]:
    """A folder and its manifest, if it has one."""
    path = Path(os.path.abspath(path))
    recover(path)
    if (path / MANIFEST).is_file():
        data = read_small_file(path / MANIFEST, None)
        return path, parse_manifest(data, path / MANIFEST)
    if not (path / METADATA).is_file():
        raise CheckpointError(in_words(path))
    return path, None
