"""Python objects as plain data, and back, without executing anything.

[Note: held objects] ``meta.pt`` is read with ``weights_only=True``, which makes tensors and plain
containers. What else callbacks and data modules commonly keep is held as ``{"__held__": [kind,
...]}``, and made again by the table of kinds below. Classes of the user's own are known by name;
they are never imported for it (an import runs code), only looked up among the modules that the
program has imported, and only named tuples, dataclasses and enumerations are made, without calling
their constructors. An object that is in several places is one object again.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import io
import pathlib
import sys
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_zero.checkpoint.failures import CheckpointError
from lightning_zero.checkpoint.index import KEY, Placeholder

HELD = "__held__"
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)
_KEYS = (type(None), bool, int, float, str)
_PATHS = (pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
_BUILTINS = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
_FACTORIES = {c.__name__: c for c in (*_BUILTINS, Counter, OrderedDict, deque)}


class Unheld(CheckpointError):
    """An object for which there is no kind; says where it is."""


def encode(value: Any, path: str = "", *, is_strict: bool = True) -> Any:
    """An object as plain data. Tensors and :class:`Placeholder` objects stay what they are.

    Args:
        value: the object.
        path: where it is, for errors.
        is_strict: else what can not be held is left out.

    Raises:
        Unheld: if something in it is of no kind that can be held; names it.
    """
    return _Encoder(is_strict).of(value, path)


class _Encoder:
    def __init__(self, is_strict: bool) -> None:
        self._is_strict = is_strict
        self._done: dict[int, tuple[Any, Any]] = {}  # with the original, so that its id stays its

    def of(self, value: Any, path: str) -> Any:
        if id(value) in self._done:
            return self._done[id(value)][1]
        kind = type(value)
        if kind is Placeholder:
            return self._keep(value, dict(value))
        if kind in _PLAIN or is_plain_tensor(value):
            return value
        if kind is list:
            items: list[Any] = self._keep(value, [])
            items.extend(self.of(item, f"{path}[{i}]") for i, item in enumerate(value))
            return items
        if kind is tuple:
            return self._keep(value, tuple(self.of(v, f"{path}[{i}]") for i, v in enumerate(value)))
        if hasattr(kind, "plain"):  # a dictionary of a loaded checkpoint
            return self._keep(value, self.of(value.plain(), path))
        if kind in (dict, OrderedDict) and _is_unambiguous(value):
            return self._mapping(value, path)
        return self._tagged(value, path)

    def _keep(self, value: Any, encoded: Any) -> Any:
        self._done[id(value)] = (value, encoded)
        return encoded

    def _mapping(self, value: dict[Any, Any], path: str) -> Any:
        result = self._keep(value, type(value)())
        for key, item in value.items():
            result[key] = self.of(item, f"{path}[{key!r}]")
        for name, attribute in getattr(value, "__dict__", {}).items():
            result.__dict__[name] = self.of(attribute, f"{path}.{name}")
        return result

    def _tagged(self, value: Any, path: str) -> Any:
        content: list[Any] = []
        tagged = self._keep(value, {HELD: content})
        parts = _parts(value)
        if parts is None:
            if not self._is_strict or _is_loadable(value):
                return self._keep(value, value if self._is_strict else None)
            kind = type(value)
            raise Unheld(
                f"`{path}` is a {kind.__module__}.{kind.__qualname__}, which a sharded checkpoint"
                " can not hold: it would have to be unpickled. Save with"
                " ZeroStrategy(save_format='full'), or keep it as numbers, strings, tensors, lists"
                " and dictionaries"
            )
        content.append(parts[0])
        content.extend(self.of(part, path) for part in parts[1:])
        return tagged


def _is_unambiguous(value: dict[Any, Any]) -> bool:
    """Whether a dictionary can be held as it is."""
    return all(type(key) in _KEYS for key in value) and not value.keys() & {HELD, KEY}


def is_plain_tensor(value: Any) -> bool:
    """Whether it is a tensor, or a parameter, of no class of its own."""
    return type(value) in (Tensor, nn.Parameter)


def _is_loadable(value: Any) -> bool:
    """Whether PyTorch itself loads it with ``weights_only=True``."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        return type(torch.load(file, weights_only=True)) is type(value)
    except Exception:  # whatever pickling raises
        return False


def _parts(value: Any) -> list[Any] | None:
    """The kind of an object, and what it is made of."""
    kind: type[Any] = type(value)
    if kind in _TO_PARTS:
        return [kind.__name__, *_TO_PARTS[kind](value)]
    if kind is defaultdict:
        factory = value.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        is_known = factory is None or _FACTORIES.get(str(name)) is factory
        return ["defaultdict", name, list(value.items())] if is_known else None
    if kind.__module__ == "numpy" or kind.__module__.startswith("numpy."):
        return _numpy_parts(value)
    name = _name_of(kind)
    if name is None:
        return None
    if isinstance(value, enum.Flag):
        return ["flag", *name, value.value]
    if isinstance(value, enum.Enum):
        return ["enum", *name, value.name]
    if _is_named_tuple(kind):
        return ["namedtuple", *name, list(value)]
    if _is_plain_dataclass(kind):
        names = {f.name: None for f in dataclasses.fields(value)} | getattr(value, "__dict__", {})
        return ["dataclass", *name, {n: getattr(value, n) for n in names if hasattr(value, n)}]
    return None


