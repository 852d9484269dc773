"""Folders of ``torch.distributed.checkpoint`` (DCP) by FSDP, FSDP2 or anything else.

DCP knows tensors by one flat name each, and beside it keeps the path of keys that the name was made
of. The nested dictionary is rebuilt from those paths, and has to be told apart into the model and
optimizers. Lightning's own: ``state_dict`` (ModelParallelStrategy) or ``model`` (FSDPStrategy),
``optimizer_0``, ``optimizer_1``, ..., and the rest of the checkpoint in ``meta.pt``.

Nothing is unpickled but plain data: ``.metadata`` may hold DCP's own classes only, and items are
loaded with ``weights_only``.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from lightning_zero.checkpoint.failures import CheckpointError, CorruptCheckpointError, some
from lightning_zero.checkpoint.foreign_unpickle import Meter, load_file, load_stream
from lightning_zero.checkpoint.index import META, METADATA, parse_metadata

Path_ = tuple[str | int, ...]

_MODELS = ("state_dict", "model", "module", "model_state_dict")
_OPTIMIZERS = ("optimizer_states", "optimizer", "optim", "optimizers", "optimizer_state_dict")
# What wrappers of older versions put into names.
_WRAPPERS = ("_forward_module.", "_fsdp_wrapped_module.")


def is_dcp(folder: Path) -> bool:
    """Whether there is an index of DCP."""
    return (folder / METADATA).is_file()


def has_meta(folder: Path) -> bool:
    """Whether there is what Lightning saves beside the tensors."""
    return (folder / META).is_file()


def read_dcp(folder: Path, meter: Meter, *, weights_only: bool) -> dict[str, Any]:
    """Read a checkpoint into the dictionary that Lightning would have saved.

    Args:
        folder: with ``.metadata`` and ``*.distcp``.
        meter: told of every tensor.
        weights_only: leave out the optimizers, and in a folder that is not of Lightning whatever
            else there is.

    Raises:
        CheckpointError: if files are missing, hold something that is not known, or if it is not
            clear what the model is.
        CorruptCheckpointError: if they contradict each other.
    """
    items = _Items(folder)
    paths = items.paths
    prefix = _common_prefix(list(paths.values()))
    inner = {name: path[len(prefix) :] for name, path in paths.items()}
    model_key = next(
        (key for key in _MODELS if any(p[0] == key and len(p) > 1 for p in inner.values())), None
    )
    if model_key is None and any(len(path) > 1 for path in inner.values()):
        raise CheckpointError(
            f"'{folder}' has {some(sorted({str(path[0]) for path in inner.values()}))}; the model"
            f" is expected under {some(list(_MODELS))}"
        )
    is_wanted = {
        name: model_key is None or path[0] == model_key or not weights_only
        for name, path in inner.items()
    }
    meter.total = sum(items.nbytes(name) for name in paths if is_wanted[name])
    weights: dict[str, Any] = {}
    rest: dict[Any, Any] = {}
    for name, path in inner.items():
        if not is_wanted[name]:
            continue
        value = items.read(name)
        meter.add(items.nbytes(name))
        if model_key is None or path[0] == model_key:
            keys = path if model_key is None else path[1:]
            weights[_plain(".".join(map(str, keys)))] = value
        else:
            _insert(rest, path, value)
    result: dict[str, Any] = {}
    if has_meta(folder):
        result.update(copy.deepcopy(load_file(folder / META)))  # into memory
    optimizers = _take_optimizers(rest)
    result.update(_with_lists(rest))
    result["state_dict"] = weights
    if not weights_only:
        result["optimizer_states"] = [_by_index(o, folder) for o in optimizers]
    return result


def _common_prefix(paths: list[Path_]) -> Path_:
    """The keys around everything, as of ``{"app": {"model": ..., "optim": ...}}``."""
    prefix: Path_ = ()
    while True:
        depth = len(prefix)
        keys = {path[depth] for path in paths}
        if len(keys) != 1 or keys & set(_MODELS) or any(len(p) == depth + 1 for p in paths):
            return prefix
        prefix = (*prefix, *keys)


class _Items:
    """The tensors and objects of a folder, read one by one."""

    def __init__(self, folder: Path) -> None:
        path = folder / METADATA
        self.folder = folder
        self.metadata = parse_metadata(path.read_bytes(), path)
        planned = self.metadata.planner_data
        planned = planned if isinstance(planned, Mapping) else {}
        # Without a plan the names were not made of nested keys.
        self.paths: dict[str, Path_] = {
            name: tuple(planned.get(name) or (name,)) for name in self.metadata.state_dict_metadata
        }
        if not self.paths:
            raise CheckpointError(f"'{path}' names no tensors")

    def nbytes(self, name: str) -> int:
        """The bytes of a tensor; objects are not counted."""
        entry = self.metadata.state_dict_metadata[name]
        if not isinstance(entry, TensorStorageMetadata):
            return 0
        return math.prod(entry.size) * entry.properties.dtype.itemsize

    def read(self, name: str) -> Any:
        """A whole tensor, or an object."""
        entry = self.metadata.state_dict_metadata[name]
        if not isinstance(entry, TensorStorageMetadata):
            return self._load(name, MetadataIndex(name), 0)
        dtype = entry.properties.dtype
        places = [MetadataIndex(name, chunk.offsets) for chunk in entry.chunks]
        for index, chunk in zip(places, entry.chunks, strict=True):
            # Before the memory is taken: the sizes must be those of files that exist.
            self._place(name, index, math.prod(chunk.sizes) * dtype.itemsize)
        whole = torch.empty(entry.size, dtype=dtype)
        for index, chunk in zip(places, entry.chunks, strict=True):
            part = self._load(name, index, 0)
            if not isinstance(part, Tensor) or part.shape != chunk.sizes or part.dtype != dtype:
                raise CorruptCheckpointError(
                    f"'{self.folder}' has another tensor where '{METADATA}' has a part of '{name}'"
                    f" ({dtype}, {tuple(chunk.sizes)}); files of two checkpoints may be mixed"
                )
            target = whole
            for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                target = target.narrow(dim, offset, size)
            target.copy_(part.detach())
        return whole

    def _place(self, name: str, index: MetadataIndex, nbytes: int) -> _StorageInfo:
        storage: Mapping[MetadataIndex, _StorageInfo] = self.metadata.storage_data
        place = storage.get(index)
        if place is None:
            raise CorruptCheckpointError(
                f"'{self.folder / METADATA}' does not tell where a part of '{name}' is"
            )
        if place.transform_descriptors:
            raise CheckpointError(
                f"'{name}' in '{self.folder}' was written through extensions"
                f" ({some(list(place.transform_descriptors))}), which can not be read"
            )
        path = self.folder / place.relative_path
        if not path.is_file():
            raise CheckpointError(
                f"'{path}' is missing; copy the folder again, with the files of all ranks"
            )
        size = path.stat().st_size
        is_inside = place.offset >= 0 and place.offset + place.length <= size
        if not is_inside or place.length < nbytes:
            raise CorruptCheckpointError(
                f"'{path}' has {size} bytes; too few for '{name}', which should be at"
                f" {place.offset} with {max(place.length, nbytes)}"
            )
        return place

    def _load(self, name: str, index: MetadataIndex, nbytes: int) -> Any:
        place = self._place(name, index, nbytes)
        path = self.folder / place.relative_path
        with path.open("rb") as file:
            file.seek(place.offset)
            return load_stream(io.BytesIO(file.read(place.length)), path)


def _insert(tree: dict[Any, Any], path: Path_, value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _with_lists(tree: Any) -> Any:
    """Make lists of dictionaries with the keys 0, 1, ...: DCP's paths have ints for those."""
    if type(tree) is not dict:
        return tree
    made = {key: _with_lists(value) for key, value in tree.items()}
    is_list = bool(made) and all(type(key) is int for key in made)
    return [made[key] for key in sorted(made)] if is_list else made


