"""One file from a folder. Needs no process group, no GPU and no model class."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from lightning_zero.checkpoint import safetensors_format
from lightning_zero.checkpoint.checksum import BLOCK
from lightning_zero.checkpoint.encoding import decode
from lightning_zero.checkpoint.failures import CheckpointError, some
from lightning_zero.checkpoint.files import memory_of, sync
from lightning_zero.checkpoint.foreign_unpickle import load_file
from lightning_zero.checkpoint.index import MODEL, Placeholder, placeholder
from lightning_zero.checkpoint.loading import load_from
from lightning_zero.checkpoint.one_file import look
from lightning_zero.checkpoint.opening import OpenFolder, Progress, TensorPart, read_encoded
from lightning_zero.checkpoint.run_state import put_away
from lightning_zero.checkpoint.safetensors_format import Entry
from lightning_zero.checkpoint.tree import children, rebuilt
from lightning_zero.checkpoint.workplace import Workplace, clean

# What Lightning leaves out of a checkpoint with `save_weights_only=True`.
_NOT_WEIGHTS = ("optimizer_states", "lr_schedulers", "callbacks")
# How many bytes of small tensors are read at once.
_BATCH = 32 << 20


def consolidate(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    kind: str | None = None,
    weights_only: bool = False,
    max_shard_bytes: int | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Make one file of a checkpoint folder.

    The file is written under another name, compared with the folder tensor by tensor, and then put
    in the place of what was there.

    Args:
        folder: the checkpoint; one that is a single file is copied, or its weights are taken.
        out: the file.
        kind: ``"ckpt"``, a file as Lightning and ``torch.save`` write it, or ``"safetensors"``,
            the weights alone. By default what the suffix of ``out`` says.
        weights_only: leave states of optimizers, schedulers and callbacks out of a ``.ckpt``.
        max_shard_bytes: if the weights are larger, several ``.safetensors`` files are written, as
            ``name-00001-of-00003.safetensors``, and ``name.safetensors.index.json``. (Tied
            weights are in one of them once, under the first of their names.)
        progress: called with the bytes that are done and all bytes; each is written and compared.

    Returns:
        The files.

    Raises:
        CheckpointError: if the folder does not hold what it should, or the file is not right.
        ValueError: if the kind is unknown.
    """
    target = Path(os.path.abspath(out))
    kind = kind or target.suffix.removeprefix(".")
    if kind not in ("ckpt", "safetensors"):
        raise ValueError(f"kind has to be 'ckpt' or 'safetensors', not {kind!r}")
    dropped = _NOT_WEIGHTS if weights_only or kind == "safetensors" else ()
    if Path(folder).is_file() and kind == "ckpt" and not weights_only:
        return _copied(Path(folder), target)
    if Path(folder).is_file():
        source = _file_source(Path(folder), kind, progress, dropped)
    else:
        source = _Source(OpenFolder.open(folder), progress, dropped)
    target.parent.mkdir(parents=True, exist_ok=True)
    clean(target.parent)
    if target.is_dir():
        raise CheckpointError(f"'{target}' is a folder")
    with Workplace(target) as workplace:
        if kind == "ckpt":
            return _to_ckpt(source, workplace.new, target)
        return _to_safetensors(source, workplace.new, target, max_shard_bytes)


