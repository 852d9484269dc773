"""The two files that say what is in a checkpoint: DCP's ``.metadata`` and our ``manifest.json``.

The first describes the tensors and is what stock DCP reads. The second holds facts about the run,
and the size and checksums of every file, its own included.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
import sys
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_zero.checkpoint.checksum import FileRecord
from lightning_zero.checkpoint.failures import (
    CheckpointError,
    CorruptCheckpointError,
    describe,
    some,
)

KEY = "__tensor__"  # in `meta`, {KEY: name} stands for a tensor of the folder
MODEL = "model."  # the names of weights begin with it
METADATA, MANIFEST, META = ".metadata", "manifest.json", "meta.pt"
FORMAT = 2
# In format 1 `meta` has nothing of [Note: held objects]; all else is the same.
_READABLE = (1, FORMAT)
_PREFIX = '{"crc32": "%08x", '
_DCP = "torch.distributed.checkpoint"
# What the pickle of a Metadata consists of, as written by torch 2.3 and later.
_ALLOWED = {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    *(
        (f"{_DCP}.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


class Item(NamedTuple):
    """One chunk in a file."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    file: str
    begin: int  # bytes
    nbytes: int


class Manifest(NamedTuple):
    """What ``manifest.json`` holds."""

    info: dict[str, Any]
    files: dict[str, FileRecord]


def build_metadata(items: Iterable[Item], empty: Iterable[Item], folder: str) -> Metadata:
    """Describe the chunks of all ranks.

    Args:
        items: all chunks.
        empty: one entry for every tensor that has no elements and therefore no chunks.
        folder: the name of the checkpoint, for information.

    Raises:
        CheckpointError: if they contradict each other, overlap or leave holes; names the tensors.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for item in (*empty, *items):
        tensor = tensors.get(item.name)
        if tensor is None:
            properties = TensorProperties(dtype=item.dtype)
            tensor = TensorStorageMetadata(properties, torch.Size(item.shape), [])
            tensors[item.name] = tensor
        if tuple(tensor.size) != item.shape or tensor.properties.dtype != item.dtype:
            raise CheckpointError(f"ranks have different shapes or dtypes of '{item.name}'")
        if not item.file:
            continue
        index = MetadataIndex(item.name, item.offsets, len(tensor.chunks))
        storage[index] = _StorageInfo(item.file, item.begin, item.nbytes)
        chunk = ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.lengths))
        tensor.chunks.append(chunk)
    wrong = [name for name, tensor in tensors.items() if not _is_covered(tensor)]
    if wrong:
        raise CheckpointError(f"the chunks of all ranks overlap or leave holes in {some(wrong)}")
    return Metadata(
        dict(tensors),
        planner_data={name: _path(name) for name in tensors},
        storage_data=storage,
        storage_meta=StorageMeta(checkpoint_id=folder),
        version=CURRENT_DCP_VERSION,
    )


class Placeholder(dict[str, str]):
    """``{KEY: name}`` where ``meta`` is not plain data: stands for a tensor of the folder."""

    @classmethod
    def of(cls, name: str) -> Placeholder:
        """The one for the tensor ``name``."""
        return cls({KEY: name})


def placeholder(value: Any) -> str | None:
    """The name of the tensor for which an entry of ``meta`` stands, if it does."""
    return value[KEY] if isinstance(value, Placeholder) else None


def _path(name: str) -> tuple[str, ...]:
    """Where tools that rebuild nested dictionaries put a tensor, as Lightning's own folders do."""
    if name.startswith(MODEL):
        return (MODEL.rstrip("."), name.removeprefix(MODEL))
    state = re.fullmatch(r"(optimizer_\d+)\.state\.(.+)\.([^.]+)", name)
    return (name,) if state is None else (state[1], "state", state[2], state[3])


def _is_covered(tensor: TensorStorageMetadata) -> bool:
    """Whether the chunks cover the tensor, every element once."""
    if len(tensor.chunks) == 1 and tensor.chunks[0].sizes == tensor.size:
        return not any(tensor.chunks[0].offsets)
    chunks = sorted(tensor.chunks, key=lambda chunk: tuple(chunk.offsets))
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(tensor.size):
        return False
    active: list[ChunkStorageMetadata] = []  # that reach the slice of the first dimension
    for chunk in chunks:
        if not _is_inside(chunk, tensor.size):
            return False
        if chunk.offsets:
            active = [a for a in active if a.offsets[0] + a.sizes[0] > chunk.offsets[0]]
        if any(_overlap(chunk, other) for other in active):
            return False
        active.append(chunk)
    return True


