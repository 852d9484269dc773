"""The driver that steps shards behind a user's optimizer.

It owns the *segments*, pieces of this rank's shards that the optimizer steps as its parameters, and
their state, both in an *inner* optimizer of the user's class. A step of what is in memory is run by
the user's own object, whose groups and state are those of the segments meanwhile
([Note: what becomes of the user's optimizer]); offloaded segments are stepped by the inner one
([Note: the offloaded step]).
"""

from __future__ import annotations

import contextlib
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.engine.buffer import FlatBuffer, ParamHandle
from lightning_zero.engine.driven import DRIVER, bound_step, drive, driver_of, overrides
from lightning_zero.engine.guard import handle_of
from lightning_zero.engine.optimizer_state import import_state
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
from lightning_zero.engine.user_state import UserState
from lightning_zero.offload.host import HostMemory

if TYPE_CHECKING:
    from lightning_zero.engine.engine import ZeroEngine

_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class OptimizerDriver:
    """Steps the shards that belong to one optimizer.

    Args:
        user: the user's optimizer; its class is replaced until :meth:`close`.
        engine: the engine that holds the parameters.
    """

    def __init__(self, user: Optimizer, engine: ZeroEngine) -> None:
        self.user, self.engine = user, engine
        self.plain_class = type(user)
        self._is_torchs = self.plain_class.__module__.startswith("torch.optim")
        self._calls_closure_first = self._is_torchs  # of others, as in their last step
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
        initial = dict(user.state)
        self._build()
        import_state(self, initial)
        self.state = UserState(self)
        drive(user, self)

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
                    slot if self._stands_alone(buffer, handle) else None,
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

    def _stands_alone(self, buffer: FlatBuffer, handle: ParamHandle) -> bool:
        """Whether a parameter must not be joined with its neighbours: kernels may round the last
        few elements of a tensor differently, and optimizers that are not torch's may remember which
        tensors they were given, and keep anything for each.
        """
        is_fused = bool(self.user.param_groups[self.handles[handle]].get("fused"))
        is_rounded = buffer.shard.dtype not in (torch.float32, torch.float64)
        return is_fused or is_rounded or not self._is_torchs

    @staticmethod
    def _lacks_master(buffer: FlatBuffer) -> bool:
        """Parameters that were frozen have no master weights before they are trained."""
        return buffer.shard.dtype != buffer.master_dtype and any(
            handle.param.requires_grad for handle in buffer.handles
        )

    def handle_of(self, param: Tensor) -> ParamHandle | None:
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

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """One step of the shards, with the arguments of the user's ``step``.

        Collective: the first use of the updated weights waits for the other ranks.
        """
        if self._is_closed:
            raise RuntimeError(
                "The run in which this optimizer was sharded has ended, so it can not step any"
                " more. Start another run with `trainer.fit`, or make a new optimizer over the"
                " module's parameters."
            )
        closure = args[0] if args else kwargs.get("closure")
        if self._offloaded is not None and inspect.isfunction(self.plain_class.step):
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._step_elsewhere({k: v for k, v in kwargs.items() if k != "closure"})
            return loss
        return self._step_here(closure, args, kwargs)

    def _step_elsewhere(self, kwargs: Any) -> None:
        assert self._offloaded is not None
        active, stepped = self._prepare()
        self.publish()
        is_delayed = self._offloaded.start(active, kwargs)
        self._due = {handle.buffer: None for handle in stepped if is_delayed}
        self.engine.after_step(stepped, is_published=not is_delayed)

    def _step_here(
        self, closure: Callable[[], Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the user's own step on its object, whose parameters are the segments meanwhile."""
        self.state.take_replaced()
        active: list[Segment] = []
        stepped: list[ParamHandle] | None = None
        was_called = False
        with contextlib.ExitStack() as swapped:

            def prepare() -> None:
                nonlocal stepped
                self._drop_gradients()
                active[:], stepped = self._prepare()
                self._attach_gradients(active)
                swapped.enter_context(self._as_segments())

            def run_closure() -> Any:
                nonlocal was_called
                self._check_unchanged(versions)
                was_called = True
                swapped.close()
                assert closure is not None
                with torch.enable_grad():
                    loss = closure()
                prepare()
                return loss

            if closure is not None:
                args, kwargs = _with_closure(run_closure, args, kwargs)
            if closure is None or not self._calls_closure_first:
                prepare()
            else:  # its backward brings the gradients that are stepped
                swapped.enter_context(self._as_segments())
            versions = self._versions()
            try:
                result = bound_step(self.plain_class, self.user)(*args, **kwargs)
                dropped = [segment for segment in active if segment.param.grad is None]
            finally:
                self._drop_gradients()
        if (
            closure is not None
            and not self._is_torchs
            and inspect.isfunction(self.plain_class.step)
        ):
            self._note_closure(stepped is not None, was_called=was_called)
        if stepped is None:
            return result  # it has not called its closure
        self.engine.after_step(stepped)
        if active and len(dropped) == len(active):  # the step has ended with `zero_grad`
            self.engine.grads.zero(self.handles, set_to_none=True)
        return result

    def _drop_gradients(self) -> None:
        for segment in self.segments:
            segment.param.grad = None

    def _versions(self) -> list[int]:
        """How often the weights were changed; torch's own optimizers call the closure first."""
        return [] if self._is_torchs else [s.param._version for s in self.segments]

    def _check_unchanged(self, versions: list[int]) -> None:
        if self._versions() != versions:
            raise NotImplementedError(
                f"The optimizer {self.plain_class.__name__} changes weights before it calls its"
                " closure, or calls it again. Sharded weights reach the module once in a step: step"
                " without a closure (manual optimization), or train with strategy='ddp'."
            )

    def _note_closure(self, had_gradients: bool, *, was_called: bool) -> None:
        if not had_gradients:
            raise RuntimeError(
                f"`step` of {self.plain_class.__name__} has called its closure in earlier steps and"
                " has not in this one, so it has had no gradients. Call it in every step."
            )
        self._calls_closure_first = was_called

    def _prepare(self) -> tuple[list[Segment], list[ParamHandle]]:
        """Have gradients, groups and state as they are to be stepped. Collective.

        Returns the segments with gradients and the parameters that some rank will update; those are
        the same on all ranks.
        """
        self.engine.before_step()
        self.state.flush()
        self.refresh()
        active, stepped = self._active_segments(), self._stepped_handles()
        self.state.view.invalidate()
        return active, stepped

    @contextlib.contextmanager
    def _as_segments(self) -> Iterator[None]:
        """Inside, the user's object is a plain optimizer of the segments and of their state."""
        user = self.user
        params = [group["params"] for group in user.param_groups]
        hidden = {key: user.__dict__[key] for key in _STEP_HOOKS if key in user.__dict__}
        driven_class, groups = type(user), list(user.param_groups)
        for group, inner in zip(groups, self.inner.param_groups, strict=True):
            group["params"] = inner["params"]
        user.__dict__.update({key: OrderedDict() for key in _STEP_HOOKS}, state=self.inner.state)
        user.__class__ = self.plain_class
        try:
            yield
        finally:
            user.__class__ = driven_class
            self.inner.state = user.state
            user.__dict__.update(hidden, state=self.state.view)
            for group, own in zip(groups, params, strict=True):
                group["params"] = own

    def publish(self) -> None:
        """Bring an update that is delayed to the model weights. Collective."""
        if self._offloaded is not None:
            self._offloaded.publish()
            buffers, self._due = self._due, {}
            self.engine.weights.start_refresh(buffers)

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

    def attributes(self) -> dict[str, Any]:
        """What the user's class keeps on the object, besides groups, state and hooks."""
        return _own_attributes(self.user)

    def sync_back(self) -> None:
        """Take over what a step of the inner optimizer has changed in it and in its groups."""
        self.user.__dict__.update(_own_attributes(self.inner))
        for inner, group in zip(self.inner.param_groups, self.user.param_groups, strict=True):
            group.update({key: value for key, value in inner.items() if key != "params"})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero the gradients of this optimizer's parameters, by the user's own method if
        the class has one: it looks at every gradient, which gathers them (collective).
        """
        if overrides(self.plain_class, "zero_grad"):
            self.plain_class.zero_grad(self.user, set_to_none)
            return
        self.refresh()
        self.engine.grads.zero(self.handles, set_to_none=set_to_none)
        for group in self.user.param_groups:
            for param in group["params"]:
                if handle_of(param) is None and param.grad is not None:
                    param.grad = None if set_to_none else torch.zeros_like(param.grad)

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add a group of parameters, e.g. after unfreezing them."""
        self.state.flush()
        self.plain_class.add_param_group(self.user, group)
        self._build()

    def refresh(self) -> None:
        """Have segments for what is in the user's groups now."""
        lacks_master = any(map(self._lacks_master, self.buffers))
        if lacks_master or self._signature != self._current_signature():
            self._build()

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
            for v in (state.values() if isinstance(state, dict) else (state,))
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


def release_optimizer(optimizer: Optimizer) -> None:
    """Make an optimizer that an earlier run has driven a plain one again, with its full state.
    Collective if it was driven.
    """
    driver = driver_of(optimizer)
    if driver is not None:
        state = driver.state.plain()
        optimizer.__dict__.pop(DRIVER)
        if "_step_supports_amp_scaling" in driver.inner.__dict__:
            optimizer.__dict__["_step_supports_amp_scaling"] = True
        optimizer.__class__ = driver.plain_class
        optimizer.state = state


def _own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """What a user's class keeps on its objects, besides groups, state and hooks."""
    return {
        key: value
        for key, value in optimizer.__dict__.items()
        if key not in ("state", "param_groups", "step", DRIVER)
        and not key.startswith("_optimizer_")
        and key != "_step_supports_amp_scaling"
    }


def _with_closure(
    closure: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a step with another closure."""
    return ((closure, *args[1:]), kwargs) if args else ((), {**kwargs, "closure": closure})