def _copied(path: Path, target: Path) -> list[Path]:
    """A copy of what is one file already; whatever is in it."""
    found = look(path)
    if found.kind == "safetensors":
        raise CheckpointError(f"'{path}' has weights alone; a .ckpt can not be made of them")
    if target.is_dir():
        raise CheckpointError(f"'{target}' is a folder")
    if not target.exists() or not path.samefile(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with Workplace(target) as workplace:
            shutil.copyfile(path, workplace.new / target.name)
            sync(workplace.new / target.name)
            os.replace(workplace.new / target.name, target)
        sync(target.parent)
    return [target]


def _file_source(
    path: Path, kind: str, progress: Progress | None, dropped: Sequence[str]
) -> _Source:
    """A checkpoint that is one file already; its tensors stay in it until they are written."""
    found = look(path)
    if found.kind == "safetensors":
        raise CheckpointError(f"'{path}' is a safetensors file already; there is nothing to do")
    content = load_file(path)
    is_checkpoint = isinstance(content, dict) and isinstance(content.get("state_dict"), dict)
    if not is_checkpoint and not found.kind.startswith("weights"):
        raise CheckpointError(f"'{path}' is {found.kind}: there are no weights to be found in it")
    source = _Source(OpenFolder(path, Metadata({}), None), progress)
    if is_checkpoint:
        source.meta = {key: value for key, value in content.items() if key not in dropped}
    else:
        source.meta = {"state_dict": content} if kind == "safetensors" else content
    return source


@dataclass
class _Source:
    """The folder, and how much of it has been done."""

    folder: OpenFolder
    progress: Progress | None
    dropped: Sequence[str] = ()
    done: int = 0
    total: int = 0
    meta: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        is_ours = self.folder.manifest is not None
        encoded = read_encoded(self.folder.path) if is_ours else {}
        # what is left out may be of classes that are not there
        self.meta = decode({k: v for k, v in encoded.items() if k not in self.dropped})
        if "state_dict" not in self.meta:
            names = [n for n in self.folder.tensors if n.startswith(MODEL)]
            names = names or list(self.folder.tensors)
            self.meta["state_dict"] = {n.removeprefix(MODEL): Placeholder.of(n) for n in names}

    def entry(self, name: str) -> Entry:
        """Describes a tensor.

        Raises:
            CheckpointError: if there is none of that name.
        """
        saved = self.folder.tensors.get(name)
        if saved is None:
            raise CheckpointError(f"'{self.folder.path}' does not have '{name}'")
        return Entry(name, tuple(saved.size), saved.properties.dtype)

    def batches(self, entries: Sequence[Entry]) -> Iterator[dict[str, Tensor]]:
        """The tensors in that order; one that is large, or several that are small, at a time."""
        start = 0
        while start < len(entries):
            stop, size = start + 1, entries[start].nbytes
            while stop < len(entries) and size + entries[stop].nbytes <= _BATCH:
                size += entries[stop].nbytes
                stop += 1
            yield self.read(entries[start:stop])
            self.done += size
            if self.progress is not None:
                self.progress(self.done, self.total)
            start = stop

    def read(self, entries: Sequence[Entry]) -> dict[str, Tensor]:
        """New tensors with the values in the folder."""
        tensors = {entry.name: torch.empty(entry.shape, dtype=entry.dtype) for entry in entries}
        parts = {
            name: TensorPart(tuple(t.shape), t.dtype, [((0,) * t.dim(), t)])
            for name, t in tensors.items()
        }
        load_from(self.folder, parts)
        return tensors


def _replaced(value: Any, replace: Callable[[str], Any]) -> Any:
    """A copy in which every placeholder has been replaced; what has none stays itself."""

    def change(item: Any) -> Any:
        name = placeholder(item)
        return NotImplemented if name is None else replace(name)

    return rebuilt(value, change)


def _to_ckpt(source: _Source, folder: Path, target: Path) -> list[Path]:
    meta = put_away(source.meta)
    names: dict[str, None] = {}
    _replaced(meta, lambda name: names.setdefault(name))
    entries = [source.entry(name) for name in names]
    source.total = 2 * sum(entry.nbytes for entry in entries)

    path = folder / target.name
    _write_ckpt(path, meta, source, entries)
    with ThreadPoolExecutor(1) as beside:
        synced = beside.submit(sync, path)
        # What was read is gone by now; the file is mapped: two copies are never in memory. Nobody
        # but us has written it, and its objects are those of [Note: held objects].
        written = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
        found: dict[str, Tensor] = {}
        _match(meta, written, found)
        for batch in source.batches(entries):
            for name, tensor in batch.items():
                if not _is_same(found.pop(name), tensor):
                    raise CheckpointError(f"'{name}' in '{path}' is not what was written")
        synced.result()
    os.replace(path, target)
    sync(target.parent)
    return [target]


def _write_ckpt(path: Path, meta: dict[str, Any], source: _Source, entries: list[Entry]) -> None:
    tensors: dict[str, Tensor] = {}
    for batch in source.batches(entries):
        tensors.update(batch)
    # one object for all places where a tensor appears, so that it is stored once
    torch.save(_replaced(meta, tensors.__getitem__), path)


def _match(meta: Any, written: Any, found: dict[str, Tensor]) -> None:
    """Collect the tensors that have taken the places of the placeholders."""
    pending, seen = [(meta, written)], {id(meta)}
    while pending:
        value, other = pending.pop()
        name = placeholder(value)
        if name is not None:
            found[name] = other
            continue
        others = children(other)
        for place, child in children(value).items():
            if id(child) not in seen:
                seen.add(id(child))
                pending.append((child, others[place]))


def _is_same(a: Tensor, b: Tensor) -> bool:
    is_alike = a.shape == b.shape and a.dtype == b.dtype and a.is_contiguous()
    if not is_alike:
        return False
    left, right = memory_of(a), memory_of(b)
    blocks = range(0, len(left), BLOCK)
    # comparing memoryviews is ten times slower
    return all(left[i : i + BLOCK].tobytes() == right[i : i + BLOCK].tobytes() for i in blocks)


def _to_safetensors(
    source: _Source, folder: Path, target: Path, max_shard_bytes: int | None
) -> list[Path]:
    names, aliases, inline = _weights(source.meta["state_dict"])
    entries = [source.entry(name)._replace(name=key) for name, key in names.items()]
    source.total = 2 * sum(entry.nbytes for entry in entries)
    entries += [Entry(key, tuple(t.shape), t.dtype) for key, t in inline.items()]
    in_folder = {key: name for name, key in names.items()}

    def batches(wanted: Sequence[Entry]) -> Iterator[Mapping[str, Tensor]]:
        stored = [e._replace(name=in_folder[e.name]) for e in wanted if e.name in in_folder]
        read = source.batches(stored)
        ready: dict[str, Tensor] = {}
        for entry in wanted:
            if entry.name in inline:
                yield {entry.name: inline[entry.name].contiguous()}
                continue
            if not ready:
                ready = {names[name]: tensor for name, tensor in next(read).items()}
            yield {entry.name: ready.pop(entry.name)}
        next(read, None)  # counts the last batch

    shards = safetensors_format.split(entries, max_shard_bytes)
    files = [target.name]
    if len(shards) > 1:
        stem, suffix, number = target.stem, target.suffix, len(shards)
        files = [f"{stem}-{i + 1:05d}-of-{number:05d}{suffix}" for i in range(number)]
    with ThreadPoolExecutor(1) as beside:
        syncs = []
        for file, shard in zip(files, shards, strict=True):
            safetensors_format.write(folder / file, shard, batches, aliases)
            syncs.append(beside.submit(sync, folder / file))
        for file, shard in zip(files, shards, strict=True):
            safetensors_format.compare(folder / file, shard, batches, aliases)
        for synced in syncs:
            synced.result()
    return _install(folder, target, dict(zip(files, shards, strict=True)))


def _weights(
    state_dict: Mapping[str, Any],
) -> tuple[dict[str, str], dict[str, str], dict[str, Tensor]]:
    """What of a state dict goes into a safetensors file.

    Returns:
        The first key of each tensor of the folder, by its name there; further keys of the same
        tensors with the first ones; tensors that are in ``meta`` itself.
    """
    names: dict[str, str] = {}
    aliases: dict[str, str] = {}
    inline: dict[str, Tensor] = {}
    others = []
    for key, value in state_dict.items():
        name = placeholder(value)
        if name in names:
            aliases[key] = names[name]
        elif name is not None:
            names[name] = key
        elif isinstance(value, Tensor):
            inline[key] = value
        else:
            others.append(key)
    if others:
        warnings.warn(
            f"safetensors can not hold {some(others)}, which are no tensors", stacklevel=4
        )
    return names, aliases, inline


def _install(folder: Path, target: Path, shards: dict[str, list[Entry]]) -> list[Path]:
    """Move finished files to their place. An index is there only while its files are complete."""
    index = target.with_name(f"{target.name}.index.json")
    index.unlink(missing_ok=True)
    for file in shards:
        os.replace(folder / file, target.with_name(file))
    paths = [target.with_name(file) for file in shards]
    if len(shards) > 1:
        content = {
            "metadata": {"total_size": sum(e.nbytes for shard in shards.values() for e in shard)},
            "weight_map": {e.name: file for file, shard in shards.items() for e in shard},
        }
        with (folder / index.name).open("x") as out:
            json.dump(content, out, indent=2)
            out.flush()
            os.fsync(out.fileno())
        os.replace(folder / index.name, index)
        target.unlink(missing_ok=True)  # a former single file
        paths.append(index)
    sync(target.parent)
    return paths
