"""The user's optimizer, stepping shards.

[Note: what becomes of the user's optimizer] The object, its ``param_groups`` with the module's own
parameters, its type and its schedulers stay. Its class becomes a subclass whose ``step``,
``zero_grad``, ``add_param_group``, ``state_dict`` and ``load_state_dict`` talk to an
:class:`OptimizerDriver`. The driver owns an *inner* optimizer of the original class, with the same
attributes, whose parameters are segments of this rank's shards. Before a step the hyper-parameters
of the groups are copied to the inner groups, and what the step changed in them is copied back.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.engine.buffer import FlatBuffer, ParamHandle
from lightning_zero.engine.guard import handle_of
from lightning_zero.engine.optimizer_state import export_state, import_state
from lightning_zero.engine.resting_state import RestingState
from lightning_zero.engine.segments import (
    Segment,
    cut_state,
    is_per_element,
    make_segment,
    own_slot_pieces,
    runs,
)
from lightning_zero.engine.stepping import OffloadedStep
from lightning_zero.offload.host import HostMemory

if TYPE_CHECKING:
    from lightning_zero.engine.engine import ZeroEngine

_DRIVER = "_zero_driver"
_classes: dict[type, type] = {}


class OptimizerDriver:
    """Steps the shards that belong to one optimizer.

    Args:
        user: the user's optimizer; its class is replaced until :meth:`close`.
        engine: the engine that holds the parameters.
    """

    def __init__(self, user: Optimizer, engine: ZeroEngine) -> None:
        self.user, self.engine = user, engine
        self.plain_class = type(user)
        self.segments: list[Segment] = []
        self.handles: dict[ParamHandle, int] = {}
        self._by_param: dict[int, ParamHandle] = {}
        self.buffers: list[FlatBuffer] = []
        self._is_closed = False
        self.inner = inner_optimizer(user)
        self._offloaded: OffloadedStep | None = None
        self.resting_state: RestingState | None = None
        self._due: dict[FlatBuffer, None] = {}  # delayed updates; the same on all ranks
        offload = engine.offload
        if offload is not None:
            self._offloaded = OffloadedStep(self, offload)
            if offload.states is not None and not isinstance(offload.states, HostMemory):
                self.resting_state = RestingState(self.inner.state, offload.states)
        self._signature: list[list[int]] = []
        initial = {cast(nn.Parameter, p): state for p, state in user.state.items() if state}
        user.state = defaultdict(dict)
        self._build()
        if initial:
            import_state(self, initial)
        user.__dict__.pop("step", None)  # schedulers wrap it; ours tells them itself
        # gradients are unscaled here, never by a fused kernel
        user.__dict__.pop("_step_supports_amp_scaling", None)
        user.__dict__[_DRIVER] = self
        user.__class__ = _driven_class(self.plain_class)

    # -- building

    def _build(self) -> None:
        """(Re)build the segments from the user's groups, keeping the state of what was there."""
        self.wait()
        old = [(segment, self.inner.state.pop(segment.param, {})) for segment in self.segments]
        self.segments, self.handles = [], {}
        foreign: list[list[Any]] = []
        for index, group in enumerate(self.user.param_groups):
            found = [(param, handle_of(param)) for param in group["params"]]
            self.handles.update({entry[0]: index for _, entry in found if entry is not None})
            self._by_param.update(
                {id(param): entry[0] for param, entry in found if entry is not None}
            )
            # parameters that are not the module's (Lightning's mock optimizer has one) are stepped
            # as they are
            foreign.append([param for param, entry in found if entry is None])
        origin = {
            (seg.buffer, slot): (seg, state) for seg, state in old if state for slot in seg.slots
        }
        self.buffers = list({handle.buffer: None for handle in self.handles})
        for buffer in self.buffers:
            if self._lacks_master(buffer):
                buffer.make_master()
            buffer.settle()
            pieces = own_slot_pieces(buffer)
            keys = {
                slot: (
                    self.handles[handle],
                    id(origin.get((buffer, slot), (None,))[0]),
                    slot if self._rounds_by_position(buffer, handle) else None,
                )
                for slot, handle in enumerate(buffer.handles)
                if handle in self.handles and slot in pieces
            }
            for run in runs(keys, keys):
                segment = make_segment(keys[run[0]][0], buffer, run, pieces)
                self.segments.append(segment)
                if (buffer, run[0]) in origin:
                    whole, state = origin[buffer, run[0]]
                    self.inner.state[segment.param] = cut_state(
                        state, whole, segment.start, segment.stop
                    )
        self.inner.param_groups = [
            {
                **group,
                "params": [s.param for s in self.segments if s.group == index] + foreign[index],
            }
            for index, group in enumerate(self.user.param_groups)
        ]
        self._signature = self._current_signature()

    def _rounds_by_position(self, buffer: FlatBuffer, handle: ParamHandle) -> bool:
        """Whether kernels round the last few elements of a tensor differently, so that parameters
        must not be joined.
        """
        is_fused = bool(self.user.param_groups[self.handles[handle]].get("fused"))
        return is_fused or buffer.shard.dtype not in (torch.float32, torch.float64)

    @staticmethod
    def _lacks_master(buffer: FlatBuffer) -> bool:
        """Parameters that were frozen have no master weights before they are trained."""
        return buffer.shard.dtype != buffer.master_dtype and any(
            handle.param.requires_grad for handle in buffer.handles
        )

    def handle_of(self, param: nn.Parameter) -> ParamHandle | None:
        """The handle of one of the optimizer's parameters; None if it is not the module's."""
        return self._by_param.get(id(param))

    def _current_signature(self) -> list[list[int]]:
        return [[id(param) for param in group["params"]] for group in self.user.param_groups]

    def split(self, segment: Segment, parts: Iterable[list[int]]) -> list[Segment]:
        """Cut a segment into runs of its slots, and its state with it."""
        self.wait()
        state = self.inner.state.pop(segment.param, {})
        pieces = own_slot_pieces(segment.buffer)
        new = [make_segment(segment.group, segment.buffer, slots, pieces) for slots in parts]
        for part in new:
            if state:
                self.inner.state[part.param] = cut_state(state, segment, part.start, part.stop)
        at = self.segments.index(segment)
        self.segments[at : at + 1] = new
        params = self.inner.param_groups[segment.group]["params"]
        at = next(i for i, param in enumerate(params) if param is segment.param)
        params[at : at + 1] = [part.param for part in new]
        return new

    # -- what the user's optimizer does

    def step(self, closure: Callable[[], Any] | None, **kwargs: Any) -> Any:
        """One step of the shards.

        Collective: the first use of the updated weights waits for the other ranks.
        """
        if self._is_closed:
            raise RuntimeError(
                "The run in which this optimizer was sharded has ended, so it can not step any"
                " more. Start another run with `trainer.fit`, or make a new optimizer over the"
                " module's parameters."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.engine.before_step()
        self._refresh()
        active, stepped = self._active_segments(), self._stepped_handles()
        is_delayed = False
        if self._offloaded is None:
            self._step_in_place(active, kwargs)
        else:
            self.publish()
            is_delayed = self._offloaded.start(active, kwargs)
            self._due = {handle.buffer: None for handle in stepped if is_delayed}
        self.engine.after_step(stepped, is_published=not is_delayed)
        return loss

    def publish(self) -> None:
        """Bring an update that is delayed to the model weights. Collective."""
        if self._offloaded is not None:
            self._offloaded.publish()
            buffers, self._due = self._due, {}
            self.engine.weights.start_refresh(buffers)

    def _step_in_place(self, active: list[Segment], kwargs: Any) -> None:
        try:
            self._attach_gradients(active)
            self._sync_groups()
            self.inner.step(**kwargs)
            self.sync_groups_back()
        finally:
            for segment in self.segments:
                segment.param.grad = None

    def _active_segments(self) -> list[Segment]:
        """The segments whose parameters have gradients."""
        active: list[Segment] = []
        for segment in list(self.segments):
            bucket = self.engine.grads.buckets[segment.buffer]
            flags = {slot: bucket.has_grad[slot] for slot in segment.slots}
            parts = [segment]
            if len(set(flags.values())) > 1:
                parts = self.split(segment, runs(segment.slots, flags))
            active += [part for part in parts if flags[part.slots[0]]]
        return active

    def _attach_gradients(self, active: list[Segment]) -> None:
        """Give segments their pieces of the gradient shards."""
        factor = self.engine.grads.take_scale(self.handles)
        for segment in active:
            with self.engine.grads.buckets[segment.buffer].shard_or_new().use(write=True) as shard:
                grad = shard[segment.start : segment.stop]
            if factor is not None:
                grad.mul_(factor)
            segment.param.grad = grad

    def _stepped_handles(self) -> list[ParamHandle]:
        """The parameters that some rank has updated; the same on all ranks."""
        buckets = self.engine.grads.buckets
        return [handle for handle in self.handles if buckets[handle.buffer].has_grad[handle.index]]

    def _sync_groups(self) -> None:
        for inner, group in zip(self.inner.param_groups, self.user.param_groups, strict=True):
            inner.update({key: value for key, value in group.items() if key != "params"})

    def sync_groups_back(self) -> None:
        """Take over what a step has changed in the groups."""
        for inner, group in zip(self.inner.param_groups, self.user.param_groups, strict=True):
            group.update({key: value for key, value in inner.items() if key != "params"})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero the gradients of this optimizer's parameters."""
        self._refresh()
        self.engine.grads.zero(self.handles, set_to_none=set_to_none)
        for group in self.user.param_groups:
            for param in group["params"]:
                if handle_of(param) is None and param.grad is not None:
                    param.grad = None if set_to_none else torch.zeros_like(param.grad)

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add a group of parameters, e.g. after unfreezing them."""
        self.plain_class.add_param_group(self.user, group)
        self._build()

    def _refresh(self) -> None:
        lacks_master = any(map(self._lacks_master, self.buffers))
        if lacks_master or self._signature != self._current_signature():
            self._build()

    def state_dict(self) -> dict[str, Any]:
        """The full state in the optimizer's ordinary format, on every rank. Collective."""
        return export_state(self, is_wanted=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's part of a full state in the optimizer's ordinary format."""
        groups, saved = self.user.param_groups, state_dict["param_groups"]
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in saved]:
            raise ValueError(
                f"The loaded optimizer state has parameter groups of"
                f" {[len(g['params']) for g in saved]} parameters,"
                f" the optimizer has {[len(g['params']) for g in groups]}."
            )
        state = {}
        for group, loaded in zip(groups, saved, strict=True):
            for param, index in zip(group["params"], loaded["params"], strict=True):
                if index in state_dict["state"]:
                    state[param] = state_dict["state"][index]
            group.update({key: value for key, value in loaded.items() if key != "params"})
        self._refresh()
        self.wait()
        self.inner.state.clear()
        if self.resting_state is not None:
            self.resting_state.forget()
        import_state(self, state)
        self._sync_groups()

    # -- the rest

    def wait(self) -> None:
        """Wait for steps in the background, which use segments and state."""
        if self.engine.offload is not None:
            self.engine.offload.runner.wait()

    @contextlib.contextmanager
    def state_of(self, buffer: FlatBuffer, *, write: bool = False) -> Iterator[None]:
        """Inside, the state of a buffer's segments is in memory; ``write``: to be changed."""
        self.wait()
        if self.resting_state is None:
            yield
            return
        self.resting_state.load(buffer, self.segments_of(buffer))
        try:
            yield
        finally:  # the buffer may have been cut into other segments
            self.resting_state.store(buffer, self.segments_of(buffer), is_changed=write)

    def state_bytes(self) -> int:
        """Bytes of the optimizer's state of this rank, wherever it rests."""
        self.wait()
        tensors = [
            v
            for state in self.inner.state.values()
            for v in state.values()
            if isinstance(v, Tensor)
        ]
        return sum(t.numel() * t.element_size() for t in tensors)

    def close(self, *, keeps_state: bool) -> None:
        """Let go of the shards.

        The state stays and can still be saved, but no step is possible any more. State that rests
        in files is read into memory if ``keeps_state``, and lost otherwise.
        """
        self._is_closed = True
        if keeps_state:
            self.bring_back_state()
        for segment in self.segments:
            segment.param.grad = None
            segment.param.data = segment.param.new_empty(0)

    def segments_of(self, buffer: FlatBuffer) -> list[Segment]:
        """The segments that lie in a flat buffer."""
        return [segment for segment in self.segments if segment.buffer is buffer]

    def bring_back_state(self) -> None:
        """Have all state in memory of its own, where the segments are."""
        resting = self.resting_state
        if resting is None:
            return
        for buffer in self.buffers:
            segments = self.segments_of(buffer)
            with self.state_of(buffer):
                copies = {
                    segment: {
                        key: value.to(segment.param.device, copy=True)
                        for key, value in self.inner.state.get(segment.param, {}).items()
                        if is_per_element(value, segment)
                    }
                    for segment in segments
                }
            for segment, entries in copies.items():
                if entries:
                    self.inner.state[segment.param].update(entries)
        self.resting_state = None
        resting.forget()


def inner_optimizer(user: Optimizer) -> Optimizer:
    """An optimizer of the same class and attributes, without parameters, state and hooks."""
    inner: Optimizer = object.__new__(type(user))
    inner.__dict__.update({key: value for key, value in user.__dict__.items() if key != "step"})
    for key, value in user.__dict__.items():
        if key.startswith("_optimizer_") and isinstance(value, OrderedDict):
            inner.__dict__[key] = OrderedDict()
    inner.state = defaultdict(dict)
    inner.param_groups = []
    return inner


def driver_of(optimizer: Any) -> OptimizerDriver | None:
    """The driver of an optimizer, or of Lightning's wrapper around it."""
    return getattr(optimizer, _DRIVER, None)


def _driven_class(plain: type) -> type:
    if plain not in _classes:
        _classes[plain] = type(
            plain.__name__,
            (_Driven, plain),
            {"__module__": plain.__module__, "__qualname__": plain.__qualname__},
        )
    return _classes[plain]


class _Driven:
    """Overrides of a driven optimizer.

    ``self`` may be Lightning's wrapper, which passes attribute reads on.
    """

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        driver: OptimizerDriver = getattr(self, _DRIVER)
        user = driver.user
        user._opt_called = True  # type: ignore[attr-defined]  # LRScheduler looks for it
        for hook in list(user._optimizer_step_pre_hooks.values()):
            hook(user, (closure,), kwargs)
        loss = driver.step(closure, **kwargs)
        for hook in list(user._optimizer_step_post_hooks.values()):
            hook(user, (closure,), kwargs)
        return loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        getattr(self, _DRIVER).zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        getattr(self, _DRIVER).add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = getattr(self, _DRIVER).state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        getattr(self, _DRIVER).load_state_dict(state_dict)


def release_optimizer(optimizer: Optimizer) -> None:
    """Make an optimizer that an earlier run has driven a plain one again, with its full state.
    Collective if it was driven.
    """
    driver = driver_of(optimizer)
    if driver is not None:
        state = driver.state_dict()
        optimizer.__dict__.pop(_DRIVER)
        if "_step_supports_amp_scaling" in driver.inner.__dict__:
            optimizer.__dict__["_step_supports_amp_scaling"] = True
        optimizer.__class__ = driver.plain_class
        optimizer.load_state_dict(state)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """All parameters of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]
