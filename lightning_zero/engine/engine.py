"""The engine: everything that the strategy asks for, in terms of tensors."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_zero.comm.collectives import Collectives
from lightning_zero.config import PrecisionPolicy, ZeroConfig
from lightning_zero.engine import clip, guard
from lightning_zero.engine.access import EngineAccess
from lightning_zero.engine.buffer import FlatBuffer, ParamHandle
from lightning_zero.engine.calls import ModuleCalls
from lightning_zero.engine.checks import check_aliases, check_module
from lightning_zero.engine.dtypes import ParamDtypes, param_dtypes
from lightning_zero.engine.ending import Progress, close_units, give_up, recover
from lightning_zero.engine.full_params import held
from lightning_zero.engine.grads import GradReducer
from lightning_zero.engine.hooks import GradHook, attach_grad_hooks, attach_module_hooks
from lightning_zero.engine.local_grads import in_backward, refuse_step_in_backward
from lightning_zero.engine.offload import Offload
from lightning_zero.engine.optimizer import OptimizerDriver
from lightning_zero.engine.placement import Placement, placements_of
from lightning_zero.engine.saved_tensors import SavedTensors
from lightning_zero.engine.serving import Serving
from lightning_zero.engine.units import MAX_UNIT_BYTES, UnitPhase, ZeroUnit, plan_units
from lightning_zero.engine.weights import ReplicatedWeights, ShardedWeights, Weights

_engines: weakref.WeakValueDictionary[EngineAccess, ZeroEngine] = weakref.WeakValueDictionary()


def engine_of(module: nn.Module) -> ZeroEngine | None:
    """The engine that holds the parameters of a module; None if they are not sharded."""
    for param in module.parameters():
        entry = guard.handle_of(param)
        if entry is not None and isinstance(entry[1], EngineAccess):
            return _engines.get(entry[1])
    return None


def _offloads_weights(offload: Offload | None) -> bool:
    return offload is not None and offload.params is not None


class _Kind(NamedTuple):
    """Parameters of one unit that agree in these share a flat buffer."""

    dtypes: ParamDtypes
    initial_dtype: torch.dtype
    requires_grad: bool


class ZeroEngine:
    """Shards a module and its optimizers over the ranks of ``collectives``.

    Building is collective: rank 0's weights and buffers are sent to all ranks. The optimizers
    become drivers of shards in place. :meth:`close` gives everything back.

    Args:
        module: the module, with full parameters anywhere and everything else on ``device``.
        optimizers: the optimizers over its parameters; may be empty (evaluation).
        config: what the user chose.
        collectives: the ranks.
        device: where the model is computed.
        policy: the dtypes of weights and gradients; as they are by default.
        call_context: makes what a module call outside of a step needs (autocast); None: nothing.
        offload: where shards rest; the engine closes it. None: in the device's memory.
    """

    def __init__(  # noqa: PLR0913
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        config: ZeroConfig,
        collectives: Collectives,
        device: torch.device,
        policy: PrecisionPolicy | None = None,
        call_context: Callable[[], AbstractContextManager[Any]] | None = None,
        offload: Offload | None = None,
    ) -> None:
        policy = policy or PrecisionPolicy()
        self.module, self.config, self.collectives = module, config, collectives
        self.device, self.offload = device, offload
        self.placements = placements_of(
            config.stage, collectives.world_size, offloads_weights=_offloads_weights(offload)
        )
        check_module(module)
        if optimizers:  # without, nothing is written
            check_aliases(module, device)
        self.progress = Progress()
        built: list[FlatBuffer] = []
        try:
            self.units = self._build_units(optimizers, param_dtypes(module, policy), built)
        except BaseException:
            give_up(built)
            raise
        self.buffers = [buffer for unit in self.units for buffer in unit.buffers]
        self.handles = [handle for unit in self.units for handle in unit.handles]
        self._unit_of = {handle: unit for unit in self.units for handle in unit.handles}
        self.grads = GradReducer(self.buffers, collectives, self.placements.grad, policy.grad_dtype)
        self.weights = self._place_weights()
        self.calls = ModuleCalls(call_context, self.device.type)
        self.access = EngineAccess(self.weights, self.grads, self.calls, self.handles, collectives)
        read_master = functools.partial(self.weights.read, is_rounded=False)
        self.access.serving = Serving(self.handles, collectives, read_master)
        for handle in self.handles:
            guard.register(handle, self.access)
        _engines[self.access] = self
        self.drivers = [OptimizerDriver(optimizer, self) for optimizer in optimizers]
        for unit in self.units:
            unit.guard()
        by_param = {handle.param: unit for handle, unit in self._unit_of.items()}
        is_sharded = self.placements.weight is Placement.SHARDED
        self.saved = SavedTensors(self) if is_sharded else None
        self.is_closed = False
        self._hooks = attach_module_hooks(module, self, by_param)
        self._grad_hooks: dict[ParamHandle, GradHook] = {}
        self._backward_is_open = False
        self._peek_is_open = False
        self._buffers_are_due = True
        self.last_grad_norm: Tensor | None = None
        self.sync_buffers()

    # -- building

    def _build_units(
        self,
        optimizers: Sequence[Optimizer],
        dtypes: Mapping[nn.Parameter, ParamDtypes],
        built: list[FlatBuffer],
    ) -> list[ZeroUnit]:
        group_of = {
            param: (i, j)
            for i, optimizer in enumerate(optimizers)
            for j, group in enumerate(optimizer.param_groups)
            for param in group["params"]
        }
        units = []
        max_bytes = MAX_UNIT_BYTES if self.offload is None else self.offload.max_unit_bytes
        for index, plan in enumerate(
            plan_units(self.module, self.config.bucket_bytes, self.config.unit_classes, max_bytes)
        ):
            kinds: dict[_Kind, list[tuple[str, nn.Parameter]]] = defaultdict(list)
            for fqn, param in plan.params.items():
                kind = _Kind(dtypes[param], param.dtype, param.requires_grad)
                kinds[kind].append((fqn, param))
            buffers = []
            for kind, members in kinds.items():
                # neighbours of one optimizer group are stepped as one tensor
                members.sort(key=lambda member: group_of.get(member[1], (-1, -1)))
                handles = [
                    ParamHandle(param, fqn, kind.dtypes.model, self.device)
                    for fqn, param in members
                ]
                buffer = FlatBuffer(
                    len(built),
                    plan.name,
                    handles,
                    kind.dtypes,
                    self.device,
                    self.collectives,
                    self.offload,
                )
                built.append(buffer)
                self._place(buffer)
                buffers.append(buffer)
            units.append(ZeroUnit(index, plan.name, buffers))
        return units

    def _place(self, buffer: FlatBuffer) -> None:
        """Leave a new buffer what it has at rest, before the next one is made."""
        if self.placements.weight is Placement.SHARDED:
            buffer.detach_shard()
            buffer.free()
        else:
            buffer.settle()

    def _place_weights(self) -> Weights:
        if self.placements.weight is Placement.SHARDED:
            return ShardedWeights(self.units, self.config.window_bytes)
        return ReplicatedWeights(self.units)

    # -- forward

    @contextlib.contextmanager
    def step_scope(self, *, is_training: bool) -> Iterator[None]:
        """Wraps a training, validation, test or predict step.

        Nothing stays gathered after an evaluation step.
        """
        self.meet(is_last=True)
        if not is_training:
            self.publish_delayed()
        else:  # `loss.backward()` is not announced
            attach_grad_hooks(self, self._grad_hooks)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.calls.step())
            if self.saved is not None:
                self.saved.reset()
                stack.callback(self.saved.reset)
            yield
        if not is_training:
            self.release_weights()

    def unit_of(self, handle: ParamHandle) -> ZeroUnit | None:
        """The unit of a parameter; None if another engine holds it."""
        return self._unit_of.get(handle)

    def enter(self, unit: ZeroUnit) -> None:
        """A module call that uses ``unit`` begins."""
        self.access.flush()
        is_in_backward = in_backward()
        is_outermost = not unit.pins
        self.weights.enter(unit, UnitPhase.BACKWARD if is_in_backward else UnitPhase.FORWARD)
        if is_outermost and is_in_backward:
            unit.is_recomputed = True
        elif is_outermost:
            unit.num_calls += 1

    def need_in_backward(self, unit: ZeroUnit) -> None:
        """A tensor of a gathered unit is needed by a node of the backward."""
        if not self._backward_is_open and not self._peek_is_open and in_backward():
            self._peek_is_open = (
                True  # torch.autograd.grad: no gradients of parameters, but weights to release
            )
            torch.autograd.Variable._execution_engine.queue_callback(self._close_peek)
        self.weights.need(unit, UnitPhase.BACKWARD)

    def _close_peek(self) -> None:
        self._peek_is_open = False
        if not self._backward_is_open:
            for unit in self.units:
                self.weights.done(unit)

    # -- backward

    def begin_backward(self, loss_scale: float = 1.0) -> None:
        """A backward begins, of a loss that was multiplied by ``loss_scale``; every rank."""
        if self._backward_is_open:
            return
        self._backward_is_open = self.progress.is_in_backward = True
        self.progress.backwards += 1
        attach_grad_hooks(self, self._grad_hooks)
        with torch._C.DisableTorchFunctionSubclass():
            self.grads.local.begin_backward(self._grad_hooks, loss_scale)
            self.grads.begin_backward(loss_scale)

    def on_gradient(self, handle: ParamHandle) -> None:
        """Autograd has accumulated the gradient of a parameter."""
        if not self._backward_is_open:  # `loss.backward()` without the strategy
            self.begin_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            if self.grads.local.is_accumulating(handle):
                self.access.flush()
            unit = self._unit_of[handle]
            # a unit that was called several times and is recomputed gets its gradients in parts
            is_final = not unit.is_recomputed or unit.num_calls <= 1
            grad = self.grads.local.take(handle, is_final=is_final)
            if grad is None:
                self.grads.arrive(handle, is_final=is_final)
            else:
                self.grads.add(handle, grad, is_final=is_final)
            buckets = map(self.grads.buckets.__getitem__, unit.buffers)
            has_arrived = all(bucket.arrived >= bucket.expected for bucket in buckets)
            if has_arrived and not unit.has_frozen:
                self.weights.done(unit)

    def end_backward(self) -> None:
        """A backward has ended: reduce what is left and release the weights. Collective."""
        if not self._backward_is_open:
            return
        self._backward_is_open = False
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self.grads.local.end_backward()
            self.grads.end_backward()
        self.progress.is_in_backward = False
        self.release_weights(drops_graphs=False)  # another backward of the same graph may follow

    def release_weights(self, *, drops_graphs: bool = True) -> None:
        """Nothing stays gathered that nobody holds."""
        self.access.flush()
        for unit in self.units if drops_graphs else ():
            unit.is_in_graph = False
        self.weights.release_all()
        for unit in self.units:
            unit.num_calls, unit.is_recomputed = 0, False

    # -- step

    @torch.no_grad()
    def before_step(self) -> None:
        """Bring everything that a step needs into the shards. Collective."""
        if any(unit.num_holds for unit in self.units):
            raise RuntimeError(
                "An optimizer step inside `full_params(...)` is not possible: leave it first."
            )
        refuse_step_in_backward()
        self.meet(is_last=True)
        self.end_backward()
        self.grads.reduce_postponed()
        self.grads.wait()
        self.grads.write_back()
        self.release_weights()
        self.weights.finish_communication()
        self.progress.is_stepping = True

    def after_step(self, handles: Collection[ParamHandle], *, is_published: bool = True) -> None:
        """The shards of these parameters have been updated on some rank, or are being; every rank
        passes the same. ``is_published``: so are the model weights.
        """
        self.progress.steps, self.progress.is_stepping = self.progress.steps + 1, False
        self.access.mark_stale()
        self.grads.pending.difference_update(handles)
        with torch._C.DisableTorchFunctionSubclass():
            # as an in-place update of the parameter would: a graph from before the step must not be
            # used again
            torch.autograd.graph.increment_version([handle.param for handle in handles])
        if is_published:
            self.weights.start_refresh({handle.buffer: None for handle in handles})
            self.access.assigned.push(handles)
        self.access.complete_aliases()

    def grad_norm(self, driver: OptimizerDriver) -> Tensor:
        """The total 2-norm of the gradients of one optimizer; not finite if any of them is not.

        Collective, and the same on all ranks.
        """
        self.end_backward()
        self.grads.reduce_postponed()
        squares = self.grads.squares(driver.handles)
        doubles = (torch.float64, torch.complex128)
        is_double = any(handle.buffer.master_dtype in doubles for handle in driver.handles)
        return clip.total_norm(squares, is_double, self.collectives, self.device)

    def non_finite_gradients(self, driver: OptimizerDriver) -> list[str]:
        """The names of the parameters whose gradients hold inf or NaN. Collective."""
        mine = [
            handle.fqn
            for handle in driver.handles
            if not all(bool(r.isfinite().all()) for r in self.grads.regions({handle}))
        ]
        found = self.collectives.all_gather_object(mine, "the list of gradients with overflow")
        return sorted({name for names in found for name in names})

    def clip_by_norm(self, driver: OptimizerDriver, max_norm: float) -> Tensor:
        """Clip the gradients of one optimizer to a total 2-norm.

        Returns the norm before. Collective.
        """
        norm = self.grad_norm(driver)
        coefficient = clip.clip_coefficient(norm, max_norm)
        # on CUDA looking at it would make the host wait
        if coefficient.device.type != "cpu" or coefficient.item() != 1.0:
            self.grads.scale_later(driver.handles, coefficient)
        self.last_grad_norm = norm
        return norm

    def clip_by_value(self, driver: OptimizerDriver, limit: float) -> None:
        """Clamp the gradients of one optimizer. Every rank."""
        clip.clip_by_value(self.grads.regions(driver.handles, write=True), limit)

    def publish_delayed(self) -> None:
        """Bring updates that are delayed to the model weights. Collective."""
        for driver in self.drivers:
            driver.publish()

    # -- buffers

    @torch.no_grad()
    def sync_buffers(self) -> None:
        """Send rank 0's module buffers to all ranks, one message per dtype. Collective."""
        by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for tensor in self.module.buffers():
            if tensor.numel() and tensor.layout is torch.strided:
                by_dtype[tensor.dtype].append(tensor)
        for dtype, tensors in by_dtype.items():
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            self.collectives.broadcast(flat, f"the buffers of dtype {dtype}")
            if self.collectives.rank:
                for tensor, part in zip(
                    tensors, flat.split([t.numel() for t in tensors]), strict=True
                ):
                    tensor.copy_(part.view(tensor.shape))

    def sync_buffers_if_due(self) -> None:
        """As DDP does: before a forward, unless the last forward was one without gradient
        synchronization.
        """
        if self._buffers_are_due and self.config.broadcast_buffers:
            self.sync_buffers()

    def note_forward(self, *, synchronizes: bool) -> None:
        """A step's forward has ended; ``synchronizes``: with gradients and outside of an
        accumulation window.
        """
        self._buffers_are_due = synchronizes

    # -- saving

    @contextlib.contextmanager
    def sharded_state(self) -> Iterator[None]:
        """Inside, ``module.state_dict()`` holds the sharded parameters themselves. Until
        :meth:`meet` with ``is_last`` rank 0 may look at them alone.
        """
        self.access.flush()
        self.access.detaches_to_itself = True
        try:
            yield
        finally:
            self.access.detaches_to_itself = False
        if self.access.serving is not None and self.collectives.world_size > 1:
            self.access.serving.is_open = True

    def meet(self, *, is_last: bool = False) -> None:
        """Serve what hooks of rank 0 have looked at alone. Collective."""
        if self.access.serving is not None:
            self.access.serving.meet()
            self.access.serving.is_open &= not is_last

    @torch.no_grad()
    def full_values(
        self, handles: Collection[ParamHandle], *, is_wanted: bool
    ) -> dict[ParamHandle, Tensor]:
        """The full values of parameters on the CPU, on the ranks that want them. Collective; one
        flat buffer is gathered at a time.
        """
        self.access.flush()
        values: dict[ParamHandle, Tensor] = {}
        for buffer in self.buffers:
            wanted = [handle for handle in buffer.handles if handle in handles]
            if wanted:
                full = buffer.gather_values(buffer.shard)
                if is_wanted:
                    values.update({handle: full[handle].cpu().clone() for handle in wanted})
        return values

    # -- full parameters

    def full_params(self, module: nn.Module, *, write: bool) -> AbstractContextManager[None]:
        """See :func:`lightning_zero.full_params`. Collective."""
        entries = [guard.handle_of(param) for param in module.parameters()]
        handles = [entry[0] for entry in entries if entry is not None]
        units = list({self._unit_of[handle]: None for handle in handles})
        self.access.flush()
        phase = UnitPhase.BACKWARD if in_backward() else UnitPhase.FORWARD
        return held(self.weights, units, phase, handles if write else None)

    # -- the end

    def close(self, *, gather: bool) -> None:
        """Take everything off the module and give the parameters their full values. Collective if
        ``gather``.

        With ``gather=False`` nothing is communicated, and parameters whose values are not all here
        become unusable.
        """
        self.is_closed = True
        hooks: list[RemovableHandle | GradHook] = [*self._hooks, *self._grad_hooks.values()]
        for hook in hooks:
            hook.remove()
        self._hooks.clear()
        self._grad_hooks.clear()
        if self.saved is not None:
            self.saved.reset()
        try:
            close_units(self, gather=gather)
            self.grads.close()
            for driver in self.drivers:
                driver.close(keeps_state=gather)
        finally:
            if self.offload is not None:
                self.offload.close()

    def recover(self, *, keeps_gradients: bool) -> None:
        """See :func:`~lightning_zero.engine.ending.recover`. Collective."""
        recover(self, keeps_gradients=keeps_gradients)

    def forget_backward(self) -> None:
        """No backward is under way, and nothing is in use."""
        self._backward_is_open = self._peek_is_open = False
        self.release_weights()
