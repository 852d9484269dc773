"""What is in a single file: of ``torch.save`` (Lightning's checkpoints are such), or safetensors.

[Note: a look at a pickle] A file of ``torch.save`` is a zip archive with a pickle, which may ask
for any function to be called. To show what is in it, its pickle is read with stand-ins for
everything: a tensor becomes its shape and dtype, an object of a class its name. Nothing is
executed, no tensor is read, and a file with objects that ``weights_only=True`` refuses can be
looked at as well.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_zero.checkpoint.failures import CheckpointError, CorruptCheckpointError, describe
from lightning_zero.checkpoint.safetensors_format import NAMES


class Shape(NamedTuple):
    """Stands for a tensor of a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    storage: str

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class Other:
    """Stands for an object; a subclass for its class. Takes whatever a pickle does to it."""

    label = ""

    def __new__(cls, *args: Any, **options: Any) -> Other:
        """Nothing is kept."""
        return object.__new__(cls)

    def __init__(self, *args: Any, **options: Any) -> None:
        """Nothing is kept."""

    def __setstate__(self, state: Any) -> None:
        """Nothing is kept."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Nothing is kept."""

    def append(self, value: Any) -> None:
        """Nothing is kept."""

    def extend(self, values: Any) -> None:
        """Nothing is kept."""

    def add(self, value: Any) -> None:
        """Nothing is kept."""

    def __repr__(self) -> str:
        return f"<{self.label}>"


@dataclass
class FileInfo:
    """What is in a file.

    Attributes:
        kind: of the file, in words.
        facts: what is in it besides tensors, by name.
        tensors: its tensors by name.
        bytes: its size.
    """

    kind: str
    facts: dict[str, str]
    tensors: dict[str, Shape]
    bytes: int


def look(path: Path) -> FileInfo:
    """What is in a file. Executes nothing and reads no tensor.

    Raises:
        CheckpointError: if it is a file of another kind.
        CorruptCheckpointError: if it is damaged.
    """
    size = path.stat().st_size
    if not size:
        raise CorruptCheckpointError(f"'{path}' is empty: the save or the copy was cut off")
    with path.open("rb") as file:
        begin = file.read(16)
    if begin[8:9] == b"{" and int.from_bytes(begin[:8], "little") < 1 << 30:
        tensors, notes = _safetensors(path, size)
        return FileInfo("safetensors", notes, tensors, size)
    if begin[:2] == b"PK":
        return _of_content(_unpickled(path), size)
    if begin[:1] == b"\x80":
        raise CheckpointError(
            f"'{path}' is a bare pickle, as PyTorch before 1.6 and other programs write them;"
            " nothing but unpickling reads it, which can run code"
        )
    raise CheckpointError(
        f"'{path}' is no file of torch.save and no safetensors file (or its beginning is damaged)"
    )


def check_file(path: Path) -> None:
    """Compare every byte of a file of ``torch.save`` with the checksums in it.

    Raises:
        CheckpointError: if the file has none.
        CorruptCheckpointError: names the part that is not what was written.
    """
    if not zipfile.is_zipfile(path):
        raise CheckpointError(f"'{path}' has no checksums; it was only looked at")
    with zipfile.ZipFile(path) as archive:
        bad = archive.testzip()
    if bad is not None:
        raise CorruptCheckpointError(f"'{path}' is damaged: '{bad}' in it is not what was written")


