"""Writes folders as DeepSpeed lays them out, without DeepSpeed.

What fills up partitions is 99, so that it is seen if it gets into a tensor.
"""

from __future__ import annotations

import enum
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

FILLING = 99.0


class ZeroStageEnum(int, enum.Enum):
    NONE = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    WEIGHTS = 3


class fragment_address:
    def __init__(self, numel: int, start: int) -> None:
        self.numel, self.start = numel, start


class LossScaler:
    def __init__(self) -> None:
        self.cur_scale, self.dynamic = 1.0, False


class DynamicLossScaler(LossScaler):
    pass


_HOMES = {
    "deepspeed.runtime.zero.config": (ZeroStageEnum,),
    "deepspeed.utils.tensor_fragment": (fragment_address,),
    "deepspeed.runtime.fp16.loss_scaler": (LossScaler, DynamicLossScaler),
}


@contextmanager
def classes_of_deepspeed() -> Iterator[None]:
    """Inside, our classes are pickled under the names of DeepSpeed's."""
    modules: dict[str, Any] = {}
    former = {cls: cls.__module__ for classes in _HOMES.values() for cls in classes}
    for home, classes in _HOMES.items():
        parts = home.split(".")
        for depth in range(1, len(parts) + 1):
            modules.setdefault(name := ".".join(parts[:depth]), ModuleType(name))
        for cls in classes:
            cls.__module__ = home
            setattr(modules[home], cls.__name__, cls)
    try:
        with mock.patch.dict(sys.modules, modules):
            yield
    finally:
        for cls, name in former.items():
            cls.__module__ = name


