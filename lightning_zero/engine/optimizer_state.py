"""Between the state of segments and the optimizer's ordinary, full state."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_zero.engine.buffer import FlatBuffer, ParamHandle
from lightning_zero.engine.segments import (
    Segment,
    is_per_element,
    own_slot_pieces,
    runs,
    same_value,
)

if TYPE_CHECKING:
    from lightning_zero.engine.optimizer import OptimizerDriver


@runtime_checkable
class PieceReader(Protocol):
    """A tensor that is not in memory, of which a part can be read."""

    def read_piece(self, stride: tuple[int, ...], where: range, out: Tensor) -> None:
        """Put elements ``where``, in memory order as ``stride`` gives it, into the 1-D ``out``."""


@dataclass(frozen=True)
class StateShard:
    """Stands for one entry per element of an optimizer's state, of which every rank has a part.

    Attributes:
        driver: the driver of the optimizer.
        handle: the parameter that the entry belongs to.
        key: its name in the optimizer's state.
        dtype: of its elements.
    """

    driver: OptimizerDriver
    handle: ParamHandle
    key: str
    dtype: torch.dtype

    def own_piece(self) -> Tensor | None:
        """The elements of this rank's piece of the parameter, 1-D; None if it has none.

        Only while the state of the buffer is in memory (:meth:`OptimizerDriver.state_of`).
        """
        segment = segment_of(self.driver, self.handle)
        if segment is None:
            return None
        start, stop = own_slot_pieces(segment.buffer)[self.handle.index]
        value: Tensor = self.driver.inner.state[segment.param][self.key]
        return value[start - segment.start : stop - segment.start]


def shard_state(driver: OptimizerDriver) -> dict[ParamHandle, dict[str, Any]]:
    """The state by parameter, with a :class:`StateShard` for every tensor of a parameter's shape.
    Collective.
    """
    described = _describe(driver)
    return {
        handle: {
            key: StateShard(driver, handle, key, value) if isinstance(value, torch.dtype) else value
            for key, value in described.get((handle.buffer.index, handle.index), {}).items()
        }
        for handle in driver.handles
    }


def full_state(
    driver: OptimizerDriver, *, is_wanted: bool = True
) -> dict[ParamHandle, dict[str, Any]]:
    """The full state by parameter. Collective.

    Args:
        driver: the driver.
        is_wanted: whether this rank keeps the result; others take part and return no tensors of
            parameters.
    """
    described = _describe(driver)
    full: dict[ParamHandle, dict[str, Any]] = {}
    for buffer in {handle.buffer: None for handle in driver.handles}:
        with driver.state_of(buffer):
            full.update(_gather_buffer(driver, buffer, described, is_wanted))
    return full


def present_state(driver: OptimizerDriver) -> list[ParamHandle]:
    """The parameters that have state on some rank. Collective."""
    described = _describe(driver)
    return [h for h in driver.handles if (h.buffer.index, h.index) in described]


def read_state(driver: OptimizerDriver, handle: ParamHandle) -> dict[str, Any]:
    """The full state of one parameter, in memory of its own. Collective."""
    buffer = handle.buffer
    with driver.state_of(buffer):
        segment = segment_of(driver, handle)
        state = {} if segment is None else driver.inner.state.get(segment.param, {})
        own = {
            key: value.dtype
            if segment is not None and is_per_element(value, segment)
            else copy.deepcopy(_on_cpu(value))
            for key, value in state.items()
        }
        label = f"the optimizer state of parameter '{handle.fqn}'"
        every = driver.engine.collectives.all_gather_object(own, label)
        found: dict[str, Any] = dict(next((entries for entries in every if entries), {}))
        for key, value in found.items():
            if isinstance(value, torch.dtype):
                piece = None
                if segment is not None:
                    start, stop = own_slot_pieces(buffer)[handle.index]
                    piece = state[key][start - segment.start : stop - segment.start]
                found[key] = buffer.gather_pieces(handle, piece, value, f"'{key}'")
    return found


def segment_of(driver: OptimizerDriver, handle: ParamHandle) -> Segment | None:
    """The segment with this rank's elements of a parameter; None if it has none."""
    for segment in driver.segments:
        if segment.buffer is handle.buffer and handle.index in segment.slots:
            return segment
    return None