def _safetensors(path: Path, size: int) -> tuple[dict[str, Shape], dict[str, str]]:
    dtypes = {name: dtype for dtype, name in NAMES.items()}
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length))
            notes = {str(k): str(v) for k, v in header.pop("__metadata__", {}).items()}
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
            tensors = {
                name: Shape(tuple(entry["shape"]), dtypes[entry["dtype"]], name)
                for name, entry in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise CorruptCheckpointError(
                f"'{path}' is no safetensors file, or its header is damaged ({describe(error)})"
            ) from error
    if size != 8 + length + end:
        raise CorruptCheckpointError(
            f"'{path}' has {size} bytes, and should have {8 + length + end}"
        )
    return tensors, notes


def _unpickled(path: Path) -> Any:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if not names:
                raise CheckpointError(f"'{path}' is a zip archive, but none of torch.save")
            return _Looker(io.BytesIO(archive.read(names[0]))).load()
    except CheckpointError:
        raise
    except Exception as error:  # a broken archive or pickle raises anything
        raise CorruptCheckpointError(
            f"'{path}' can not be read ({describe(error)}): it is damaged, or was cut off while it"
            " was written or copied"
        ) from error


class _Looker(pickle.Unpickler):
    """See [Note: a look at a pickle]."""

    def find_class(self, module: str, name: str) -> Any:
        """See the base class."""
        known = _KNOWN.get((module, name))
        if known is not None:
            return known
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        return type(name, (Other,), {"label": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Any:
        """A storage: its dtype and its name in the file."""
        dtype = pid[1] if isinstance(pid[1], torch.dtype) else torch.uint8
        return dtype, str(pid[2])


def _tensor(storage: Any, offset: int, size: Any, stride: Any, *rest: Any) -> Any:
    dtype = next((part for part in rest if isinstance(part, torch.dtype)), storage[0])
    return Shape(tuple(size), dtype, storage[1])


def _parameter(data: Any, *rest: Any) -> Any:
    return data


def _from_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    return function(*args)


def _text(text: str, encoding: str) -> bytes:
    return text.encode("latin1")


_KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "Counter"): dict,
    ("collections", "defaultdict"): lambda *args: {},
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "complex"): complex,
    ("builtins", "bytearray"): lambda *args: bytearray(),
    ("_codecs", "encode"): _text,
    ("torch", "Size"): tuple,
    ("torch", "device"): lambda *args: "/".join(map(str, args)),
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
}
_STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}


def _of_content(content: Any, size: int) -> FileInfo:
    tensors = dict(_tensors(content))
    if not isinstance(content, Mapping):
        return FileInfo(f"torch.save of {_brief(content)}", {}, tensors, size)
    version = content.get("pytorch-lightning_version")
    facts = {str(key): _brief(value) for key, value in content.items()}
    if version is not None and "state_dict" in content:
        weights = dict(_tensors(content["state_dict"]))
        kind = "a checkpoint of Lightning in one file"
        rest = {key: value for key, value in content.items() if key != "state_dict"}
        places = {shape.storage: shape.nbytes for _, shape in _tensors(rest)}
        facts["tensors besides the weights"] = f"{len(places)}, {sum(places.values())} bytes"
        return FileInfo(kind, facts, weights, size)
    if tensors.keys() == content.keys():
        return FileInfo("weights (torch.save of a state dict)", {}, tensors, size)
    return FileInfo("torch.save of a dictionary", facts, tensors, size)


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Shape]]:
    pending, seen = [(name, value)], set()
    while pending:
        where, item = pending.pop()
        if isinstance(item, Shape):
            yield where, item
            continue
        if id(item) in seen:
            continue
        seen.add(id(item))
        inner: list[tuple[Any, Any]] = []
        if isinstance(item, Mapping):
            inner = list(item.items())
        elif isinstance(item, list | tuple):
            inner = list(enumerate(item))
        pending += [(f"{where}.{key}" if where else str(key), v) for key, v in reversed(inner)]


def _brief(value: Any) -> str:
    if isinstance(value, Shape):
        return f"tensor {value.shape} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        shown = ", ".join(str(key) for key in list(value)[:5])
        return f"{len(value)} entries: {shown}{', ...' if len(value) > 5 else ''}"
    if isinstance(value, type):
        return f"<class {getattr(value, 'label', value.__name__)}>"
    if isinstance(value, list | tuple | set | frozenset):
        return f"{len(value)} entries"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
