"""Which parameters are gathered together: the units, chosen without the user's help.

[Note: how units are chosen]
Top down: a module whose parameters take at most a quarter of the whole model (between
``bucket_bytes`` and 256 MiB) is one unit, and a larger one is split along its children. That makes
the repeated blocks of a network units, and large embeddings or heads units of their own. Neighbours
smaller than ``bucket_bytes`` share a unit, so that the number of collectives is bounded by bytes,
not by parameters. What is left over, and every parameter that modules of different units share,
belongs to the root unit.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.engine.buffer import FlatBuffer, ParamHandle

MAX_UNIT_BYTES = 256 << 20
_MIN_UNITS = 4


@dataclass
class UnitPlan:
    """A unit to be: its name and parameters (fqn -> parameter), and the modules that it was chosen
    for.
    """

    name: str
    params: dict[str, nn.Parameter] = field(default_factory=dict)
    modules: list[nn.Module] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters."""
        return sum(_nbytes(p) for p in self.params.values())


class UnitPhase(enum.Enum):
    """What a unit is being used for."""

    RESTING = "resting"
    FORWARD = "forward"
    BACKWARD = "backward"


_ALLOWED = {
    (UnitPhase.RESTING, UnitPhase.FORWARD),
    (UnitPhase.RESTING, UnitPhase.BACKWARD),
    (UnitPhase.FORWARD, UnitPhase.BACKWARD),
    (UnitPhase.FORWARD, UnitPhase.RESTING),
    (UnitPhase.BACKWARD, UnitPhase.RESTING),
}


