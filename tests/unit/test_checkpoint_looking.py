"""Whatever somebody does with a loaded folder's dictionaries, plain tensors are what they get."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_zero.checkpoint.lazy import SavedTensor, unpack, unread
from lightning_zero.checkpoint.packing import pack
from lightning_zero.checkpoint.saving import save_folder
from lightning_zero.comm.collectives import SingleRank

VALUES = OrderedDict(a=torch.arange(6.0).view(2, 3), b=torch.ones(4), c=torch.tensor(2))


@pytest.fixture
def state(tmp_path: Path) -> Any:
    packed = pack({"state_dict": VALUES}, [], is_writer=True)
    save_folder(tmp_path / "x", packed.tensors, packed.meta, {}, SingleRank())
    return unpack(tmp_path / "x")["state_dict"]


def dumped(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


WAYS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "stars": lambda s: {**s},
    "items": lambda s: {k: v for k, v in s.items()},  # noqa: C416
    "values": lambda s: dict(zip(s, s.values(), strict=True)),
    "get": lambda s: {k: s.get(k) for k in s},
    "pop": lambda s: {k: s.pop(k) for k in list(s)},
    "popitem": lambda s: dict(reversed([s.popitem() for _ in range(len(s))])),
    "setdefault": lambda s: {k: s.setdefault(k, 0) for k in list(s)},
    "copy": lambda s: dict(s.copy()),
    "copy.copy": lambda s: dict(copy.copy(s)),
    "deepcopy": copy.deepcopy,
    "pickle": lambda s: pickle.loads(pickle.dumps(s)),
    "torch.save": dumped,
    "or": lambda s: s | {},
    "ror": lambda s: {} | s,
    "update": lambda s: (made := {}, made.update(s))[0],
    "tree_map": lambda s: pytree.tree_map(lambda t: t, s),
    "tree_leaves": lambda s: dict(zip(s.keys(), pytree.tree_leaves(s), strict=True)),
    "apply_to_collection": lambda s: apply_to_collection(s, Tensor, lambda t: t),
    "match": lambda s: dict(zip("abc", (s["a"], s["b"], s["c"]), strict=True)),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_a_value_gives_a_plain_tensor(state: Any, way: str) -> None:
    got = WAYS[way](state)
    assert list(got) == list(VALUES)
    for key, value in dict.items(dict(got)):
        assert type(value) is Tensor
        assert torch.equal(value, VALUES[key])
        assert value.numpy().tolist() == VALUES[key].tolist()
        assert value.untyped_storage().nbytes()


def test_what_has_been_looked_at_stays_and_the_rest_is_unread(state: Any) -> None:
    state["a"].mul_(2)
    state["a"].numpy()[0, 0] = 9
    state["new"] = state.pop("b")
    del state["c"]
    assert torch.equal(state["a"], torch.tensor([[9.0, 2, 4], [6, 8, 10]]))
    assert list(state) == ["a", "new"]
    assert "b" not in state
    assert not [v for v in unread(state).values() if isinstance(v, SavedTensor)]


def test_only_what_is_looked_at_is_read(state: Any) -> None:
    assert state["b"].sum() == 4
    left = [key for key, value in unread(state).items() if isinstance(value, SavedTensor)]
    assert left == ["a", "c"]
    assert len(state) == 3
    assert list(state.keys()) == ["a", "b", "c"]
    with pytest.raises(KeyError, match="none"):
        state["none"]
    with pytest.raises(KeyError):
        state.pop("none")
    assert state.pop("none", None) is state.get("none") is None
    assert json.dumps(list(state))
    assert isinstance(state, OrderedDict)
