"""Counts the passes over large tensors that a step makes, as the dispatcher sees them.

[Note: what is seen]
A dispatch mode sees every operator of the thread that entered it, those of C++ code included: the
forward, the backward (which runs in the calling thread on a CPU), hooks, the optimizer, and a
strategy's own copies and sums. Not seen: work inside one operator, such as what a gloo collective
copies or adds internally; work in threads that don't enter the mode; numpy and plain memory copies.

[Note: a pass]
One read or one write of as many bytes as all parameters have (P). An operator reads each large
tensor that it is given and doesn't merely overwrite, and writes each that it changes or returns
fresh. Views, and allocations that nobody fills, cost nothing.
"""

from __future__ import annotations

import collections
import resource
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.job import Job
from harness.monitor import Counters, no_counters

LEAST_BYTES = 4096
LEAST_ALLOCATION_BYTES = 1 << 20

OVERWRITES = ("copy_", "zero_", "fill_", "set_", "_foreach_copy_", "_foreach_zero_")
ALLOCATES_ONLY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
ALIASES = ("_unsafe_view", "_reshape_alias", "detach_", "alias")
FSDP_COPY_IN = "all_gather_copy_in"
"""FSDP2's operator copies its first argument into a part of its last, and says neither."""
COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional")


def _bytes(tensor: Tensor) -> int:
    """Bytes of distinct elements: an expanded tensor is only as large as what it repeats."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    numel = 1
    for length, stride in pairs:
        numel *= length if stride or not length else 1
    return numel * tensor.element_size()


def _large(values: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and _bytes(leaf) >= LEAST_BYTES:
            yield leaf


def _storage_key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class Tally:
    """What the counted steps did, summed."""

    def __init__(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()
        self.read: collections.Counter[str] = collections.Counter()
        self.written: collections.Counter[str] = collections.Counter()
        self.collective_calls: collections.Counter[str] = collections.Counter()
        self.collective_bytes: collections.Counter[str] = collections.Counter()
        self.allocations = 0
        self.allocated_bytes = 0

    def add_allocation(self, num_bytes: int) -> None:
        """One fresh storage, if it is large."""
        if num_bytes >= LEAST_ALLOCATION_BYTES:
            self.allocations += 1
            self.allocated_bytes += num_bytes


class PassMode(TorchDispatchMode):
    """Enters every operator into a tally."""

    def __init__(self, tally: Tally) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tally = tally

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator, then account for it."""
        kwargs = kwargs or {}
        known = {_storage_key(t) for t in _large((args, kwargs))}
        result = func(*args, **kwargs)
        if func.namespace in COLLECTIVE_NAMESPACES:
            self._count_collective(func, args)
        else:
            self._count_operator(func, args, kwargs, known, result)
        return result

    def _count_collective(self, func: Any, args: Sequence[Any]) -> None:
        name = func.overloadpacket.__name__
        payloads = [sum(_bytes(t) for t in _large(arg)) for arg in args]
        self.tally.collective_calls[name] += 1
        self.tally.collective_bytes[name] += max(payloads, default=0)

    def _count_operator(
        self, func: Any, args: Sequence[Any], kwargs: Any, known: set[int], result: Any
    ) -> None:
        name = func.overloadpacket.__name__
        read = written = 0
        for index, argument in enumerate(func._schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            size = sum(_bytes(t) for t in _large(value))
            changes = argument.alias_info is not None and argument.alias_info.is_write
            if changes:
                written += size
            if not (changes and (argument.is_out or name in OVERWRITES)):
                read += size
        fresh = {_storage_key(t): t for t in _large(result) if _storage_key(t) not in known}
        for tensor in fresh.values():
            self.tally.add_allocation(tensor.untyped_storage().nbytes())
        if func.is_view or name in ALLOCATES_ONLY or name in ALIASES:
            return
        if name == FSDP_COPY_IN:
            read = written = sum(_bytes(tensor) for tensor in _large(args[0]))
        written += sum(_bytes(tensor) for tensor in fresh.values())
        if read or written:
            self.tally.calls[name] += 1
            self.tally.read[name] += read
            self.tally.written[name] += written


class PassMonitor:
    """Half of the measured steps run free, for page faults; the other half are counted."""

    def __init__(self, job: Job) -> None:
        if job.device != "cpu":
            raise ValueError(
                f"Passes can only be counted on a CPU, got device {job.device!r}: on CUDA the "
                "backward runs in threads that a dispatch mode doesn't see."
            )
        self._job = job
        self._free_steps = max(1, job.steps // 2)
        self._tally = Tally()
        self._mode: PassMode | None = None
        self._faults = 0
        self._counted: dict[str, int] = {}
        self._losses: list[float] = []
        self.counters: Counters = no_counters

    def begin_step(self, step: int) -> None:
        """Warm-up, then free steps, then counted ones."""
        measured = step - self._job.warmup
        if measured == 0:
            self._faults = _page_faults()
        if measured == self._free_steps:
            self._faults = _page_faults() - self._faults
            self._counted = dict(self.counters() or {})
            _watch_resizes(self._tally)
            self._mode = PassMode(self._tally)
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def add_loss(self, loss: Tensor) -> None:
        """Kept to see that counting changes nothing."""
        self._losses.append(loss.item())

    def close(self) -> None:
        """End the counted steps."""
        assert self._mode is not None
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        counted = self.counters()
        if counted is not None:
            self._counted = {k: v - self._counted.get(k, 0) for k, v in counted.items()}

    def result(self) -> dict[str, Any]:
        """Everything per step."""
        steps = self._job.steps - self._free_steps
        tally = self._tally
        return {
            "operators": {
                name: [
                    tally.calls[name] / steps,
                    tally.read[name] / steps,
                    tally.written[name] / steps,
                ]
                for name in tally.calls
            },
            "collectives": {
                name: [calls / steps, tally.collective_bytes[name] / steps]
                for name, calls in tally.collective_calls.items()
            },
            "allocations": tally.allocations / steps,
            "allocated_bytes": tally.allocated_bytes / steps,
            "page_faults": self._faults / self._free_steps,
            "counters": {k: v / steps for k, v in self._counted.items()} or None,
            "losses": self._losses,
        }


def _page_faults() -> int:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


def _watch_resizes(tally: Tally) -> None:
    """Count a storage that grows as an allocation; it isn't an operator, so no mode sees it."""
    resize = torch.UntypedStorage.resize_

    def counted(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        grown = num_bytes > storage.nbytes()
        result = resize(storage, num_bytes)
        if grown:
            tally.add_allocation(num_bytes)
        return result

    torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign,assignment]
