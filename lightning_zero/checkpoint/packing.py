"""From Lightning's checkpoint dictionary to the tensors of a folder.

A checkpoint that is about to be saved holds sharded parameters and :class:`StateShard` objects
instead of full tensors.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lightning_zero.checkpoint import run_state
from lightning_zero.checkpoint.encoding import encode
from lightning_zero.checkpoint.hyper_parameters import safe_hyper_parameters
from lightning_zero.checkpoint.index import MODEL, Placeholder
from lightning_zero.checkpoint.lazy import shaped
from lightning_zero.checkpoint.opening import TensorPart
from lightning_zero.checkpoint.rectangles import rectangles
from lightning_zero.checkpoint.tree import leaves, rebuilt
from lightning_zero.engine.buffer import ParamHandle
from lightning_zero.engine.guard import handle_of
from lightning_zero.engine.optimizer_state import StateShard
from lightning_zero.engine.saved_grads import GradShard
from lightning_zero.engine.shard import Shard

if TYPE_CHECKING:
    from lightning_zero.comm.collectives import Collectives
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
        if "state_dict" in checkpoint:
            meta["state_dict"] = self._state_dict(checkpoint["state_dict"])
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
        # the states of callbacks differ between ranks, and rank 0's are saved
        meta = encode(meta, "checkpoint", is_strict=self._is_writer)
        return Packed(self._tensors, meta, self._opened.close)

    def _state_dict(self, state: Any) -> Any:
        """All its tensors go into the folder, under the module's names."""
        if not isinstance(state, dict):
            return state
        made = copy.copy(state)
        for key, value in state.items():
            if isinstance(value, Tensor):
                made[key] = self._put(f"{MODEL}{key}", value)
        return made

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
            packed.append({key: Placeholder.of(name) for key, name in names.items()})
        return packed

    def _rest(self, path: str, value: Any) -> Any:
        """Sharded parameters anywhere else, e.g. where a callback has kept the state dict."""
        count = itertools.count()

        def put(item: Any) -> Any:
            is_param = isinstance(item, nn.Parameter) and _handle(item) is not None
            if is_param or isinstance(item, StateShard | GradShard):
                return self._put(f"{path}.{next(count)}", item)
            return NotImplemented

        return rebuilt(value, put)

    def _put(self, name: str, value: Tensor | StateShard | GradShard) -> Placeholder:
        if id(value) in self._name_of:  # tied weights are written once
            return Placeholder.of(self._name_of[id(value)])
        self._tensors[name] = self._part(value)
        self._name_of[id(value)] = name
        return Placeholder.of(name)

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


def gather_whole(
    checkpoint: dict[str, Any],
    engine: ZeroEngine | None,
    collectives: Collectives,
    *,
    is_wanted: bool,
) -> dict[str, Any]:
    """The checkpoint with full values for sharded parameters. Collective.

    Only ranks that want them keep any; the others take part and get None in their place. Rank 0's
    checkpoint counts: hooks may have changed it there alone.
    """
    values: dict[ParamHandle, Tensor] = {}
    if engine is not None:
        mine = {_handle(leaf) for leaf in leaves(checkpoint) if isinstance(leaf, nn.Parameter)}
        numbers = [number for number, handle in enumerate(engine.handles) if handle in mine]
        numbers = collectives.all_gather_object(numbers, "what is in the checkpoint")[0]
        found = [engine.handles[number] for number in numbers]
        values = engine.full_values(found, is_wanted=is_wanted)

    def whole(leaf: Any) -> Any:
        if isinstance(leaf, GradShard):
            full = leaf.handle.buffer.gather_one(leaf.handle, leaf.shard, "the gradient")
            return full.cpu() if is_wanted else None
        handle = _handle(leaf) if isinstance(leaf, nn.Parameter) else None
        return NotImplemented if handle is None else values.get(handle)

    return cast(dict[str, Any], rebuilt(checkpoint, whole))


def _handle(param: nn.Parameter) -> ParamHandle | None:
    entry = handle_of(param)
    return None if entry is None else entry[0]