def _numpy_parts(value: Any) -> list[Any] | None:
    import numpy as np

    if type(value) is np.ndarray or isinstance(value, np.generic):
        if value.dtype.hasobject:
            return None
        file = io.BytesIO()
        np.save(file, np.asarray(value), allow_pickle=False)
        kind = "ndarray" if type(value) is np.ndarray else "numpy scalar"
        return [kind, _to_tensor(file.getvalue())]
    if isinstance(value, np.dtype) and not value.hasobject:
        return ["numpy dtype", np.lib.format.dtype_to_descr(value)]
    return None


def _name_of(kind: type) -> list[str] | None:
    """Module and name, if they lead to the class."""
    name = [kind.__module__, kind.__qualname__]
    return name if _find(kind.__module__, kind.__qualname__) is kind else None


def _find(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if isinstance(found, type) else getattr(found, part, None)
    return found


def _is_named_tuple(kind: Any) -> bool:
    is_one = isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")
    return is_one and kind.__mro__[1] is tuple


def _is_plain_dataclass(kind: Any) -> bool:
    """Whether a dataclass is what its fields are: it has no say in how it is pickled."""
    if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
        return False
    if any(issubclass(kind, base) for base in (*_BUILTINS[1:], Tensor, nn.Module)):
        return False
    names = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__")
    own = [vars(c)[name] for c in kind.__mro__[:-1] for name in names if name in vars(c)]
    # those with slots get theirs from the library
    return all(getattr(method, "__module__", "") == "dataclasses" for method in own)


def _to_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()


def _to_bytes(data: Tensor) -> bytes:
    return data.numpy().tobytes()


_DATE = ("year", "month", "day")
_TIME = ("hour", "minute", "second", "microsecond", "tzinfo", "fold")


def _attributes(*names: str) -> Callable[[Any], list[Any]]:
    return lambda value: [getattr(value, name) for name in names]


_TO_PARTS: dict[type, Callable[[Any], list[Any]]] = {
    dict: lambda v: [list(v.items())],
    OrderedDict: lambda v: [list(v.items()), dict(v.__dict__)],
    Counter: lambda v: [list(v.items())],
    set: lambda v: [list(v)],
    frozenset: lambda v: [list(v)],
    bytes: lambda v: [_to_tensor(v)],
    bytearray: lambda v: [_to_tensor(bytes(v))],
    deque: lambda v: [list(v), v.maxlen],
    complex: lambda v: [v.real, v.imag],
    range: _attributes("start", "stop", "step"),
    slice: _attributes("start", "stop", "step"),
    io.BytesIO: lambda v: [_to_tensor(v.getvalue()), v.tell()],
    io.StringIO: lambda v: [v.getvalue(), v.tell()],
    Decimal: lambda v: [str(v)],
    Fraction: _attributes("numerator", "denominator"),
    uuid.UUID: lambda v: [v.int],
    datetime.date: _attributes(*_DATE),
    datetime.datetime: _attributes(*_DATE, *_TIME),
    datetime.time: _attributes(*_TIME),
    datetime.timedelta: _attributes("days", "seconds", "microseconds"),
    datetime.timezone: lambda v: [v.utcoffset(None), v.tzname(None)],
    zoneinfo.ZoneInfo: lambda v: [v.key],
    type(...): lambda v: [],
    **dict.fromkeys(_PATHS, lambda v: [str(v)]),
}


class Lazy(NamedTuple):
    """How tensors are put into dictionaries that read them when they are looked up.

    Attributes:
        tensor: makes what stands for a tensor that has not been read.
        kind: the kind of dictionary that takes such.
    """

    tensor: Callable[[str], Any]
    kind: Callable[[], Any]


def decode(
    value: Any, tensor: Callable[[str], Any] = Placeholder.of, lazy: Lazy | None = None
) -> Any:
    """What :func:`encode` got.

    Args:
        value: plain data.
        tensor: makes what takes the place of a tensor of the folder.
        lazy: what takes it where a dictionary can wait.

    Raises:
        CheckpointError: if a class is not there, or the data are of no known kind.
    """
    return _Decoder(tensor, lazy).of(value)


class _Decoder:
    def __init__(self, tensor: Callable[[str], Any], lazy: Lazy | None) -> None:
        self._tensor, self._lazy = tensor, lazy
        self._done: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        kind = type(value)
        if kind not in (list, tuple, dict, OrderedDict):
            return value
        if id(value) not in self._done:
            self._made(value, kind)
        return self._done[id(value)][1]

    def _keep(self, value: Any, made: Any) -> Any:
        self._done[id(value)] = (value, made)
        return made

    def _made(self, value: Any, kind: Any) -> None:
        if kind is list:
            self._keep(value, []).extend(self.of(item) for item in value)
        elif kind is tuple:
            self._keep(value, tuple(self.of(item) for item in value))
        elif _is_tensor(value):
            self._keep(value, self._tensor(value[KEY]))
        elif value.keys() == {HELD}:
            self._held(value, *value[HELD])
        else:
            lazy = self._lazy if any(map(_is_tensor, value.values())) else None
            made = self._keep(value, kind() if lazy is None else lazy.kind())
            for key, item in value.items():
                waits = lazy is not None and _is_tensor(item)
                made[key] = lazy.tensor(item[KEY]) if lazy and waits else self.of(item)
            for name, attribute in getattr(value, "__dict__", {}).items():
                made.__dict__[name] = self.of(attribute)

    def _held(self, value: Any, kind: str, *parts: Any) -> None:
        if kind in _EMPTY:  # may contain themselves
            make, fill = _EMPTY[kind]
            made = self._keep(value, make(*parts))
            fill(made, *(self.of(part) for part in parts))
        elif kind == "dataclass":
            made = self._keep(
                value, object.__new__(_class(parts[0], parts[1], _is_plain_dataclass))
            )
            for name, entry in self.of(parts[2]).items():
                object.__setattr__(made, name, entry)
        elif kind in _FROM_PARTS:
            self._keep(value, _FROM_PARTS[kind](*(self.of(part) for part in parts)))
        else:
            raise CheckpointError(
                f"the checkpoint holds a '{kind}', which this version of lightning_zero does not"
                " know; read it with a newer one"
            )


def _is_tensor(value: Any) -> bool:
    return type(value) is dict and value.keys() == {KEY}


def _class(module: str, name: str, is_right: Callable[[Any], bool]) -> Any:
    found = _find(module, name)
    if found is None:
        raise CheckpointError(
            f"the checkpoint holds a '{module}.{name}', and nothing has imported its module:"
            f" `import {module}` first. (Modules that a file names are not imported for it.)"
        )
    if not is_right(found):
        raise CheckpointError(
            f"the checkpoint holds a '{module}.{name}', but that is no enumeration, named tuple or"
            " dataclass now"
        )
    return found


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, enum.EnumMeta)