def replace_state(driver: OptimizerDriver, handle: ParamHandle, entries: dict[str, Any]) -> None:
    """Set the state of one parameter from full entries, the same on every rank. Local.

    A segment is cut only where entries come, go or differ from those of its other parameters.
    """
    segment = segment_of(driver, handle)
    if segment is None:
        return
    with driver.state_of(handle.buffer, write=True):
        state = driver.inner.state.get(segment.param, {})
        if len(segment.slots) > 1 and not _fits(state, entries, segment, handle):
            alone = {slot: slot == handle.index for slot in segment.slots}
            parts = driver.split(segment, runs(segment.slots, alone))
            segment = next(part for part in parts if handle.index in part.slots)
            state = driver.inner.state.get(segment.param, {})
        if not _fits(state, entries, segment, handle):
            driver.inner.state.pop(segment.param, None)
            by_handle = {handle: entries}
            local = {name: _local(name, v, segment, by_handle) for name, v in entries.items()}
            if local:
                driver.inner.state[segment.param] = local
            return
        buffer, where = handle.buffer, handle.buffer.own_range(handle)
        start, stop = own_slot_pieces(buffer)[handle.index]
        for key, value in entries.items():
            if is_per_element(state[key], segment):
                mine = state[key][start - segment.start : stop - segment.start]
                mine.copy_(buffer.flatten(handle, value.detach())[where.start : where.stop])


def _fits(
    state: dict[str, Any], entries: dict[str, Any], segment: Segment, handle: ParamHandle
) -> bool:
    """Whether full entries can be put into a segment's as they are."""
    shape = handle.placeholder.shape
    return list(state) == list(entries) and all(
        value.dtype == entries[key].dtype
        if is_per_element(value, segment) and _is_full(key, entries[key], shape)
        else not is_per_element(value, segment)
        and same_value(_on_cpu(value), _on_cpu(entries[key]))
        for key, value in state.items()
    )


def _describe(driver: OptimizerDriver) -> dict[tuple[int, int], dict[str, Any]]:
    """By buffer and slot, what some rank has in its state: the dtype of what is per element, and
    the values of the rest.
    """
    own: dict[tuple[int, int], dict[str, Any]] = {}
    driver.wait()
    for segment in driver.segments:
        for slot in segment.slots:
            state = driver.inner.state.get(segment.param, {})
            own[segment.buffer.index, slot] = {
                key: value.dtype if is_per_element(value, segment) else _on_cpu(value)
                for key, value in state.items()
            }
    described: dict[tuple[int, int], dict[str, Any]] = {}
    for part in driver.engine.collectives.all_gather_object(own, "the optimizer state"):
        described.update({key: value for key, value in part.items() if value})
    return described


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _gather_buffer(
    driver: OptimizerDriver,
    buffer: FlatBuffer,
    described: dict[tuple[int, int], dict[str, Any]],
    is_wanted: bool,
) -> dict[ParamHandle, dict[str, Any]]:
    """The full state of the parameters of one buffer, one flat tensor per entry and dtype at a
    time.
    """
    full: dict[ParamHandle, dict[str, Any]] = {}
    flats: dict[tuple[str, torch.dtype], None] = {}
    for handle in buffer.handles:
        for key, value in described.get((buffer.index, handle.index), {}).items():
            full.setdefault(handle, {})[key] = (
                value  # a placeholder where it is a dtype: keeps the order of keys
            )
            if isinstance(value, torch.dtype):
                flats[key, value] = None
    for key, dtype in flats:
        layout = buffer.layout
        shard = torch.zeros(layout.shard_numel, dtype=dtype, device=buffer.device)
        for segment in driver.segments:
            value = driver.inner.state.get(segment.param, {}).get(key)
            if segment.buffer is buffer and is_per_element(value, segment) and value.dtype == dtype:
                shard[segment.start : segment.stop].copy_(value)
        flat = torch.empty(layout.numel, dtype=dtype, device=buffer.device)
        driver.engine.collectives.start_all_gather(
            flat, shard, f"'{key}' of {buffer.name}", buffer.index
        ).wait()
        for handle, entries in full.items():
            if entries.get(key) is dtype:
                view = handle.strided(flat, layout.slots[handle.index].offset)
                entries[key] = view.clone() if is_wanted else None
    return full


