"""The step of an optimizer whose shards rest on offload devices, one flat buffer after the other.

[Note: the offloaded step] A thread of its own loads, steps and stores one flat buffer after the
other, in the order of the forward. While one is stepped the next ones are being read and those
before are being written and sent to the model's device. ``step()`` returns at once: what needs a
shard or its model weights waits for that buffer alone, so that the next forward begins on the first
units. An update sees the gradients and hyper-parameters of its own step, whatever is changed later.
Only optimizers of ``torch.optim`` are stepped behind the caller's back: others may change their
groups, and are waited for.

With the delayed update (ZeRO-Offload, section 5.2) model weights are one update behind: those of a
step are used from the step after the next forward and backward on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_zero.engine.buffer import FlatBuffer
from lightning_zero.engine.offload import Offload
from lightning_zero.engine.resting_state import RestingState
from lightning_zero.engine.segments import Segment
from lightning_zero.engine.shard import RestingShard, Shard
from lightning_zero.offload.host import HostMemory
from lightning_zero.pending import Pending

if TYPE_CHECKING:
    from lightning_zero.engine.optimizer import OptimizerDriver

_IN_FLIGHT = 3
"""Flat buffers that are being read, stepped or about to be stepped at the same time."""

_BUNDLE_BYTES = 8 << 20
"""Flat buffers of up to this together are stepped in one call of the optimizer where nothing has to
be read: a call takes a tenth of a millisecond, whatever it steps.
"""


@dataclass(eq=False)
class _Job:
    """The step of what one optimizer has in one flat buffer.

    Attributes:
        buffer: the buffer.
        segments: all segments of the optimizer in it.
        active: those with gradients.
        grad: the gradients.
        arrived: when they are in host memory.
        published: when the device has the new model weights.
    """

    buffer: FlatBuffer
    segments: list[Segment]
    active: list[Segment]
    grad: Shard
    arrived: Pending
    published: Pending = field(default_factory=Pending)


class OffloadedStep:
    """Steps the shards of one optimizer in the background.

    Args:
        driver: of the optimizer.
        offload: where its shards rest.
    """

    def __init__(self, driver: OptimizerDriver, offload: Offload) -> None:
        self._driver, self._offload = driver, offload
        self._is_torchs = driver.plain_class.__module__.startswith("torch.optim")
        self._unpublished: list[_Job] = []
        self._num_steps = 0

    def start(self, active: Sequence[Segment], kwargs: Any) -> bool:
        """Begin the step of the segments ``active``. Returns whether its update is delayed: then it
        reaches the model weights by :meth:`publish`.
        """
        delay_after = self._offload.delay_after
        is_delayed = delay_after is not None and self._num_steps >= delay_after
        self._num_steps += 1
        factor = self._driver.engine.grads.take_scale(
            self._driver.handles, stays_due=not self._offload.scales_in_place
        )
        jobs = self._jobs(active)
        groups = [
            _for_the_host(group, self._driver.engine.device)
            for group in self._driver.user.param_groups
        ]
        if factor is not None:  # there when `after` has passed
            factor = factor.to("cpu", non_blocking=True)
        after = self._offload.transfers.barrier()
        step = _Step(self._driver, jobs, groups, factor, kwargs, self._offload, after, is_delayed)
        for bundle in self._bundles(jobs):
            done = self._offload.runner.submit(step.run(bundle))
            for number in bundle:
                self._order_after(jobs[number], done, is_delayed=is_delayed)
        self._offload.runner.submit(step.run_rest)
        if not self._is_torchs:
            self._offload.runner.wait()
            self._driver.sync_back()
        if is_delayed:
            self._unpublished += jobs
        return is_delayed

    def _jobs(self, active: Sequence[Segment]) -> list[_Job]:
        """In the order of the forward."""
        chosen = set(active)
        of_buffer: dict[FlatBuffer, list[Segment]] = {}
        for segment in self._driver.segments:
            of_buffer.setdefault(segment.buffer, []).append(segment)
        jobs = []
        for buffer, segments in sorted(of_buffer.items(), key=lambda item: item[0].index):
            mine = [segment for segment in segments if segment in chosen]
            if mine:
                grad = self._driver.engine.grads.buckets[buffer].shard_or_new()
                jobs.append(_Job(buffer, segments, mine, grad, grad.step))
        return jobs

    def _bundles(self, jobs: Sequence[_Job]) -> list[range]:
        """Which jobs are done in one call."""
        is_read = not all(isinstance(device, HostMemory) for device in self._offload.devices)
        limit = 0 if is_read else _BUNDLE_BYTES
        found: list[range] = []
        size = limit
        for number, job in enumerate(jobs):
            nbytes = job.grad.numel * job.grad.dtype.itemsize
            size += nbytes
            if found and size <= limit:
                found[-1] = range(found[-1].start, number + 1)
            else:
                found.append(range(number, number + 1))
                size = nbytes
        return found

    @staticmethod
    def _order_after(job: _Job, done: Pending, *, is_delayed: bool) -> None:
        """Every use of what the job works on waits for it."""
        job.buffer.shard.step = job.grad.step = done
        if is_delayed:
            return

        def finish() -> None:
            done.wait()
            job.published.wait()

        published = Pending(finish)
        if job.buffer.model is not None:
            job.buffer.model.step = published
        elif not job.buffer.is_sharded:
            job.buffer.pending = published

    def publish(self) -> None:
        """Bring a delayed update to this rank's model weights; waits for it."""
        jobs, self._unpublished = self._unpublished, []
        for job in jobs:
            with job.buffer.shard.use() as shard:
                job.buffer.publish(shard).wait()