def _update(made: Any, items: list[Any], *_: Any) -> None:
    for key, item in items:
        dict.__setitem__(made, key, item)


def _ordered(made: Any, items: list[Any], attributes: dict[str, Any]) -> None:
    made.update(items)
    made.__dict__.update(attributes)


def _member(module: str, name: str, member: str) -> Any:
    return _class(module, name, _is_enum).__members__[member]


def _stream(made: Any, position: int) -> Any:
    made.seek(position)
    return made


def _from_numpy(data: Tensor) -> Any:
    import numpy as np

    return np.load(io.BytesIO(_to_bytes(data)), allow_pickle=False)


def _numpy_dtype(description: Any) -> Any:
    import numpy as np

    return np.lib.format.descr_to_dtype(description)


def _timezone(offset: datetime.timedelta, name: str) -> datetime.timezone:
    plain = datetime.timezone(offset)
    return plain if plain.tzname(None) == name else datetime.timezone(offset, name)


_EMPTY: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "dict": (lambda *_: {}, _update),
    "OrderedDict": (lambda *_: OrderedDict(), _ordered),
    "Counter": (lambda *_: Counter(), _update),
    "defaultdict": (
        lambda factory, _: defaultdict(None if factory is None else _FACTORIES[factory]),
        lambda made, _, items: _update(made, items),
    ),
    "set": (lambda _: set(), lambda made, items: made.update(items)),
    "deque": (lambda _, maxlen: deque(maxlen=maxlen), lambda made, items, _: made.extend(items)),
}
_FROM_PARTS: dict[str, Callable[..., Any]] = {
    "frozenset": frozenset,
    "bytes": _to_bytes,
    "bytearray": lambda data: bytearray(_to_bytes(data)),
    "complex": complex,
    "range": range,
    "slice": slice,
    "BytesIO": lambda data, position: _stream(io.BytesIO(_to_bytes(data)), position),
    "StringIO": lambda text, position: _stream(io.StringIO(text, newline=""), position),
    "Decimal": Decimal,
    "Fraction": Fraction,
    "UUID": lambda number: uuid.UUID(int=number),
    "date": datetime.date,
    "datetime": lambda *parts: datetime.datetime(*parts[:-1], fold=parts[-1]),
    "time": lambda *parts: datetime.time(*parts[:-1], fold=parts[-1]),
    "timedelta": datetime.timedelta,
    "timezone": _timezone,
    "ZoneInfo": zoneinfo.ZoneInfo,
    "ellipsis": lambda: ...,
    **{kind.__name__: kind for kind in _PATHS},
    "ndarray": _from_numpy,
    "numpy scalar": lambda data: _from_numpy(data)[()],
    "numpy dtype": _numpy_dtype,
    "enum": _member,
    "flag": lambda module, name, value: _class(module, name, _is_enum)(value),
    "namedtuple": lambda module, name, items: tuple.__new__(
        _class(module, name, _is_named_tuple), items
    ),
}
