"""What a sharded folder holds of Python objects comes back as pickle would give it back."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import io
import math
import pathlib
import pickle
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_zero.checkpoint.encoding import Unheld, decode, encode
from lightning_zero.checkpoint.failures import CheckpointError
from lightning_zero.checkpoint.index import KEY


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Plain:
    a: Any
    b: Any = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: Any


class Color(enum.Enum):
    RED = "r"
    BLUE = ("b", 2)


class Level(enum.IntEnum):
    LOW = 1


class Right(enum.Flag):
    READ = 1
    WRITE = 2


class Odd:
    """Of no kind."""


class OddDict(dict[str, int]):
    """A user's own."""


def through(value: Any) -> Any:
    """Saved and loaded as ``meta.pt`` is."""
    file = io.BytesIO()
    torch.save(encode(value), file)
    file.seek(0)
    return decode(torch.load(file, weights_only=True))


def same(a: Any, b: Any) -> bool:
    """Equal in value, type, order and attributes, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b) and a.requires_grad == b.requires_grad
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and np.array_equal(a, b) and np.shape(a) == np.shape(b)
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a * b) >= 0)
    if isinstance(a, dict):
        attributes = same(vars(a), vars(b)) if isinstance(a, OrderedDict) else True
        factory = getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        return attributes and factory and same(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple | deque):
        limit = getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
        return limit and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, io.BytesIO | io.StringIO):
        return bool(a.getvalue() == b.getvalue() and a.tell() == b.tell())
    if dataclasses.is_dataclass(a):
        names = [field.name for field in dataclasses.fields(a)]
        return all(same(getattr(a, name), getattr(b, name)) for name in names)
    return bool(a == b)


hashable = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.complex_numbers(allow_nan=False),
    st.decimals(allow_nan=False),
    st.fractions(),
    st.uuids(),
    st.dates(),
    st.times(),
    st.datetimes(timezones=st.one_of(st.none(), st.timezones())),
    st.timedeltas(),
    st.sampled_from([*Color, *Level, *Right, Right.READ | Right.WRITE, Right(0)]),
    st.sampled_from([pathlib.PurePosixPath("a/b"), Path("/c"), range(1, 9, 3)]),
    st.sampled_from([torch.float16, torch.device("cpu"), torch.Size([2, 3])]),
    st.sampled_from([datetime.timezone.utc, datetime.timezone(datetime.timedelta(hours=2), "X")]),
    st.sampled_from([np.float32(2.5), np.int8(3), np.bool_(True), np.datetime64("2020-01-01")]),
    st.sampled_from([np.str_("s"), np.complex64(1j), np.dtype("f4")]),
)
leaves = st.one_of(
    hashable,
    st.floats(),
    st.sets(hashable, max_size=3),
    st.frozensets(hashable, max_size=3),
    st.binary().map(bytearray),
    st.binary().map(io.BytesIO),
    st.text().map(lambda text: io.StringIO(text)),
    st.sampled_from([slice(1, None, 2)]),
    st.lists(st.integers(0, 9)).map(lambda n: np.array(n, dtype="int16")),
    st.sampled_from(
        [np.zeros((2, 0)), np.asfortranarray(np.eye(3)), np.array(3.0), np.array(["ab", "c"])]
    ),
    st.sampled_from([np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])]),
    st.lists(st.floats(allow_nan=False, width=32), max_size=3).map(torch.tensor),
    st.sampled_from([nn.Parameter(torch.ones(2)), torch.eye(2, dtype=torch.bfloat16)]),
)


def containers(children: Any) -> Any:
    pairs = st.lists(st.tuples(hashable, children), max_size=3)
    return st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(hashable, children, max_size=3),
        st.dictionaries(st.sampled_from([KEY, "__held__", "a"]), children),
        pairs.map(OrderedDict),
        pairs.map(lambda p: defaultdict(list, p)),
        st.dictionaries(st.text(), st.integers()).map(Counter),
        st.tuples(st.lists(children, max_size=3), st.sampled_from([None, 5])).map(
            lambda p: deque(*p)
        ),
        st.tuples(children, children).map(lambda p: Point(*p)),
        st.tuples(children, children).map(lambda p: Plain(*p)),
        children.map(Frozen),
    )


@settings(max_examples=150, deadline=None)
@given(st.recursive(leaves, containers, max_leaves=12))
def test_whatever_is_nested_comes_back_as_from_pickle(value: Any) -> None:
    assert same(through(value), pickle.loads(pickle.dumps(value)))


def test_attributes_order_and_places_in_several_containers_come_back() -> None:
    ordered = OrderedDict(a=1, b=Counter("aab"))
    ordered._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    ordered.move_to_end("a")
    shared = [ordered]
    tensor = torch.ones(3)
    value: dict[str, Any] = {"x": shared, "y": (shared,), "t": tensor, "again": Plain(tensor)}
    value["itself"] = value
    got = through(value)
    assert got["x"] is got["y"][0]
    assert got["t"] is got["again"].a
    assert got["itself"] is got
    assert list(got["x"][0]) == ["b", "a"]
    assert got["x"][0]._metadata == {"": {"version": 2}}
    got["x"][0]["b"]["new"] += 1  # it is a Counter


@pytest.mark.parametrize("value", [Odd(), OddDict(a=1), lambda: 0, np.array([None]), Odd])
def test_what_can_not_be_held_is_named_with_the_way_out(value: Any) -> None:
    with pytest.raises(Unheld, match=r"`c\['mine'\]\[1\]` is a .*save_format='full'"):
        encode({"mine": [1, value]}, "c")


def test_no_module_is_imported_and_no_constructor_runs() -> None:
    ran = []

    @dataclasses.dataclass
    class Local:
        a: int

        def __post_init__(self) -> None:
            ran.append(self.a)

    for reference in (["antigravity", "fly"], ["tests.nowhere", "Point"]):
        with pytest.raises(CheckpointError, match="nothing has imported its module"):
            decode({"__held__": ["namedtuple", *reference, [1]]})
    for kind in ("namedtuple", "dataclass", "enum", "flag"):
        with pytest.raises(CheckpointError, match="no enumeration, named tuple or"):
            decode({"__held__": [kind, "os", "system", "true"]})
    with pytest.raises(CheckpointError, match="does not know"):
        decode({"__held__": ["newer", 1]})
    with pytest.raises(Unheld, match="Local"):  # nothing leads to it
        encode(Local(1))
    assert ran == [1]


def test_values_are_what_they_were() -> None:
    moment = datetime.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("UTC"))
    stream = io.BytesIO(b"abc")
    stream.seek(2)
    for value in (moment, stream, Decimal("1.10"), Fraction(1, 3), uuid.uuid4(), -0.0, math.inf):
        assert same(through(value), value)
    assert through(moment).fold == 1
