"""All ranks write one folder, or none."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from lightning_zero.checkpoint.checksum import FileRecord
from lightning_zero.checkpoint.failures import CheckpointError, describe, together
from lightning_zero.checkpoint.files import TensorFile, sync, write_file
from lightning_zero.checkpoint.index import (
    MANIFEST,
    META,
    METADATA,
    Item,
    build_metadata,
    dump_manifest,
)
from lightning_zero.checkpoint.opening import TensorPart
from lightning_zero.checkpoint.workplace import Workplace, clean, require_replaceable
from lightning_zero.comm.collectives import Collectives


def save_folder(
    path: Path,
    tensors: Mapping[str, TensorPart],
    meta: dict[str, Any] | None,
    info: dict[str, Any],
    collectives: Collectives,
) -> None:
    """Write a checkpoint under the name ``path``; whatever happens, that name stands for the old
    checkpoint or for the complete new one (`[Note: the workplace]`).

    Collective. The folder must be on a file system that all ranks share. A folder that is in its
    place is replaced if it is a checkpoint.

    Args:
        path: of the checkpoint; rank 0's counts.
        tensors: what this rank holds. The chunks of all ranks together have to cover every tensor,
            each element once.
        meta: anything that ``torch.load`` reads with ``weights_only=True``; rank 0's counts.
        info: small facts for the manifest (JSON); rank 0's count.
        collectives: of the ranks that take part.

    Raises:
        CheckpointError: on all ranks if anything fails on any; names rank and cause. Nothing is
            left behind and the old checkpoint is in its place.
    """
    target = Path(os.path.abspath(path))
    workplace: Workplace | None = None
    files: dict[str, FileRecord] = {}

    def begin() -> str | None:
        nonlocal workplace
        if collectives.rank:
            return None
        dump_manifest(info, {})  # refuses what it can not write
        target.parent.mkdir(parents=True, exist_ok=True)
        clean(target.parent)
        require_replaceable(target, MANIFEST, METADATA)
        workplace = Workplace(target)
        files[META] = write_file(workplace.new / META, dump_meta(meta or {}))
        return str(workplace.new)

    def finish() -> None:
        if workplace is not None:
            for _, rank_files in parts:
                files.update(rank_files)
            items = [item for rank_items, _ in parts for item in rank_items]
            empty = [item for item in items if not item.file]
            filled = [item for item in items if item.file]
            metadata = build_metadata(filled, empty, str(path))
            _write_index(workplace.new, metadata, info, files)
            workplace.publish()

    try:
        new = Path(together(collectives, f"preparing checkpoint '{path}'", begin)[0] or "")
        parts = together(
            collectives,
            f"writing checkpoint '{path}'",
            lambda: _write_tensors(new, collectives.rank, tensors),
        )
        together(collectives, f"completing checkpoint '{path}'", finish)
    finally:
        if workplace is not None:
            workplace.__exit__(None, None, None)


def _write_tensors(
    folder: Path, rank: int, tensors: Mapping[str, TensorPart]
) -> tuple[list[Item], dict[str, FileRecord]]:
    """Write this rank's file. One item without a file stands for what has no chunks here."""
    items = []
    name = f"__{rank}_0.distcp"
    for key, part in tensors.items():
        none = (0,) * len(part.shape)
        items.append(Item(key, tuple(part.shape), part.dtype, none, none, "", 0, 0))
    file: TensorFile | None = None
    with contextlib.ExitStack() as stack:
        for key, offsets, part, tensor in _chunks(tensors):
            if file is None:
                file = stack.enter_context(TensorFile(folder / name))
            begin, nbytes = file.write(tensor)
            shape, lengths = tuple(part.shape), tuple(tensor.shape)
            items.append(Item(key, shape, part.dtype, offsets, lengths, name, begin, nbytes))
    return items, {} if file is None else {name: file.record}


def _chunks(
    tensors: Mapping[str, TensorPart],
) -> Iterator[tuple[str, tuple[int, ...], TensorPart, Tensor]]:
    for name, part in tensors.items():
        for offsets, tensor in part.chunks:
            if tensor.dtype != part.dtype:
                raise CheckpointError(f"a chunk of '{name}' is {tensor.dtype}, not {part.dtype}")
            if tensor.numel():
                yield name, tuple(offsets), part, tensor


def _write_index(
    folder: Path, metadata: Metadata, info: dict[str, Any], files: dict[str, FileRecord]
) -> None:
    files[METADATA] = write_file(folder / METADATA, pickle.dumps(metadata))
    # The manifest comes last: a folder without it is not a checkpoint.
    sync(folder)
    write_file(folder / MANIFEST, dump_manifest(info, files))
    sync(folder)


def dump_meta(meta: dict[str, Any]) -> bytes:
    """``meta`` as a file of ``torch.save``.

    Raises:
        CheckpointError: names the entry that could not be loaded with ``weights_only=True``.
    """
    try:
        data = _saved(meta)
    except Exception as error:
        where, cause = _unloadable(meta, error)
        raise CheckpointError(
            f"`meta{where}` can not be saved such that it is safe to load: {describe(cause)}"
        ) from error
    return data


def is_safe(value: Any) -> bool:
    """Whether ``value`` can be saved and loaded with ``weights_only=True``."""
    try:
        _saved(value)
    except Exception:  # whatever pickling raises
        return False
    return True


def _saved(value: Any) -> bytes:
    target = io.BytesIO()
    torch.save(value, target)
    target.seek(0)
    torch.load(target, weights_only=True, map_location="cpu")
    return target.getvalue()


def _unloadable(value: Any, error: Exception) -> tuple[str, Exception]:
    """The innermost entry that can not be saved and loaded, and why."""
    entries: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(value, dict):
        entries = iter(value.items())
    elif isinstance(value, list | tuple):
        entries = iter(enumerate(value))
    for key, entry in entries:
        try:
            _saved(entry)
        except Exception as inner:
            where, cause = _unloadable(entry, inner)
            return f"[{key!r}]{where}", cause
    return "", error
