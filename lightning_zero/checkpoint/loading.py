"""From a folder into tensors, whatever ranks wrote it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lightning_zero.checkpoint import envelope
from lightning_zero.checkpoint.failures import (
    CheckpointError,
    CorruptCheckpointError,
    describe,
    some,
)
from lightning_zero.checkpoint.files import CheckedFile
from lightning_zero.checkpoint.opening import OpenFolder, TensorPart


def load_tensors(path: str | os.PathLike[str], wanted: Mapping[str, TensorPart]) -> None:
    """Fill the chunks of ``wanted`` in place, cast to their dtypes.

    Local: each rank reads what it wants. What is read is checked; if it is not what was written the
    chunks have been filled in part.

    Raises:
        CheckpointError: if names are missing or shapes differ; lists them.
        CorruptCheckpointError: names the file that is missing or damaged.
    """
    load_from(OpenFolder.open(path), wanted)


@torch.no_grad()
def load_from(folder: OpenFolder, wanted: Mapping[str, TensorPart]) -> None:
    """:func:`load_tensors` from a folder whose index has been read."""
    requests = _plan(folder, wanted)
    if folder.manifest is not None:
        _read(folder, requests)
    else:
        _read_with_dcp(folder, requests)


class Request(NamedTuple):
    """Elements of one saved chunk, and where they go."""

    name: str
    chunk: int
    offsets: Sequence[int]  # in the chunk
    place: _StorageInfo
    target: Tensor


def _plan(folder: OpenFolder, wanted: Mapping[str, TensorPart]) -> list[Request]:
    saved = folder.tensors
    missing = [name for name in wanted if name not in saved]
    if missing:
        raise CheckpointError(f"'{folder.path}' does not have {some(missing)}")
    differing = [
        f"{name}: {tuple(saved[name].size)} in the checkpoint, {tuple(part.shape)} wanted"
        for name, part in wanted.items()
        if tuple(saved[name].size) != tuple(part.shape)
    ]
    if differing:
        raise CheckpointError(f"'{folder.path}' has tensors of other shapes: {some(differing)}")
    requests: list[Request] = []
    for name, part in wanted.items():
        chunks = [(offsets, tensor) for offsets, tensor in part.chunks if tensor.numel()]
        requests += _plan_tensor(folder, name, chunks)
    return requests


def _plan_tensor(
    folder: OpenFolder, name: str, chunks: list[tuple[tuple[int, ...], Tensor]]
) -> Iterator[Request]:
    places = folder.metadata.storage_data
    saved = folder.tensors[name]
    if len(saved.chunks) == len(chunks) == 1 and chunks[0][1].shape == saved.size:
        place = places[MetadataIndex(name, saved.chunks[0].offsets)]
        yield Request(name, 0, (0,) * len(saved.size), place, chunks[0][1])
        return
    boxes = [ChunkStorageMetadata(torch.Size(offsets), t.shape) for offsets, t in chunks]
    missing = [tensor.numel() for _, tensor in chunks]
    for item in create_read_items_for_chunk_list(name, saved, boxes):
        index, chunk = item.dest_index.index, item.storage_index.index
        assert index is not None
        assert chunk is not None
        target = chunks[index][1]
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        missing[index] -= target.numel()
        yield Request(name, chunk, item.storage_offsets, places[item.storage_index], target)
    if any(missing):
        raise CheckpointError(f"a chunk of '{name}' does not lie within {tuple(saved.size)}")


def _read(folder: OpenFolder, requests: list[Request]) -> None:
    """Read each file once, from front to back, straight into the tensors."""
    assert folder.manifest is not None
    for name, in_file in _by_file(requests).items():
        with CheckedFile(folder.path / name, folder.manifest.files[name]) as file:
            for request in in_file:
                _read_item(folder.tensors[request.name], file, request)


def _by_file(requests: list[Request]) -> dict[str, list[Request]]:
    files: dict[str, list[Request]] = {}
    for request in sorted(requests, key=lambda request: request.place.offset):
        files.setdefault(request.place.relative_path, []).append(request)
    return files


def _read_item(saved: TensorStorageMetadata, file: CheckedFile, request: Request) -> None:
    shape, dtype = tuple(saved.chunks[request.chunk].sizes), saved.properties.dtype
    stride = envelope.row_major(shape)
    nbytes = envelope.count(shape) * dtype.itemsize
    first = sum(o * step for o, step in zip(request.offsets, stride, strict=True))
    begin = request.place.offset + request.place.length - envelope.TAIL - nbytes
    file.read_tensor(begin + first * dtype.itemsize, stride, dtype, request.target)


class _Reader(FileSystemReader):
    """DCP's reader, given metadata that has been read safely."""

    def __init__(self, folder: OpenFolder) -> None:
        super().__init__(folder.path)
        self._metadata = folder.metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """See the base class."""
        return self._metadata


class _Planner:
    """What DCP's reader asks for the targets of its requests."""

    def __init__(self, items: list[ReadItem], requests: list[Request]) -> None:
        self._targets = {id(i): r.target for i, r in zip(items, requests, strict=True)}

    def resolve_tensor(self, item: ReadItem) -> Tensor:
        """Where an item goes."""
        return self._targets[id(item)]

    def commit_tensor(self, item: ReadItem, tensor: Tensor) -> None:
        """An item has been read."""


def _read_with_dcp(folder: OpenFolder, requests: list[Request]) -> None:
    reader = _Reader(folder)
    reader.set_up_storage_reader(folder.metadata, is_coordinator=True)
    for name, in_file in _by_file(requests).items():
        items = [_read_item_of_dcp(folder, request) for request in in_file]
        try:
            planner: Any = _Planner(items, in_file)
            reader.read_data(LoadPlan(items), planner)
        except Exception as error:  # a broken file raises anything
            raise CorruptCheckpointError(
                f"'{folder.path / name}' can not be read: {describe(error)}"
            ) from error


def _read_item_of_dcp(folder: OpenFolder, request: Request) -> ReadItem:
    offsets = folder.tensors[request.name].chunks[request.chunk].offsets
    index = MetadataIndex(request.name, offsets, request.chunk)
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=index,  # the planner knows the target by itself
        dest_offsets=torch.Size([0] * request.target.dim()),
        storage_index=index,
        storage_offsets=torch.Size(request.offsets),
        lengths=request.target.shape,
    )
