"""The bytes that make a piece of memory a file of ``torch.save``.

[Note: items] Every item of a DCP file is a complete ``torch.save`` file: a zip archive with a
pickle that describes the tensor, and its bytes. Here both ends of the archive are made by hand, so
that the bytes can be streamed from a tensor's memory into the file and later straight back. The
bytes are row-major, whatever the strides of the tensor. All that follows them has the fixed length
``TAIL``, so where they begin follows from an item's place, length and dtype alone: an item needs no
index, and nothing in it is unpickled.

The archive is one that any zip tool can test. Its checksums come after the bytes (a "data
descriptor"), because they are not known before.
"""

from __future__ import annotations

import collections
import functools
import io
import pickle
import struct
import sys
import zlib
from typing import Any

import torch

_DATA = b"archive/data/0"
_ZIP_VERSION = 45  # zip64
_UNKNOWN = 0xFFFFFFFF  # the true value is in the zip64 field
_HAS_DESCRIPTOR = 1 << 3
_CENTRAL = 46  # bytes of an entry of the archive's directory, without its name


def _small_entries(pickled: bytes) -> list[tuple[bytes, bytes]]:
    return [
        (b"archive/data.pkl", pickled),
        (b"archive/byteorder", sys.byteorder.encode()),
        (b"archive/version", b"3\n"),
    ]


TAIL = (
    24  # data descriptor
    + sum(_CENTRAL + len(name) for name, _ in _small_entries(b""))
    + (_CENTRAL + len(_DATA) + 20)
    + (56 + 20 + 22)  # the three records at the end
)


class _Storage:
    """Stands for the storage of the tensor in its pickle."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class _Tensor:
    """Pickled as a tensor; there is none."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._shape, self._dtype = shape, dtype

    def __reduce__(self) -> tuple[Any, ...]:
        strides = row_major(self._shape)
        nbytes = count(self._shape) * self._dtype.itemsize
        hooks: collections.OrderedDict[str, Any] = collections.OrderedDict()
        args = (_Storage(nbytes), 0, self._shape, strides, False, hooks, self._dtype)
        return torch._utils._rebuild_tensor_v3, args


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: object) -> tuple[Any, ...] | None:
        if isinstance(value, _Storage):
            return ("storage", torch.UntypedStorage, "0", "cpu", value.nbytes)
        return None


def count(shape: tuple[int, ...]) -> int:
    """The number of elements."""
    elements = 1
    for size in shape:
        elements *= size
    return elements


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


@functools.lru_cache(maxsize=4096)
def head(shape: tuple[int, ...], dtype: torch.dtype) -> bytes:
    """What comes before the bytes of a tensor."""
    parts = []
    for name, content in _small_entries(_pickled(shape, dtype)):
        fields = (zlib.crc32(content), len(content), len(content), len(name), 0)
        local = struct.pack("<4s5H3I2H", b"PK\x03\x04", 20, 0, 0, 0, 33, *fields)
        parts += [local, name, content]
    flags = (_ZIP_VERSION, _HAS_DESCRIPTOR, 0, 0, 33)
    local = struct.pack("<4s5H3I2H", b"PK\x03\x04", *flags, 0, _UNKNOWN, _UNKNOWN, len(_DATA), 20)
    return b"".join([*parts, local, _DATA, struct.pack("<2H2Q", 1, 16, 0, 0)])


def tail(shape: tuple[int, ...], dtype: torch.dtype, crc32: int) -> bytes:
    """What comes after the bytes of a tensor, whose crc32 is given: ``TAIL`` bytes."""
    return struct.pack("<I", crc32).join(_tail_parts(shape, dtype))


@functools.lru_cache(maxsize=4096)
def _tail_parts(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes, bytes]:
    """What comes after the bytes, without their checksum, which is in it twice."""
    nbytes = count(shape) * dtype.itemsize
    sizes = struct.pack("<2Q", nbytes, nbytes)
    small, place = _directory(_small_entries(_pickled(shape, dtype)))
    versions = (_ZIP_VERSION, _ZIP_VERSION, _HAS_DESCRIPTOR, 0, 0, 33)
    before = struct.pack("<4s6H", b"PK\x01\x02", *versions)
    after = struct.pack("<2I5H2I", _UNKNOWN, _UNKNOWN, len(_DATA), 20, 0, 0, 0, 0, place)
    after += _DATA + struct.pack("<2H", 1, 16) + sizes

    directory = len(small) + len(before) + 4 + len(after)
    begin = len(head(shape, dtype)) + nbytes + 24
    versions64 = (_ZIP_VERSION, _ZIP_VERSION, 0, 0)
    end = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, *versions64, 4, 4, directory, begin)
    end += struct.pack("<4sIQI", b"PK\x06\x07", 0, begin + directory, 1)
    end += struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 4, 4, directory, _UNKNOWN, 0)
    return b"PK\x07\x08", sizes + small + before, after + end


def _directory(entries: list[tuple[bytes, bytes]]) -> tuple[bytes, int]:
    """What the archive's directory says of the first entries, and where the next one begins."""
    parts, place = [], 0
    for name, content in entries:
        fields = (zlib.crc32(content), len(content), len(content), len(name), 0, 0, 0, 0, 0)
        versions = (20, 20, 0, 0, 0, 33)
        parts += [struct.pack("<4s6H3I5H2I", b"PK\x01\x02", *versions, *fields, place), name]
        place += 30 + len(name) + len(content)
    return b"".join(parts), place


@functools.lru_cache(maxsize=4096)
def _pickled(shape: tuple[int, ...], dtype: torch.dtype) -> bytes:
    target = io.BytesIO()
    _Pickler(target, protocol=2).dump(_Tensor(shape, dtype))
    return target.getvalue()
