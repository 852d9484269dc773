"""Tensors of a folder that are read when somebody looks at them.

[Note: lazily read] Inside of this package a saved tensor is a :class:`SavedTensor`, of which each
rank reads its part. Nobody else gets to see one: a :class:`LazyDict` gives its holder plain
tensors, reading each when it is looked up. :func:`unread` is the way back for the package's own
loading.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, ItemsView, Sequence, ValuesView
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_zero.checkpoint.encoding import Lazy, decode
from lightning_zero.checkpoint.loading import load_from
from lightning_zero.checkpoint.opening import OpenFolder, TensorPart, read_encoded
from lightning_zero.checkpoint.rectangles import Rectangle, memory_order, rectangles
from lightning_zero.checkpoint.tree import rebuilt


def shaped(flat: Tensor, rectangle: Rectangle, stride: Sequence[int]) -> Tensor:
    """1-D elements in memory order as tensor of the shape of a rectangle (a view)."""
    order = memory_order(stride)
    by_memory = flat.view([rectangle.lengths[dim] for dim in order])
    return by_memory.permute([order.index(dim) for dim in range(len(order))])


class SavedTensor(Tensor):
    """A tensor of a folder, read when it is used.

    Any operation reads it into memory for itself; ``read_piece`` reads a part. Once it has been
    changed in place it stays in memory.
    """

    folder: OpenFolder
    saved_name: str
    changed: Tensor | None

    @staticmethod
    def of(folder: OpenFolder, name: str) -> SavedTensor:
        """The tensor ``name`` of a folder."""
        entry, make = folder.tensors[name], Tensor._make_wrapper_subclass
        tensor: SavedTensor = make(SavedTensor, tuple(entry.size), dtype=entry.properties.dtype)
        tensor.folder, tensor.saved_name, tensor.changed = folder, name, None
        return tensor

    def read(self) -> Tensor:
        """The whole tensor."""
        if self.changed is not None:
            return self.changed
        whole = torch.empty(self.shape, dtype=self.dtype)
        self._fill([((0,) * self.dim(), whole)])
        return whole

    def read_piece(self, stride: tuple[int, ...], where: range, out: Tensor) -> None:
        """Put elements ``where``, in memory order as ``stride`` gives it, into the 1-D ``out``."""
        if self.changed is not None:
            out.copy_(
                self.changed.permute(memory_order(stride)).reshape(-1)[where.start : where.stop]
            )
            return
        self._fill(
            [
                (r.offsets, shaped(out[r.start - where.start : r.stop - where.start], r, stride))
                for r in rectangles(tuple(self.shape), stride, where.start, where.stop)
            ]
        )

    def _fill(self, chunks: list[tuple[tuple[int, ...], Tensor]]) -> None:
        part = TensorPart(tuple(self.shape), self.dtype, chunks)
        load_from(self.folder, {self.saved_name: part})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        is_mutable = func._schema.is_mutable  # type: ignore[attr-defined]

        def read(tensor: SavedTensor) -> Tensor:
            whole = tensor.read()
            if is_mutable:
                tensor.changed = whole
            return whole

        args, kwargs = pytree.tree_map_only(cls, read, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> SavedTensor:
        return self

    def __reduce_ex__(self, proto: Any) -> Any:
        return self.read().__reduce_ex__(proto)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SavedTensor('{self.saved_name}', shape={tuple(self.shape)}, dtype={self.dtype})"


class LazyDict(OrderedDict[Any, Any]):
    """A dict of a checkpoint; a tensor that has not been read is read when it is looked up."""

    def __getitem__(self, key: Any) -> Any:
        value = super().__getitem__(key)
        if isinstance(value, SavedTensor):
            value = value.read()
            super().__setitem__(key, value)
        return value

    def get(self, key: Any, default: Any = None) -> Any:
        """As for a dict."""
        try:
            return self[key]
        except KeyError:
            return default

    def pop(self, key: Any, *default: Any) -> Any:
        """As for a dict."""
        return _plain(super().pop(key, *default))

    def popitem(self, last: bool = True) -> Any:
        """As for a dict."""
        key, value = super().popitem(last)
        return key, _plain(value)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """As for a dict."""
        super().setdefault(key, default)
        return self[key]

    def items(self) -> Any:
        """As for a dict; reads what it comes to."""
        return ItemsView(self)

    def values(self) -> Any:
        """As for a dict; reads what it comes to."""
        return ValuesView(self)

    def copy(self) -> LazyDict:
        """A copy that reads for itself."""
        made = LazyDict((key, super(LazyDict, self).__getitem__(key)) for key in self)
        made.__dict__.update(self.__dict__)
        return made

    __copy__ = copy

    def plain(self) -> OrderedDict[Any, Any]:
        """All of it, read, as dict of its own."""
        plain = OrderedDict(self.items())
        plain.__dict__.update(self.__dict__)
        return plain

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self.plain(), memo)

    def __reduce_ex__(self, proto: Any) -> Any:
        return self.plain().__reduce_ex__(proto)


# `tree_map` goes into a subclass of a dict only if it has been told how.
pytree.register_pytree_node(
    LazyDict,
    lambda lazy: (list(lazy.values()), list(lazy.keys())),
    lambda values, keys: OrderedDict(zip(keys, values, strict=True)),
)


def _plain(value: Any) -> Any:
    return value.read() if isinstance(value, SavedTensor) else value


def read_all(value: Any) -> Any:
    """The same with everything read."""
    return rebuilt(
        value, lambda v: read_all(v.plain()) if isinstance(v, LazyDict) else NotImplemented
    )


def unread(value: Any) -> Any:
    """The same with :class:`SavedTensor` objects for what has not been read."""

    def change(item: Any) -> Any:
        if not isinstance(item, LazyDict):
            return NotImplemented
        made = OrderedDict((key, unread(OrderedDict.__getitem__(item, key))) for key in item)
        made.__dict__.update(item.__dict__)
        return made

    return rebuilt(value, change)


def unpack(path: Path) -> dict[str, Any]:
    """A checkpoint of which the tensors are read when they are looked up. Local."""
    folder = OpenFolder.open(path)
    made: dict[str, SavedTensor] = {}

    def saved(name: str) -> SavedTensor:
        if name not in made:
            made[name] = SavedTensor.of(folder, name)
        return made[name]

    meta = decode(read_encoded(path), lambda name: saved(name).read(), Lazy(saved, LazyDict))
    return cast(dict[str, Any], meta)
