"""What people keep in checkpoints comes back as it was, and nothing is executed for it."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import pathlib
import uuid
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_zero.checkpoint.encoding import decode, encode
from lightning_zero.checkpoint.tree import rebuilt


class Color(enum.Enum):
    RED = 1


class Point(NamedTuple):
    x: Any
    y: Any


Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Settings:
    rate: Any
    names: list[str] = dataclasses.field(default_factory=list)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, io.BytesIO):
        return a.getvalue() == b.getvalue()
    if isinstance(a, dict):
        kept = getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        return kept and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b))
    if dataclasses.is_dataclass(a):
        return same(vars(a), vars(b))
    return bool(a == b)


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(encode(value), file)
    file.seek(0)
    return decode(torch.load(file, weights_only=True))


LEAVES = [
    None,
    True,
    3,
    2.5,
    1 + 2j,
    "text",
    b"bytes",
    bytearray(b"more"),
    ...,
    range(1, 9, 2),
    slice(None, 3),
    frozenset([1, 2]),
    {1, "a"},
    Counter("hello"),
    defaultdict(list, a=[1]),
    defaultdict(None, a=1),
    deque([1, 2], maxlen=3),
    datetime.datetime(2020, 1, 2, 3, 4, 5, 6, tzinfo=datetime.timezone.utc),
    datetime.date(2020, 1, 2),
    datetime.time(3, 4),
    datetime.timedelta(days=1, microseconds=5),
    decimal.Decimal("1.10"),
    fractions.Fraction(1, 3),
    uuid.UUID(int=7),
    pathlib.PosixPath("/a/b"),
    pathlib.PureWindowsPath("c:/a"),
    np.arange(6, dtype=np.int16).reshape(2, 3),
    np.float32(1.5),
    np.array("text"),
    np.bool_(True),
    io.BytesIO(b"content"),
    Color.RED,
    Point(1, {"a": frozenset()}),
    Pair(1, 2),
    Settings(np.float64(0.1), ["a"]),
    torch.ones(2, dtype=torch.bfloat16),
    torch.Size([1, 2]),
    torch.float32,
    torch.device("cpu"),
    {pathlib.PosixPath("key"): 1, Color.RED: 2},
    {"__held__": ["set", [1]]},
]


@pytest.mark.parametrize("value", LEAVES, ids=lambda value: type(value).__name__)
def test_every_type_comes_back_as_it_was(value: Any) -> None:
    assert same(through_a_file(value), value)


@given(
    st.recursive(
        st.sampled_from(LEAVES),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.tuples(inner, inner),
            st.dictionaries(st.text(max_size=3), inner, max_size=3),
            st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict),
            st.builds(Point, inner, inner),
            st.builds(Settings, inner),
        ),
        max_leaves=6,
    )
)
def test_every_mixture_comes_back_as_it_was(value: Any) -> None:
    assert same(through_a_file(value), value)


def test_attributes_of_a_state_dict_stay() -> None:
    state = OrderedDict(a=torch.ones(2), b=1)
    state._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    changed = rebuilt(state, lambda v: 7 if type(v) is int and v == 1 else NotImplemented)
    assert changed["b"] == 7
    assert state["b"] == 1
    for kept in (changed, through_a_file(state)):
        assert type(kept) is OrderedDict
        assert kept._metadata == {"": {"version": 2}}