class _Step:
    """One step, run by the thread.

    Args:
        driver: of the optimizer.
        jobs: what is to be stepped.
        groups: the hyper-parameters of the optimizer's groups at the time of the step.
        factor: what gradients are multiplied with.
        kwargs: for the optimizer's ``step``.
        offload: where everything rests.
        after: when the device does not use the old weights any more, where they rest included.
        is_delayed: whether the model weights keep their old values.
    """

    def __init__(  # noqa: PLR0913
        self,
        driver: OptimizerDriver,
        jobs: list[_Job],
        groups: list[dict[str, Any]],
        factor: Tensor | None,
        kwargs: Mapping[str, Any],
        offload: Offload,
        after: Any,
        is_delayed: bool,
    ) -> None:
        self._driver, self._jobs, self._groups = driver, jobs, groups
        self._factor, self._kwargs, self._offload, self._after = factor, kwargs, offload, after
        self._is_delayed = is_delayed
        # each call of several begins with the attributes that the optimizer had before the step
        is_torchs = driver.plain_class.__module__.startswith("torch.optim")
        self._attributes = {} if is_torchs else driver.attributes()
        self._stepped_groups: set[int] = set()
        self._num_loading = 0

    def run(self, numbers: range) -> Callable[[], None]:
        """The jobs with these numbers, for the runner."""

        def job() -> None:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                for number in numbers:
                    self._load_ahead(number)
                self._run(self._jobs[numbers.start : numbers.stop])

        return job

    def _load_ahead(self, number: int) -> None:
        """Begin to read this job's data, and the next ones' where there is room for them."""
        self._num_loading = max(self._num_loading, number)
        while self._num_loading < min(number + _IN_FLIGHT, len(self._jobs)):
            job = self._jobs[self._num_loading]
            if self._num_loading > number and not self._has_room(job):
                return
            job.arrived.wait()
            for shard in (job.buffer.shard, job.grad):
                if isinstance(shard, RestingShard):
                    shard.slab.start_load()
            if self._state is not None:
                self._state.start_load(job.buffer)
            self._num_loading += 1

    @property
    def _state(self) -> RestingState | None:
        return self._driver.resting_state

    def _has_room(self, job: _Job) -> bool:
        """Whether a job's data fit in the staging memory besides what is in there."""
        size = job.grad.numel * job.grad.dtype.itemsize
        size += job.buffer.shard.numel * job.buffer.shard.dtype.itemsize
        size += 0 if self._state is None else self._state.nbytes(job.buffer)
        return all(device.has_room(size) for device in self._offload.devices)

    def _run(self, jobs: Sequence[_Job]) -> None:
        if self._after is not None:
            self._after.synchronize()
        shards = [self._open(job) for job in jobs]
        active = [segment for job in jobs for segment in job.active]
        try:
            self._step_segments(active)
        finally:
            for segment in active:
                segment.param.grad = None
        for job, shard in zip(jobs, shards, strict=True):
            self._close(job, shard)

    def _open(self, job: _Job) -> Tensor:
        """Put what a job steps into its segments; returns the shard."""
        shard, grad = job.buffer.shard.open(), job.grad.open()
        if self._state is not None:
            self._state.load(job.buffer, job.segments)
        for segment in job.active:
            segment.param.data = shard[segment.start : segment.stop]
            mine = grad[segment.start : segment.stop]
            if self._factor is not None:
                mine.mul_(self._factor)
            segment.param.grad = mine
        return shard

    def _close(self, job: _Job, shard: Tensor) -> None:
        """Let everything rest again, and bring the weights to where they are used."""
        if self._state is not None:
            self._state.store(job.buffer, job.segments)
        # where it is loaded from a file the factor stays due: nothing is written for it
        job.grad.close(is_changed=self._factor is not None and self._offload.scales_in_place)
        if not self._is_delayed:
            job.published = job.buffer.publish(shard, self._after)
        if job.buffer.places.shard is not None:
            for segment in job.active:
                segment.param.data = shard.new_empty(0)
        job.buffer.shard.close(is_changed=True)

    def _step_segments(self, segments: Sequence[Segment]) -> None:
        """Step these segments alone, with the hyper-parameters as they were before the step."""
        params: dict[int, list[Any]] = {}
        for segment in segments:
            params.setdefault(segment.group, []).append(segment.param)
        self._stepped_groups.update(params)
        self._step_groups(params)

    def run_rest(self) -> None:
        """Step what is no segment, and groups that have none with a gradient here."""
        segments = {id(segment.param) for segment in self._driver.segments}
        rest = {}
        for index, group in enumerate(self._driver.inner.param_groups):
            others = [param for param in group["params"] if id(param) not in segments]
            if others or index not in self._stepped_groups:
                rest[index] = others
        if rest:
            with torch.no_grad():
                self._step_groups(rest)

    def _step_groups(self, params: Mapping[int, list[Any]]) -> None:
        inner = self._driver.inner
        groups = inner.param_groups
        inner.__dict__.update(self._attributes)
        for index in params:
            options = hyper_parameters(self._groups[index])
            # what the first step puts into a group is not there when the next buffer's begins
            for added in groups[index].keys() - options.keys() - {"params"}:
                del groups[index][added]
            groups[index].update(options)
        inner.param_groups = [{**groups[i], "params": chosen} for i, chosen in params.items()]
        try:
            inner.step(**self._kwargs)
        finally:
            for changed, index in zip(inner.param_groups, params, strict=True):
                groups[index].update({k: v for k, v in changed.items() if k != "params"})
            inner.param_groups = groups


def hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a step needs of a group besides its parameters, as it is now."""
    return {
        key: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _for_the_host(group: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The hyper-parameters for a step on the host of what a model on ``device`` trains."""
    found = hyper_parameters(group)
    is_complex = any(param.is_complex() for param in group["params"])
    if device.type != "cpu":
        if "fused" in found and not is_complex:
            # on the host the fused kernel is the fast one, whichever was chosen for the device
            found.update(fused=True, foreach=None)
        found.update({"capturable": False} if "capturable" in found else {})
    return found