def _is_inside(chunk: ChunkStorageMetadata, size: torch.Size) -> bool:
    return len(chunk.offsets) == len(chunk.sizes) == len(size) and all(
        o >= 0 and n >= 0 and o + n <= whole
        for o, n, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)
    )


def _overlap(a: ChunkStorageMetadata, b: ChunkStorageMetadata) -> bool:
    return all(
        start_a < start_b + length_b and start_b < start_a + length_a
        for start_a, length_a, start_b, length_b in zip(
            a.offsets, a.sizes, b.offsets, b.sizes, strict=True
        )
    )


class _MetadataUnpickler(pickle.Unpickler):
    """Makes nothing but what a Metadata consists of: a pickle can ask for any function."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"'{module}.{name}' has no business in it")


def parse_metadata(data: bytes, path: Path) -> Metadata:
    """Read ``.metadata``, by us or by DCP, without executing anything in it.

    Raises:
        CorruptCheckpointError: if it holds anything else; names the file.
    """
    try:
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
        _validate(metadata)
    except Exception as error:  # a broken pickle raises anything
        raise CorruptCheckpointError(
            f"'{path}' is not the metadata of a checkpoint ({describe(error)})"
        ) from error
    assert isinstance(metadata, Metadata)
    return metadata


def _validate(metadata: Any) -> None:
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise TypeError(f"it holds a {type(metadata).__name__}")
    kinds = {*map(type, metadata.storage_data), *map(type, metadata.storage_data.values())}
    if not kinds <= {MetadataIndex, _StorageInfo}:
        raise TypeError("it has an unknown kind of index")
    for file in {place.relative_path for place in metadata.storage_data.values()}:
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise ValueError(f"it points to a file outside of the folder, {file!r}")
    for name, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            continue
        if not _is_covered(tensor):
            raise ValueError(f"the chunks of '{name}' overlap or leave holes")
        if any(MetadataIndex(name, c.offsets) not in metadata.storage_data for c in tensor.chunks):
            raise ValueError(f"it does not say where '{name}' is")


def dump_manifest(info: Mapping[str, Any], files: Mapping[str, FileRecord]) -> bytes:
    """The content of ``manifest.json``. It begins with the checksum of all that follows.

    Raises:
        CheckpointError: if ``info`` can not be written as JSON.
    """
    body = {
        "format": FORMAT,
        "byteorder": sys.byteorder,
        "info": info,
        "files": {
            name: {
                "bytes": record.nbytes,
                "crc32": f"{record.crc32:08x}",
                "running_crc32": "".join(f"{crc:08x}" for crc in record.blocks),
            }
            for name, record in sorted(files.items())
        },
    }
    try:
        text = json.dumps(body, indent=1, allow_nan=True).removeprefix("{")
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"`info` can not be written as JSON: {error}") from error
    return ((_PREFIX % zlib.crc32(text.encode())) + text).encode()


def parse_manifest(data: bytes, path: Path) -> Manifest:
    """Read ``manifest.json``.

    Raises:
        CorruptCheckpointError: if it is damaged.
        CheckpointError: if it is of a newer format, or of a machine of the other byte order.
    """
    prefix, text = data[: len(_PREFIX % 0)], data[len(_PREFIX % 0) :]
    if prefix != (_PREFIX % zlib.crc32(text)).encode():
        raise CorruptCheckpointError(f"'{path}' is damaged: it is not what was written")
    body = json.loads(data)
    if body["format"] not in _READABLE or body["byteorder"] != sys.byteorder:
        raise CheckpointError(
            f"'{path}' has format {body['format']}, {body['byteorder']}-endian; this version of"
            f" lightning_zero reads formats up to {FORMAT}, {sys.byteorder}-endian"
        )
    files = {}
    for name, entry in body["files"].items():
        running = entry["running_crc32"]
        blocks = tuple(int(running[i : i + 8], 16) for i in range(0, len(running), 8))
        files[name] = FileRecord(entry["bytes"], blocks)
    return Manifest(body["info"], files)