def _take_optimizers(rest: dict[Any, Any]) -> list[Any]:
    """Take the optimizers out of what was saved beside the model."""
    numbered = {
        int(key.removeprefix("optimizer_")): key
        for key in rest
        if isinstance(key, str) and key.removeprefix("optimizer_").isdigit()
    }
    if numbered:
        return [_with_lists(rest.pop(numbered[index])) for index in sorted(numbered)]
    for key in _OPTIMIZERS:
        if key in rest:
            found = _with_lists(rest.pop(key))
            return found if isinstance(found, list) else [found]
    return []


def _by_index(optimizer: Any, folder: Path) -> dict[str, Any]:
    """An optimizer whose parameters go by name, in the format where they go by index."""
    if not isinstance(optimizer, dict) or "param_groups" not in optimizer:
        keys: Iterable[Any] = optimizer if isinstance(optimizer, dict) else ()
        if any(str(key).startswith("param_groups.") for key in keys):
            raise CheckpointError(
                f"the optimizer in '{folder}' was saved with `flatten_optimizer_state_dict=True`,"
                " which loses the order of its parameters; save it without, or read only the"
                " weights with `weights_only=True`"
            )
        raise CheckpointError(
            f"the optimizer in '{folder}' is not one of torch: it has no 'param_groups'; read only"
            " the weights with `weights_only=True`"
        )
    saved = optimizer.get("state") or {}
    if isinstance(saved, list):  # its keys were ints
        saved = dict(enumerate(saved))
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    index = 0
    for group in optimizer["param_groups"]:
        indices = []
        for param in group["params"]:
            entries = saved.get(param, saved.get(str(param)))
            if entries:
                state[index] = entries
            indices.append(index)
            index += 1
        options = {key: value for key, value in group.items() if key != "param_names"}
        groups.append({**options, "params": indices})
    return {"state": state, "param_groups": groups}


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
