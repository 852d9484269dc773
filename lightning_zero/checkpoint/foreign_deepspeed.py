"""Folders of DeepSpeed (ZeRO stages 1, 2, 3, or none), by itself or through Lightning.

[Note: DeepSpeed's files] A folder has a sub-folder per checkpoint (a tag; Lightning's is called
``checkpoint``) and a file ``latest`` with the newest tag. In the sub-folder are

- ``mp_rank_00_model_states.pt``: the module's state dict in the dtype it was trained in, and what
  Lightning or the user saved beside. Under stage 3 there is one for each rank,
  ``zero_pp_rank_<rank>_mp_rank_00_model_states.pt``, where parameters are empty and frozen ones are
  cut into parts like all others;
- ``zero_pp_rank_<rank>_mp_rank_00_optim_states.pt``, one for each rank and with ``bf16_`` in front
  under bf16: partitions of fp32 masters and of the optimizer's state.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.failures import CheckpointError, CorruptCheckpointError, some
from lightning_zero.checkpoint.foreign_partitions import Partitions
from lightning_zero.checkpoint.foreign_unpickle import Meter, load_file

_MODEL = "mp_rank_00_model_states.pt"
_MODEL_OF_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_model_states\.pt")
_OPTIM_OF_RANK = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
# Files of checkpoints in which a parameter is cut in other ways too.
_OTHER_CUTS = {
    "pipeline parallelism": re.compile(r"layer_\d+-model_.*\.pt"),
    "mixtures of experts": re.compile(r"(?:layer_\d+_)?expert_.*\.pt|expp_rank_.*\.pt"),
    "tensor parallelism": re.compile(r".*mp_rank_(?!00)\d+_.*_states\.pt"),
}
# What DeepSpeed puts into the model file; all the rest is Lightning's or the user's.
_ITS_OWN = frozenset(
    {
        *("module", "buffer_names", "param_shapes", "shared_params"),
        *("frozen_param_shapes", "frozen_param_fragments"),
        *("optimizer", "lr_scheduler", "data_sampler", "random_ltd"),
        *("sparse_tensor_module_names", "csr_tensor_module_names"),
        *("skipped_steps", "global_steps", "global_samples"),
        *("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"),
        *("universal_checkpoint_info", "ds_autoep_layers", "autoep_layers"),
        *("ds_config", "ds_version"),
    }
)


def find_tag(folder: Path) -> Path | None:
    """The folder with the files of the newest checkpoint; None if this is nothing of DeepSpeed's.

    Raises:
        CheckpointError: if it is, but the checkpoint that ``latest`` names is not there.
    """
    if not folder.is_dir():
        return None
    if _has_model(folder):
        return folder
    latest = folder / "latest"
    if latest.is_file() and latest.stat().st_size < 1024:
        tag = latest.read_text(errors="replace").strip()
        is_name = bool(tag) and Path(tag).name == tag
        if is_name and _has_model(folder / tag):
            return folder / tag
        raise CheckpointError(
            f"'{latest}' names the checkpoint '{tag}', but there is none of DeepSpeed's in"
            f" '{folder / tag if is_name else folder}'; give the folder with the"
            " `*_model_states.pt` files"
        )
    return folder / "checkpoint" if _has_model(folder / "checkpoint") else None


def _has_model(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob("*mp_rank_*_model_states.pt"))


def read_deepspeed(tag: Path, meter: Meter, *, weights_only: bool) -> dict[str, Any]:
    """Read a checkpoint into the dictionary that Lightning would have saved.

    Optimizers count trainable parameters only: DeepSpeed does not tell where frozen ones stood.

    Args:
        tag: the folder with the files.
        meter: told of every tensor.
        weights_only: leave out the optimizer.

    Raises:
        CheckpointError: if files are missing or hold something that is not known.
        CorruptCheckpointError: if they contradict each other.
    """
    for what, pattern in _OTHER_CUTS.items():
        found = [path.name for path in sorted(tag.iterdir()) if pattern.fullmatch(path.name)]
        if found:
            raise CheckpointError(
                f"'{tag / found[0]}' belongs to a model with {what}; only checkpoints of data"
                " parallel training (mp_rank_00) can be read"
            )
    optims = _files_by_rank(tag, _OPTIM_OF_RANK)
    by_rank = _files_by_rank(tag, _MODEL_OF_RANK)
    models = by_rank if by_rank and not (tag / _MODEL).is_file() else [tag / _MODEL]
    contents = [load_file(path) for path in models]
    if not isinstance(contents[0].get("module"), Mapping):
        raise CheckpointError(f"'{models[0]}' has no weights under 'module'")
    reader = _Reader(models, contents, optims)
    meter.total = reader.count_bytes(weights_only)
    others = {key: value for key, value in contents[0].items() if key not in _ITS_OWN}
    result = copy.deepcopy(others)  # into memory: the file may go away
    # A checkpoint of DeepSpeed alone says how many steps were made, but in other words.
    result.setdefault("global_step", contents[0].get("global_steps") or 0)
    result["state_dict"] = reader.state_dict(meter)
    if not weights_only:
        optimizer = reader.optimizer(meter)
        result["optimizer_states"] = [] if optimizer is None else [optimizer]
    return result


def _files_by_rank(tag: Path, pattern: re.Pattern[str]) -> list[Path]:
    found: dict[int, Path] = {}
    for path in sorted(tag.iterdir()):
        match = pattern.fullmatch(path.name)
        if match is None:
            continue
        if int(match[1]) in found:
            raise CheckpointError(
                f"'{path}' and '{found[int(match[1])].name}' are of the same rank: two checkpoints"
                " were saved into one folder; move the files of the other one away"
            )
        found[int(match[1])] = path
    missing = [rank for rank in range(max(found, default=-1) + 1) if rank not in found]
    if missing:
        any_name = next(iter(found.values())).name
        names = [re.sub(r"rank_\d+", f"rank_{rank}", any_name, count=1) for rank in missing]
        raise CheckpointError(f"files are missing in '{tag}': {some(names)}; copy it again")
    return [found[rank] for rank in sorted(found)]


class _Reader:
    """The files of one checkpoint, opened."""

    def __init__(
        self, models: Sequence[Path], contents: Sequence[dict[str, Any]], optims: Sequence[Path]
    ) -> None:
        self.models, self.contents, self.optims = models, contents, optims
        self.first = contents[0]
        self.ranks = [self._optimizer_part(path) for path in optims]
        self.partitions: Partitions | None = None
        if not optims:
            self._require_complete_module()
            return
        self._check_ranks()
        groups = self.first.get("param_shapes")
        if not groups:
            raise CheckpointError(
                f"'{models[0]}' has no 'param_shapes': it was written by a very old DeepSpeed"
                f" (version {self.first.get('ds_version')}); load and save it with a newer one"
            )
        self.partitions = Partitions(optims, self.ranks, groups)

    def _optimizer_part(self, path: Path) -> dict[str, Any]:
        content = load_file(path)
        part = content.get("optimizer_state_dict") if isinstance(content, dict) else None
        if not isinstance(part, dict):
            raise CorruptCheckpointError(f"'{path}' has no 'optimizer_state_dict'")
        if part.get("ds_zero_partition_groups"):
            raise CheckpointError(f"'{path}' has experts cut over groups of ranks; not supported")
        return part

    def _require_complete_module(self) -> None:
        # Under stage 3 and with bf16 there is more than the model file.
        config = self.first.get("ds_config") or {}
        stage = (config.get("zero_optimization") or {}).get("stage", 0)
        if self.first.get("param_shapes") or stage:
            raise CheckpointError(
                f"'{self.models[0].parent}' has no `*zero_pp_rank_*_optim_states.pt`, but the run"
                " kept its master weights there; copy the folder again, with the files of all"
                " ranks (every node writes those of its own)"
            )

    def _check_ranks(self) -> None:
        # Every rank writes its own; with a disk for each node, some are elsewhere.
        counts = self.ranks[0].get("partition_count")
        count = max(counts) if isinstance(counts, list | tuple) and counts else counts
        expected = int(count or self.first.get("dp_world_size") or len(self.optims))
        is_cut = "fp32_flat_groups" in self.ranks[0]
        for files in [self.optims, self.models] if is_cut else [self.optims]:
            if len(files) != expected:
                raise CheckpointError(
                    f"the checkpoint is of {expected} ranks, but '{files[0].parent}' has"
                    f" {len(files)} files like '{files[0].name}'; copy the folder again, with the"
                    " files of all ranks (every node writes those of its own)"
                )

    def count_bytes(self, weights_only: bool) -> int:
        """How many bytes will be read, about."""
        shapes = self.partitions.shapes if self.partitions else {}
        masters = 4 * sum(math.prod(shape) for shape in shapes.values())
        module = self.first["module"]
        others = sum(v.nbytes for k, v in self._tensors(module) if k not in shapes)
        has_state = self.partitions is not None and not weights_only
        states = self.partitions.state_bytes() if self.partitions and has_state else 0
        return masters + others + states

    @staticmethod
    def _tensors(module: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        return ((k, v) for k, v in module.items() if isinstance(v, Tensor))

    def state_dict(self, meter: Meter) -> dict[str, Any]:
        """Masters where they exist, and what the module has otherwise; tied weights are shared."""
        shared: Mapping[str, str] = self.first.get("shared_params") or {}
        result: dict[str, Any] = {}
        own: dict[tuple[Any, ...], Tensor] = {}
        names = dict.fromkeys([*self.first["module"], *self._shapes(), *self._frozen()])
        for name in names:
            if name in shared and name not in self._shapes():
                continue
            result[name] = self._weight(name, own)
            if isinstance(result[name], Tensor):
                meter.add(result[name].nbytes)
        for name, origin in shared.items():
            if name in result:
                continue
            saved = None if self._is_stage_3() else self.first["module"].get(name)
            # Tensors without elements count as shared, since they all have the address 0.
            is_tied = saved is None or (origin in result and result[origin].shape == saved.shape)
            if is_tied and origin in result:
                result[name] = result[origin]
            elif saved is not None:
                result[name] = self._weight(name, own)
        order = {name: result[name] for name in names if name in result}
        return {_plain(name): value for name, value in (order | result).items()}

    def _shapes(self) -> Mapping[str, torch.Size]:
        return self.partitions.shapes if self.partitions else {}

    def _frozen(self) -> Mapping[str, torch.Size]:
        shapes: Mapping[str, torch.Size] = self.first.get("frozen_param_shapes") or {}
        return shapes

    def _is_stage_3(self) -> bool:
        return self.partitions is not None and self.partitions.is_stage_3

    def _weight(self, name: str, own: dict[tuple[Any, ...], Tensor]) -> Any:
        if self.partitions and name in self.partitions.shapes:
            return self.partitions.master(name)
        if name in self._frozen() and (self._is_stage_3() or name not in self.first["module"]):
            return self._frozen_weight(name)
        value = self.first["module"][name]
        if not isinstance(value, Tensor):
            return value
        is_buffer = name in (self.first.get("buffer_names") or ())
        if self._is_stage_3() and not is_buffer and not value.numel():
            raise CheckpointError(
                f"'{self.models[0]}' has no values of '{name}': DeepSpeed does not save parameters"
                " that need gradients but are in no optimizer under stage 3"
            )
        # The same memory twice is the same memory afterwards.
        memory = value.untyped_storage().data_ptr()
        key = (memory, value.storage_offset(), value.shape, value.stride(), value.dtype)
        if not value.numel():
            return value.clone()
        if key not in own:
            own[key] = value.detach().clone()
        return own[key]

    def _frozen_weight(self, name: str) -> Tensor:
        shape = torch.Size(self._frozen()[name])
        parts = []
        for path, content in zip(self.models, self.contents, strict=True):
            fragments = content.get("frozen_param_fragments") or {}
            if name not in fragments:
                raise CorruptCheckpointError(f"'{path}' has no part of the frozen '{name}'")
            parts.append(fragments[name].detach().reshape(-1))
        found, numel = sum(part.numel() for part in parts), math.prod(shape)
        # Parts are ceil(elements / ranks) long, the last ones filled up.
        if not numel <= found < numel + max(1, len(parts)):
            raise CorruptCheckpointError(
                f"the files in '{self.models[0].parent}' have {found} elements of the frozen"
                f" '{name}', which has {numel}"
            )
        return torch.cat(parts)[:numel].clone().view(shape)

    def optimizer(self, meter: Meter) -> dict[str, Any] | None:
        """The optimizer in torch's format; None if there was none."""
        if self.partitions is not None:
            return self.partitions.optimizer(self._order(), meter)
        saved = self.first.get("optimizer")
        if saved is None:
            return None
        if not isinstance(saved, dict) or not {"state", "param_groups"} <= saved.keys():
            raise CheckpointError(
                f"'{self.models[0]}' has an optimizer with masters of DeepSpeed's own (fp16 or"
                " bf16 without ZeRO); only the weights can be read, with `weights_only=True`"
            )
        return copy.deepcopy({key: saved[key] for key in ("state", "param_groups")})

    def _order(self) -> list[str]:
        """The names of the parameters as the optimizer's groups had them."""
        config = (self.first.get("ds_config") or {}).get("zero_optimization") or {}
        names: list[str] = []
        for group in self.first["param_shapes"]:
            saved = list(group)
            if config.get("round_robin_gradients") and not self._is_stage_3():
                # They were dealt out to the ranks like cards; `dealt` has their former places.
                world = len(self.optims)
                dealt = [i for rank in range(world) for i in range(rank, len(saved), world)]
                saved = [name for _, name in sorted(zip(dealt, saved, strict=True))]
            names += saved
        return names


def _plain(name: str) -> str:
    """Without what Lightning before 2.1 put in front."""
    return name.removeprefix("_forward_module.")