class ZeroUnit:
    """Parameters that are gathered together.

    Attributes:
        index: number of the unit, in the order of the module.
        handles: its parameters.
        buffers: their flat buffers.
        pins: how many module calls are using it right now; it is not freed while there are any.
        num_holds: how many of the pins are `full_params` contexts, which outlast the end of a step.
        is_in_graph: autograd may have saved parameters themselves, in a `full_params` context or a
            transform of `torch.func`; not freed before the next step.
        is_gathering: a gather has been started and not been waited for.
        num_calls, is_recomputed: module calls since the last backward, and whether this backward
            has called modules again.
        versions: version counters of the parameters when the unit was gathered; a change is a write
            by the module.
    """

    def __init__(self, index: int, name: str, buffers: list[FlatBuffer]) -> None:
        self.index, self.name, self.buffers = index, name, buffers
        self.handles: list[ParamHandle] = [
            handle for buffer in buffers for handle in buffer.handles
        ]
        self.nbytes = sum(buffer.nbytes for buffer in buffers)
        self.pins = self.num_holds = 0
        self.is_in_graph = False
        self.is_gathering = False
        self.num_calls = 0
        self.is_recomputed = False
        self.versions: list[int] = []
        self._phase = UnitPhase.RESTING

    @property
    def phase(self) -> UnitPhase:
        """What the unit is being used for."""
        return self._phase

    @phase.setter
    def phase(self, phase: UnitPhase) -> None:
        if phase is self._phase:
            return
        if (self._phase, phase) not in _ALLOWED:
            raise RuntimeError(
                f"Invalid transition {self._phase.name} -> {phase.name} for unit '{self.name}'."
            )
        self._phase = phase

    @property
    def has_masters(self) -> bool:
        """Whether any of the weights are rounded copies."""
        return any(buffer.has_master for buffer in self.buffers)

    @property
    def owns_shards(self) -> bool:
        """Whether what is stepped is apart from the model weights even where they are whole."""
        return any(buffer.owns_shard for buffer in self.buffers)

    @property
    def is_held(self) -> bool:
        """Whether its weights have to stay where they are."""
        return self.pins > 0 or self.is_in_graph

    @property
    def has_frozen(self) -> bool:
        """Whether any parameter requires no gradient at the moment."""
        with torch._C.DisableTorchFunctionSubclass():
            return not all(handle.param.requires_grad for handle in self.handles)

    def wait(self) -> None:
        """Wait for the gathers of all buffers."""
        for buffer in self.buffers:
            buffer.pending.wait()
        self.is_gathering = False

    def expose(self) -> None:
        """Make the parameters plain ones: a module may use them directly."""
        for handle in self.handles:
            handle.param.__class__ = handle.plain_class

    def guard(self) -> None:
        """Let every use of the parameters go through the guard."""
        for handle in self.handles:
            handle.param.__class__ = handle.guard_class

    def changed_since(self, versions: list[int]) -> list[ParamHandle]:
        """The parameters that were changed in place, or whose data were replaced, since
        ``versions`` were taken.
        """
        with torch._C.DisableTorchFunctionSubclass():
            return [
                handle
                for handle, version in zip(self.handles, versions, strict=True)
                if handle.param._version != version
                or handle.param.data_ptr() != handle.view.data_ptr()
            ]

    @property
    def num_uses(self) -> int:
        """How many hold the tensors behind the parameters, graphs of autograd among them."""
        with torch._C.DisableTorchFunctionSubclass():
            params: list[Any] = [handle.param for handle in self.handles]
            return sum(param._use_count() for param in params)

    def current_versions(self) -> list[int]:
        """The version counters of the parameters."""
        with torch._C.DisableTorchFunctionSubclass():
            return [handle.param._version for handle in self.handles]


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Planner:
    def __init__(
        self,
        root: nn.Module,
        bucket_bytes: int,
        unit_classes: tuple[type, ...],
        max_unit_bytes: int,
    ) -> None:
        self._bucket_bytes, self._unit_classes = bucket_bytes, unit_classes
        owners: dict[nn.Parameter, list[nn.Module]] = defaultdict(list)
        self.fqns: dict[nn.Parameter, str] = {}
        for name, module in root.named_modules():
            for key, param in module.named_parameters(prefix=name, recurse=False):
                owners[param].append(module)
                self.fqns.setdefault(param, key)
        self._shared = {param for param, modules in owners.items() if len(modules) > 1}
        total = sum(map(_nbytes, self.fqns))
        self._limit = max(bucket_bytes, min(total // _MIN_UNITS, max_unit_bytes))
        self.root = UnitPlan("the root unit")
        self.units: list[UnitPlan] = []
        self._claimed: set[nn.Parameter] = set()  # a module may be reached on several paths

    def plan(self, root: nn.Module) -> list[UnitPlan]:
        self._split(root, "", set())
        for param in self._shared:
            self.root.params[self.fqns[param]] = param
        order = {fqn: i for i, fqn in enumerate(self.fqns.values())}
        self.root.params = dict(sorted(self.root.params.items(), key=lambda item: order[item[0]]))
        return [*([self.root] if self.root.params else []), *self.units]

    def _own(self, module: nn.Module, *, recurse: bool) -> dict[str, nn.Parameter]:
        """The parameters of a module that no other module shares, by their first name."""
        taken = self._shared | self._claimed
        return {self.fqns[p]: p for p in module.parameters(recurse=recurse) if p not in taken}

    def _claim(self, unit: UnitPlan) -> UnitPlan:
        self._claimed.update(unit.params.values())
        return unit

    def _split(self, module: nn.Module, name: str, seen: set[nn.Module]) -> None:
        direct = self._claim(UnitPlan(f"'{name}'", self._own(module, recurse=False), [module]))
        small: list[UnitPlan] = []
        if direct.nbytes >= self._bucket_bytes and name:
            self.units.append(direct)
        else:
            self.root.params.update(direct.params)
        for key, child in module.named_children():
            if child in seen:
                continue
            seen.add(child)
            child_name = f"{name}.{key}" if name else key
            unit = UnitPlan(f"'{child_name}'", self._own(child, recurse=True), [child])
            if not unit.params:
                continue
            is_chosen = isinstance(child, self._unit_classes)
            holds_chosen = not is_chosen and any(
                isinstance(module, self._unit_classes) for module in child.modules()
            )
            if not is_chosen and not holds_chosen and unit.nbytes < self._bucket_bytes:
                small.append(self._claim(unit))
                continue
            self._merge(small)
            is_small_enough = unit.nbytes <= self._limit and not holds_chosen
            if is_chosen or is_small_enough or not any(True for _ in child.children()):
                self.units.append(self._claim(unit))
            else:
                self._split(child, child_name, seen)
        self._merge(small)

    def _merge(self, small: list[UnitPlan]) -> None:
        """Make units of at least ``bucket_bytes`` of neighbours; the rest goes to the root unit."""
        merged: UnitPlan | None = None
        for unit in small:
            if merged is None:
                merged = UnitPlan(unit.name)
            merged.params.update(unit.params)
            merged.modules += unit.modules
            if merged.nbytes >= self._bucket_bytes:
                if len(merged.modules) > 1:
                    merged.name = f"{merged.name} to {unit.name}"
                self.units.append(merged)
                merged = None
        if merged is not None:
            self.root.params.update(merged.params)
        small.clear()


def plan_units(
    root: nn.Module,
    bucket_bytes: int,
    unit_classes: tuple[type, ...] = (),
    max_unit_bytes: int = MAX_UNIT_BYTES,
) -> list[UnitPlan]:
    """Divide the parameters of ``root`` into units. See [Note: how units are chosen].

    Every parameter is in exactly one unit. The root unit, if it is not empty, comes first. Modules
    larger than ``max_unit_bytes`` are split where they have children.
    """
    return _Planner(root, bucket_bytes, unit_classes, max_unit_bytes).plan(root)
