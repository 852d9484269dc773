"""Values that a folder holds although ``torch.load(weights_only=True)`` does not know their types.

They are written as plain data under the name of their kind and made again from a fixed list:
nothing that a file says is imported or called. Named tuples, dataclasses and enums are made of
classes that the program has imported already, without running their constructors.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import pathlib
import sys
import uuid
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from lightning_zero.checkpoint.failures import CheckpointError
from lightning_zero.checkpoint.tree import rebuilt

_KIND, _DATA = "__kind__", "data"


class _Codec(NamedTuple):
    """How the values of a type become plain data and come back."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


_FACTORIES: dict[str, Any] = {
    f.__name__: f for f in (int, float, bool, str, bytes, list, dict, set, tuple)
}


def _encode_defaultdict(value: defaultdict[Any, Any]) -> Any:
    factory = value.default_factory
    if factory is not None and _FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
        raise TypeError(f"a defaultdict of {factory!r}")
    return [None if factory is None else factory.__name__, dict(value)]


def _decode_defaultdict(data: Any) -> defaultdict[Any, Any]:
    name, items = data
    return defaultdict(None if name is None else _FACTORIES[name], items)


_CODECS: dict[type, _Codec] = {
    frozenset: _Codec(list, frozenset),
    defaultdict: _Codec(_encode_defaultdict, _decode_defaultdict),
    deque: _Codec(lambda v: [list(v), v.maxlen], lambda data: deque(data[0], data[1])),
    range: _Codec(lambda v: [v.start, v.stop, v.step], lambda data: range(*data)),
    slice: _Codec(lambda v: [v.start, v.stop, v.step], lambda data: slice(*data)),
    io.BytesIO: _Codec(lambda v: v.getvalue(), io.BytesIO),
    datetime.datetime: _Codec(lambda v: v.isoformat(), datetime.datetime.fromisoformat),
    datetime.date: _Codec(lambda v: v.isoformat(), datetime.date.fromisoformat),
    datetime.time: _Codec(lambda v: v.isoformat(), datetime.time.fromisoformat),
    datetime.timedelta: _Codec(
        lambda v: [v.days, v.seconds, v.microseconds], lambda data: datetime.timedelta(*data)
    ),
    decimal.Decimal: _Codec(str, decimal.Decimal),
    fractions.Fraction: _Codec(str, fractions.Fraction),
    uuid.UUID: _Codec(str, uuid.UUID),
    **{
        path: _Codec(str, path)
        for path in (
            pathlib.PosixPath,
            pathlib.PurePosixPath,
            pathlib.WindowsPath,
            pathlib.PureWindowsPath,
        )
    },
    type(...): _Codec(lambda v: None, lambda data: ...),
}
_BY_NAME = {kind.__name__: codec for kind, codec in _CODECS.items()}


def encode(value: Any) -> Any:
    """``value`` with what ``weights_only=True`` refuses in plain form, where there is one."""
    return rebuilt(value, _encode)


def _encode(value: Any) -> Any:
    kind = type(value)
    if kind in _CODECS:
        return _named(kind.__name__, encode(_CODECS[kind].encode(value)))
    if kind in (dict,) and (_KIND in value or not all(map(_is_plain_key, value))):
        return _named("dict", [[encode(key), encode(item)] for key, item in value.items()])
    if kind is set and any(not _is_plain_key(item) for item in value):
        return _named("set", [encode(item) for item in value])
    if isinstance(value, enum.Enum):
        return _named("enum", [_path_of(kind), value.name])
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return _named("namedtuple", [_path_of(kind), encode(list(value))])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return _named("dataclass", [_path_of(kind), encode({**fields, **vars(value)})])
    if kind.__module__ == "numpy" and hasattr(value, "dtype") and hasattr(value, "tobytes"):
        if value.dtype.hasobject or value.dtype.fields:
            return NotImplemented  # refused when it is saved, by name
        is_array = kind.__name__ == "ndarray"
        name = "ndarray" if is_array else "numpy scalar"
        return _named(name, [value.dtype.str, list(value.shape), value.tobytes()])
    return NotImplemented


def _is_plain_key(key: Any) -> bool:
    if isinstance(key, tuple) and type(key) is tuple:
        return all(map(_is_plain_key, key))
    return key is None or type(key) in (str, int, float, bool, bytes, complex, torch.dtype)


def _named(kind: str, data: Any) -> dict[str, Any]:
    return {_KIND: kind, _DATA: data}


def _path_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def decode(value: Any) -> Any:
    """The reverse of :func:`encode`.

    Raises:
        CheckpointError: if a class has not been imported; names it.
    """
    return rebuilt(value, _decode)


def _decode(value: Any) -> Any:
    if type(value) is not dict or value.keys() != {_KIND, _DATA}:
        return NotImplemented
    kind, data = value[_KIND], decode(value[_DATA])
    if kind in _BY_NAME:
        return _BY_NAME[kind].decode(data)
    if kind == "dict":
        return dict(data)
    if kind == "set":
        return set(data)
    if kind in ("ndarray", "numpy scalar"):
        return _numpy(kind, *data)
    return _DECODERS[kind](*data)


def _numpy(kind: str, dtype: str, shape: list[int], content: bytes) -> Any:
    import numpy as np  # only where a checkpoint has arrays

    array = np.frombuffer(content, np.dtype(dtype)).reshape(shape)
    return array.copy() if kind == "ndarray" else array[()]


def _class(path: str, is_right: Callable[[type], bool]) -> Any:
    module, _, name = path.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and is_right(found)):
        raise CheckpointError(
            f"The checkpoint holds a value of the class {name} of {module}, which has not been"
            " imported. Import it before the checkpoint is loaded."
        )
    return found


def _enum(path: str, name: str) -> Any:
    return _class(path, lambda kind: issubclass(kind, enum.Enum)).__members__[name]


def _namedtuple(path: str, items: list[Any]) -> Any:
    kind = _class(path, lambda kind: issubclass(kind, tuple) and hasattr(kind, "_fields"))
    return tuple.__new__(kind, items)


def _dataclass(path: str, fields: dict[str, Any]) -> Any:
    made = object.__new__(_class(path, dataclasses.is_dataclass))
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


_DECODERS: dict[str, Callable[..., Any]] = {
    "enum": _enum,
    "namedtuple": _namedtuple,
    "dataclass": _dataclass,
}
