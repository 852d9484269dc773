"""Between Lightning's checkpoint dictionary and the tensors of a folder.

A checkpoint that is about to be saved holds sharded parameters and :class:`StateShard` objects
instead of full tensors; a loaded one holds :class:`SavedTensor` objects, which are read from the
folder when they are used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_zero.checkpoint import run_state
from lightning_zero.checkpoint.containers import mapped, with_children
from lightning_zero.checkpoint.hyper_parameters import safe_hyper_parameters
from lightning_zero.checkpoint.index import KEY, MODEL, placeholder
from lightning_zero.checkpoint.loading import load_from
from lightning_zero.checkpoint.opening import OpenFolder, TensorPart
from lightning_zero.checkpoint.rectangles import Rectangle, memory_order, rectangles
from lightning_zero.engine.buffer import ParamHandle
from lightning_zero.engine.guard import handle_of
from lightning_zero.engine.optimizer_state import StateShard
from lightning_zero.engine.saved_grads import GradShard
from lightning_zero.engine.shard import Shard

if TYPE_CHECKING:
    from lightning_zero.engine.engine import ZeroEngine


class Packed(NamedTuple):
    """A checkpoint in two parts: what this rank has of its tensors, and all the rest.

    Shards that rest in files are read while the chunks are iterated over; ``close`` ends that.
    """

    tensors: dict[str, TensorPart]
    meta: dict[str, Any]
    close: Callable[[], None]


def pack(
    checkpoint: dict[str, Any], param_names: Sequence[Sequence[str]], *, is_writer: bool
) -> Packed:
    """Take the tensors out of a checkpoint. Local.

    Args:
        checkpoint: Lightning's dictionary; it is not changed.
        param_names: per optimizer, the names of its parameters in the order of its groups.
        is_writer: whether this rank writes the tensors that every rank has whole.
    """
    return _Packer(param_names, is_writer).pack(checkpoint)


class _Packer:
    def __init__(self, param_names: Sequence[Sequence[str]], is_writer: bool) -> None:
        self._param_names, self._is_writer = param_names, is_writer
        self._tensors: dict[str, TensorPart] = {}
        self._name_of: dict[int, str] = {}
        self._opened = _Opened()

    def pack(self, checkpoint: dict[str, Any]) -> Packed:
        meta = dict(checkpoint)
        state_dict = checkpoint.get("state_dict", {})
        weights = {key: value for key, value in state_dict.items() if isinstance(value, Tensor)}
        places = {key: self._put(f"{MODEL}{key}", value) for key, value in weights.items()}
        meta["state_dict"] = with_children(state_dict, places)
        if "optimizer_states" in checkpoint:
            meta["optimizer_states"] = [
                self._optimizer(number, state)
                for number, state in enumerate(checkpoint["optimizer_states"])
            ]
        run = meta.get(run_state.KEY, {})
        if "unreduced" in run:
            meta[run_state.KEY] = {**run, "unreduced": self._unreduced(run["unreduced"])}
        for key in meta.keys() - {"state_dict", "optimizer_states"}:
            meta[key] = self._rest(key, meta[key])
        meta = safe_hyper_parameters(meta, warns=self._is_writer)
        return Packed(self._tensors, meta, self._opened.close)

    def _optimizer(self, number: int, state: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(state, dict) or "state" not in state:
            return state
        names = self._param_names[number]
        packed = {}
        for index, entries in state["state"].items():
            prefix = f"optimizer_{number}.state.{names[index]}"
            packed[index] = {
                key: self._put(f"{prefix}.{key}", value)
                if isinstance(value, StateShard | GradShard)
                or (isinstance(value, Tensor) and value.dim())
                else value
                for key, value in entries.items()
            }
        return {**state, "state": packed}

    def _unreduced(self, by_rank: list[dict[str, Tensor | None]]) -> list[dict[str, Any]]:
        """What each rank has for itself; None is with another rank."""
        packed = []
        for rank, gradients in enumerate(by_rank):
            names = {key: f"{run_state.KEY}.unreduced.{rank}.{key}" for key in gradients}
            for key, value in gradients.items():
                if value is not None:
                    whole = ((0,) * value.dim(), value)
                    part = TensorPart(tuple(value.shape), value.dtype, [whole])
                    self._tensors[names[key]] = part
            packed.append({key: {KEY: name} for key, name in names.items()})
        return packed

    def _rest(self, path: str, value: Any) -> Any:
        """Sharded parameters anywhere else, e.g. where a callback has kept the state dict."""
        if isinstance(value, dict):
            return {key: self._rest(f"{path}.{key}", item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._rest(f"{path}.{i}", v) for i, v in enumerate(value))
        is_param = isinstance(value, nn.Parameter) and _handle(value) is not None
        return (
            self._put(path, value)
            if is_param or isinstance(value, StateShard | GradShard)
            else value
        )

    def _put(self, name: str, value: Tensor | StateShard | GradShard) -> dict[str, str]:
        if id(value) in self._name_of:  # tied weights are written once
            return {KEY: self._name_of[id(value)]}
        self._tensors[name] = self._part(value)
        self._name_of[id(value)] = name
        return {KEY: name}

    def _part(self, value: Tensor | StateShard | GradShard) -> TensorPart:
        if isinstance(value, StateShard):
            driver, buffer = value.driver, value.handle.buffer
            key = (driver, buffer)

            def read_state() -> Tensor | None:
                self._opened.open(key, lambda: driver.state_of(buffer))
                return value.own_piece()

            return part_of(value.handle, value.dtype, read_state)
        if isinstance(value, GradShard):
            return self._part_of_shard(value.handle, value.shard)
        handle = _handle(value) if isinstance(value, nn.Parameter) else None
        if handle is not None:
            return self._part_of_shard(handle, handle.buffer.shard)
        whole = value.detach()
        chunks = [((0,) * whole.dim(), whole)] if self._is_writer else []
        return TensorPart(tuple(whole.shape), whole.dtype, chunks)

    def _part_of_shard(self, handle: ParamHandle, shard: Shard) -> TensorPart:
        def read() -> Tensor:
            return handle.buffer.own_piece(handle, self._opened.open(shard, shard.use))

        return part_of(handle, shard.dtype, read)


class _Opened:
    """Keeps what was opened last open: neighbours are read from the same shard."""

    def __init__(self) -> None:
        self._key: Any = None
        self._content: Any = None
        self._stack = contextlib.ExitStack()

    def open(self, key: Any, make: Callable[[], AbstractContextManager[Any]]) -> Any:
        """What the context gives that ``make`` returns for ``key``."""
        if key != self._key:
            self.close()
            self._content, self._key = self._stack.enter_context(make()), key
        return self._content

    def close(self) -> None:
        """Leave the context."""
        self._key = self._content = None
        self._stack.close()


class _Rectangles:
    """This rank's piece of a tensor with the shape of a parameter, as chunks."""

    def __init__(self, handle: ParamHandle, read: Callable[[], Tensor | None]) -> None:
        self._handle, self._read = handle, read

    def __iter__(self) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        shape, stride = tuple(self._handle.placeholder.shape), self._handle.stride
        where = self._handle.buffer.own_range(self._handle)
        piece = self._read() if len(where) else None
        if piece is None:
            return
        for rectangle in rectangles(shape, stride, where.start, where.stop):
            flat = piece[rectangle.start - where.start : rectangle.stop - where.start]
            yield rectangle.offsets, shaped(flat, rectangle, stride)