@dataclass
class Run:
    """What is to be saved, and how.

    Attributes:
        groups: per group of the optimizer, the fp32 weights by name.
        frozen, buffers: by name.
        tied: names of the second occurrence, and of the first.
        dtype: of the module; masters are fp32.
        sub_groups: whether stage 3 cuts each group into groups of one or two parameters.
        gap: elements between parameters (stages 1 and 2).
        fused: the step is an int in the groups, as DeepSpeed's own Adam has it.
        beside: what else is in the model file.
        change: changes what is in the optimizer file of a rank.
    """

    groups: list[dict[str, Tensor]]
    stage: int = 2
    ranks: int = 2
    frozen: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    sub_groups: bool = False
    round_robin: bool = False
    gap: int = 0
    fused: bool = False
    prefix: str = ""
    beside: dict[str, Any] = field(default_factory=dict)
    change: Callable[[int, dict[str, Any]], object] = lambda rank, part: None

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.params = {n: w for group in self.groups for n, w in group.items()}
        self.state = {
            key: {n: torch.rand(w.shape, generator=generator) for n, w in self.params.items()}
            for key in ("exp_avg", "exp_avg_sq")
        }

    # ---- the layouts

    def flat_groups(self) -> list[list[str]]:
        """The names in each flat tensor, in the order in which they lie there."""
        if self.stage == 3:
            size = 2 if self.sub_groups else 1 << 30
            names = [list(group) for group in self.groups]
            return [g[i : i + size] for g in names for i in range(0, len(g), size)]
        if not self.round_robin:
            return [list(group) for group in self.groups]
        return [
            [name for rank in range(self.ranks) for name in list(group)[rank :: self.ranks]]
            for group in self.groups
        ]

    def cut(self, names: list[str], values: dict[str, Tensor], *, lean: bool) -> list[Tensor]:
        """The flat tensor of each rank."""
        filling = torch.full((self.gap,), FILLING)
        if self.stage < 3:
            flat = torch.cat([t for n in names for t in (values[n].reshape(-1), filling)])
            flat = flat[: flat.numel() - self.gap]
            missing = -flat.numel() % (2 * self.ranks)
            filled = torch.cat([flat, torch.full((missing,), FILLING)])
            size = filled.numel() // self.ranks
            whole = flat if lean else filled
            return [whole[r * size : (r + 1) * size].clone() for r in range(self.ranks)]
        parts: list[list[Tensor]] = [[torch.empty(0)] for _ in range(self.ranks)]
        for name in names:
            for rank, part in enumerate(self.cut_one(values[name])):
                parts[rank].append(part)
        return [torch.cat(part) for part in parts]

    def cut_one(self, value: Tensor) -> list[Tensor]:
        share = -(-value.numel() // self.ranks)
        missing = share * self.ranks - value.numel()
        filling = torch.full((missing,), FILLING, dtype=value.dtype)
        return list(torch.cat([value.reshape(-1), filling]).view(self.ranks, share).clone())

    # ---- the files

    def optimizer_part(self, rank: int) -> dict[str, Any]:
        flats = self.flat_groups()
        step = {} if self.fused else {"step": torch.tensor(7.0)}
        state = {
            i: {k: self.cut(g, v, lean=False)[rank] for k, v in self.state.items()} | step
            for i, g in enumerate(flats)
        }
        owner = [next(i for i, g in enumerate(self.groups) if f[0] in g) for f in flats]
        options = {"betas": (0.9, 0.99), "eps": 1e-8} | ({"step": 7} if self.fused else {})
        base = {
            "state": state,
            "param_groups": [
                {
                    "lr": 0.1 * (i + 1),
                    **options,
                    "params": [k for k, o in enumerate(owner) if o == i],
                }
                for i in range(len(self.groups))
            ],
        }
        masters = [self.cut(g, self.params, lean=self.stage < 3)[rank] for g in flats]
        common: dict[str, Any] = {
            "loss_scaler": DynamicLossScaler() if self.dtype == torch.float16 else LossScaler(),
            "zero_stage": ZeroStageEnum(self.stage),
        }
        if self.stage == 3:
            masters = [torch.nn.Parameter(master) for master in masters]
            return common | {
                "partition_count": self.ranks,
                "optimizer_state_dict": base,
                "fp32_flat_groups": masters,
            }
        part = common | {
            "partition_count": [self.ranks] * len(flats),
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": masters,
        }
        # A mapping that DeepSpeed fills with other places under `round_robin`.
        part["param_slice_mappings"] = [OrderedDict(x=fragment_address(3, 0)) for _ in flats]
        if self.gap:
            part["param_alignment_paddings"] = [[self.gap] * len(g) for g in flats]
        return part

    def model_part(self, rank: int) -> dict[str, Any]:
        cut = self.stage == 3
        module = OrderedDict()
        for name, value in (self.params | self.frozen).items():
            module[name] = torch.empty(0) if cut else value.to(self.dtype)
        module |= self.buffers
        for name, origin in self.tied.items():
            module[name] = module[origin]
        shapes = {n: v.shape for n, v in self.params.items()}
        part = {
            "module": self._named(module),
            "buffer_names": [self.prefix + name for name in self.buffers],
            "optimizer": None,
            "param_shapes": [
                OrderedDict((self.prefix + n, shapes[n]) for n in g) for g in self.flat_groups()
            ],
            "shared_params": {self.prefix + n: self.prefix + o for n, o in self.tied.items()},
            "frozen_param_shapes": None,
            "frozen_param_fragments": None,
            "global_steps": 7,
            "dp_world_size": self.ranks,
            "ds_config": {
                "zero_optimization": {
                    "stage": self.stage,
                    "round_robin_gradients": self.round_robin,
                }
            },
            "ds_version": "0.16.0",
        }
        if self.stage >= 2:
            frozen = {n: v.to(self.dtype) for n, v in self.frozen.items()}
            part["frozen_param_shapes"] = self._named({n: v.shape for n, v in frozen.items()})
            own = {n: self.cut_one(v)[rank] if cut else v for n, v in frozen.items()}
            part["frozen_param_fragments"] = self._named(own)
        return part | self.beside

    def _named(self, values: dict[str, Any]) -> dict[str, Any]:
        return OrderedDict((self.prefix + name, value) for name, value in values.items())

    def save(self, folder: Path, tag: str = "checkpoint") -> Path:
        """Write all files.

        Returns:
            The folder of the tag.
        """
        inner = folder / tag
        inner.mkdir(parents=True)
        (folder / "latest").write_text(tag)
        bf16 = "bf16_" if self.dtype == torch.bfloat16 else ""
        with classes_of_deepspeed():
            for rank in range(self.ranks):
                name = f"zero_pp_rank_{rank}_mp_rank_00"
                part = self.optimizer_part(rank)
                self.change(rank, part)
                content = {"optimizer_state_dict": part, "ds_config": {}}
                torch.save(content, inner / f"{bf16}{name}_optim_states.pt")
                if self.stage == 3:
                    torch.save(self.model_part(rank), inner / f"{name}_model_states.pt")
            if self.stage < 3:
                torch.save(self.model_part(0), inner / "mp_rank_00_model_states.pt")
        return inner