def import_state(driver: OptimizerDriver, state: Mapping[Any, dict[str, Any]]) -> None:
    """Give the segments their parts of full states; segments whose parameters differ in scalar
    entries are cut.
    """
    by_handle: dict[ParamHandle, dict[str, Any]] = {}
    for param, entries in state.items():
        handle = driver.handle_of(param)
        if handle is None:
            driver.inner.state[param] = entries
        else:
            by_handle[handle] = entries
    for buffer in {segment.buffer: None for segment in driver.segments}:
        with driver.state_of(buffer, write=True):
            _import_buffer(driver, buffer, by_handle)


def _import_buffer(
    driver: OptimizerDriver, buffer: FlatBuffer, by_handle: dict[ParamHandle, dict[str, Any]]
) -> None:
    for segment in [segment for segment in driver.segments if segment.buffer is buffer]:
        kinds: list[dict[str, Any]] = []
        key = {
            slot: _kind(segment.buffer.handles[slot], by_handle, kinds) for slot in segment.slots
        }
        parts = runs(segment.slots, key)
        for part in driver.split(segment, parts) if len(parts) > 1 else [segment]:
            first = by_handle.get(part.buffer.handles[part.slots[0]], {})
            local = {name: _local(name, value, part, by_handle) for name, value in first.items()}
            if local:
                driver.inner.state[part.param] = local


def _kind(
    handle: ParamHandle, by_handle: dict[ParamHandle, dict[str, Any]], kinds: list[dict[str, Any]]
) -> int:
    """Parameters of the same kind have the same entries and agree in those that are not per
    element.
    """
    entries = by_handle.get(handle, {})
    shape = handle.placeholder.shape
    kind = {k: v.dtype if _is_full(k, v, shape) else v for k, v in entries.items()}
    for number, other in enumerate(kinds):
        if kind.keys() == other.keys() and all(same_value(kind[k], other[k]) for k in kind):
            return number
    kinds.append(kind)
    return len(kinds) - 1


def _is_full(key: str, value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.shape == shape and (value.dim() > 0 or key != "step")


def _local(name: str, value: Any, part: Any, by_handle: dict[ParamHandle, dict[str, Any]]) -> Any:
    """One entry of the state of a segment."""
    buffer: FlatBuffer = part.buffer
    handles = [buffer.handles[slot] for slot in part.slots]
    if not _is_full(name, value, handles[0].placeholder.shape):
        if not isinstance(value, Tensor):
            return value
        # torch has brought the step of a fused kernel to the model's device; this may be the host
        is_elsewhere = value.device.type not in ("cpu", part.param.device.type)
        return value.detach().to(part.param.device if is_elsewhere else value.device, copy=True)
    dtype = buffer.master_dtype if value.is_floating_point() else value.dtype
    local = torch.zeros(part.stop - part.start, dtype=dtype, device=part.param.device)
    pieces = own_slot_pieces(buffer)
    for handle in handles:
        start, stop = pieces[handle.index]
        where = buffer.own_range(handle)
        source = by_handle[handle][name]
        mine = local[start - part.start : stop - part.start]
        if isinstance(source, PieceReader):
            source.read_piece(handle.stride, where, mine)
        else:
            mine.copy_(buffer.flatten(handle, source.detach())[where.start : where.stop])
    return local