def part_of(
    handle: ParamHandle, dtype: torch.dtype, read: Callable[[], Tensor | None]
) -> TensorPart:
    """This rank's piece of a tensor with the shape of a parameter, which ``read`` gives, as
    rectangles.
    """
    return TensorPart(tuple(handle.placeholder.shape), dtype, _Rectangles(handle, read))


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


def read_all(value: Any) -> Any:
    """The same with every :class:`SavedTensor` in memory."""
    return pytree.tree_map_only(SavedTensor, SavedTensor.read, value)


def unpack(path: Path, meta: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint of which the tensors are read when they are used. Local."""
    folder = OpenFolder.open(path)
    made: dict[str, SavedTensor] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            name = placeholder(value)
            if name is not None:
                if name not in made:
                    made[name] = SavedTensor.of(folder, name)
                return made[name]
        return value

    return cast(dict[str, Any], mapped(meta, walk))


def gather_whole(
    checkpoint: dict[str, Any], engine: ZeroEngine | None, *, is_wanted: bool
) -> dict[str, Any]:
    """The checkpoint with full values for sharded parameters. Collective.

    Only ranks that want them keep any; the others take part and get None in their place.
    """
    found: dict[ParamHandle, None] = {}

    def note(leaf: Any) -> Any:
        handle = _handle(leaf) if isinstance(leaf, nn.Parameter) else None
        if handle is not None:
            found[handle] = None
        return leaf

    mapped(checkpoint, note)
    values = {} if engine is None else engine.full_values(found, is_wanted=is_wanted)

    def whole(leaf: Any) -> Any:
        if isinstance(leaf, GradShard):
            full = leaf.handle.buffer.gather_one(leaf.handle, leaf.shard, "the gradient")
            return full.cpu() if is_wanted else None
        handle = _handle(leaf) if isinstance(leaf, nn.Parameter) else None
        return leaf if handle is None else values.get(handle)

    return cast(dict[str, Any], mapped(checkpoint, whole))


def _handle(param: nn.Parameter) -> ParamHandle | None:
    entry = handle_of(param)
    return None if entry is None else entry[0]
