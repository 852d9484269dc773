"""How DeepSpeed cuts parameters into flat partitions, and how to put them together again.

[Note: DeepSpeed's partitions] Every rank's ``*_optim_states.pt`` has, per group of parameters, one
flat fp32 tensor and the optimizer's state of that tensor: one entry per element. Which parameters
are in it, in which order, is told by ``param_shapes`` of the model file. Two ranks, parameters
``aaaaa`` and ``bbbb``::

    stages 1, 2   |a a a a a b|b b b . . .|  all parameters in a row, filled up to a multiple of
                     rank 0      rank 1      2 * ranks elements, and cut into equal partitions

    stage 3       |a a a b b|a a . b b|      every parameter by itself cut into parts of
                    rank 0    rank 1         ceil(elements / ranks), the last ones filled up

For stages 1 and 2 masters are saved without what fills up the end, states with it; that is behind
everything else, so both are addressed alike. ``param_alignment_paddings`` of newer versions are the
elements between one parameter and the next. (``param_slice_mappings``, also there, is of no use: it
ignores the order that ``round_robin_gradients`` makes.) A group of stage 3 is a group of the
optimizer or a part of one (``sub_group_size``).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.checkpoint.failures import CheckpointError, CorruptCheckpointError
from lightning_zero.checkpoint.foreign_unpickle import Meter

_MASTERS = "single_partition_of_fp32_groups"
_MASTERS_3 = "fp32_flat_groups"
# Partitions of stages 1 and 2 are filled up to a multiple of this number times the ranks.
_ALIGNMENT = 2


class Piece(NamedTuple):
    """Elements ``start .. start + numel`` of the flat tensor of a group on a rank."""

    rank: int
    group: int
    start: int
    numel: int


class Partitions:
    """The flat tensors of all ranks.

    Args:
        files: the optimizer file of each rank.
        ranks: what is in them under ``optimizer_state_dict``.
        groups: per group, the shapes of its parameters by name, in their order.

    Attributes:
        pieces: by name of a parameter, where its elements are, in their order.
        shapes: by name.

    Raises:
        CheckpointError: if the format is not known.
        CorruptCheckpointError: if sizes contradict each other; names file and parameter.
    """

    def __init__(
        self,
        files: Sequence[Path],
        ranks: Sequence[dict[str, Any]],
        groups: Sequence[Mapping[str, torch.Size]],
    ) -> None:
        self._files, self._ranks, self._groups = files, ranks, groups
        first = ranks[0]
        # The optimizer for bf16 without stage 2 or 3 does not name its stage.
        self.is_stage_3 = _MASTERS_3 in first
        key = _MASTERS_3 if self.is_stage_3 else _MASTERS
        if first.get("zero_stage", 1) not in ((3,) if self.is_stage_3 else (1, 2)):
            raise CheckpointError(
                f"'{files[0]}' is of ZeRO stage {first['zero_stage']}, which is not known here;"
                " convert it with the `zero_to_fp32.py` of the DeepSpeed that wrote it"
            )
        self._masters: list[list[Tensor]] = []
        for file, rank in zip(files, ranks, strict=True):
            if len(rank.get(key, ())) != len(groups):
                raise CorruptCheckpointError(
                    f"'{file}' should have {len(groups)} tensors in '{key}', one for each group of"
                    f" parameters, but has {len(rank.get(key, ()))}"
                )
            self._masters.append([tensor.detach() for tensor in rank[key]])
        self.shapes = {name: torch.Size(shape) for g in groups for name, shape in g.items()}
        self.pieces = self._cut_each() if self.is_stage_3 else self._cut_in_a_row()
        self._check()

    @property
    def group_of(self) -> dict[str, int]:
        """The index of a parameter's group, by name, in the order of groups."""
        return {name: index for index, group in enumerate(self._groups) for name in group}

    def master(self, name: str) -> Tensor:
        """The whole master weight of a parameter, in memory of its own."""
        return self._join(name, lambda rank, group: self._masters[rank][group])

    def _join(self, name: str, source: Callable[[int, int], Tensor]) -> Tensor:
        shape, pieces = self.shapes[name], self.pieces[name]
        parts = [source(piece.rank, piece.group) for piece in pieces]
        out = torch.empty(shape, dtype=parts[0].dtype if parts else torch.float32)
        flat, position = out.view(-1), 0
        for piece, part in zip(pieces, parts, strict=True):
            values = part.detach().view(-1)[piece.start : piece.start + piece.numel]
            flat[position : position + piece.numel] = values
            position += piece.numel
        return out

    def _cut_in_a_row(self) -> dict[str, list[Piece]]:
        pieces: dict[str, list[Piece]] = {}
        gaps = self._ranks[0].get("param_alignment_paddings")
        for group, shapes in enumerate(self._groups):
            sizes = [masters[group].numel() for masters in self._masters]
            ends = list(itertools.accumulate(sizes))
            begin = used = 0
            for index, (name, shape) in enumerate(shapes.items()):
                used = begin + math.prod(shape)
                pieces[name] = []
                for rank, (size, end) in enumerate(zip(sizes, ends, strict=True)):
                    start, stop = max(begin, end - size), min(used, end)
                    if start < stop:
                        piece = Piece(rank, group, start - (end - size), stop - start)
                        pieces[name].append(piece)
                begin = used + (gaps[group][index] if gaps else 0)
            if not used <= ends[-1] < begin + _ALIGNMENT * len(sizes):
                raise CorruptCheckpointError(
                    f"group {group} has {used} elements according to the model file, but the"
                    f" partitions in {self._files[0].parent} have {ends[-1]} together"
                )
        return pieces

    def _cut_each(self) -> dict[str, list[Piece]]:
        pieces: dict[str, list[Piece]] = {}
        sizes = [tensor.numel() for tensor in self._masters[0]]
        for group, shapes in enumerate(self._groups):
            start = 0
            for name, shape in shapes.items():
                numel = math.prod(shape)
                share = -(-numel // len(self._ranks))
                lengths = [min(share, max(0, numel - r * share)) for r in range(len(self._ranks))]
                pieces[name] = [Piece(r, group, start, n) for r, n in enumerate(lengths) if n]
                start += share
            if start != sizes[group]:
                raise CorruptCheckpointError(
                    f"'{self._files[0]}' has {sizes[group]} elements in group {group}, but the"
                    f" parameters of it take {start} on every rank"
                )
        return pieces

    def _check(self) -> None:
        for name, pieces in self.pieces.items():
            found, expected = sum(p.numel for p in pieces), math.prod(self.shapes[name])
            if found != expected:
                raise CorruptCheckpointError(
                    f"the files in '{self._files[0].parent}' have {found} elements of '{name}',"
                    f" which has {expected}; files of different checkpoints may have been mixed"
                )
            for piece in pieces:
                size = self._masters[piece.rank][piece.group].numel()
                if piece.start < 0 or piece.numel < 0 or piece.start + piece.numel > size:
                    raise CorruptCheckpointError(
                        f"'{self._files[piece.rank]}' has {size} elements in group {piece.group},"
                        f" too few for '{name}'"
                    )

    # ---- the optimizer

    def optimizer(self, order: Sequence[str], meter: Meter) -> dict[str, Any]:
        """The optimizer in the format of ``Optimizer.state_dict`` with whole tensors.

        Args:
            order: the names of the parameters in the order of their indices.
            meter: told of every tensor.

        Raises:
            CheckpointError: if the state is not in the files.
            CorruptCheckpointError: if it is of another size than the weights.
        """
        states = self._states()
        groups = [
            {key: value for key, value in group.items() if key not in ("params", "step")}
            | {"params": []}
            for group in states[0]["param_groups"]
        ]
        owner = [
            index for index, group in enumerate(states[0]["param_groups"]) for _ in group["params"]
        ]
        if len(owner) != len(self._groups):
            raise CorruptCheckpointError(
                f"'{self._files[0]}' has an optimizer of {len(owner)} flat tensors for"
                f" {len(self._groups)} groups of parameters"
            )
        state: dict[int, dict[str, Any]] = {}
        group_of = self.group_of
        by_group = sorted(order, key=lambda name: owner[group_of[name]])  # keeps order within
        for index, name in enumerate(by_group):
            origin = owner[group_of[name]]
            groups[origin]["params"].append(index)
            entries = self._state_of(name, group_of[name], states, meter)
            step = states[0]["param_groups"][origin].get("step")
            if entries and step is not None:
                entries.setdefault("step", _step(step))
            if entries:
                state[index] = entries
        return {"state": state, "param_groups": groups}

    def state_bytes(self) -> int:
        """How many bytes :meth:`optimizer` reads, about."""
        state = self._states()[0]["state"].get(0, {})
        tensors = [v for v in state.values() if isinstance(v, Tensor) and v.dim()]
        elements = sum(math.prod(shape) for shape in self.shapes.values())
        return elements * sum(tensor.element_size() for tensor in tensors)

    def _states(self) -> list[dict[str, Any]]:
        key = "optimizer_state_dict" if self.is_stage_3 else "base_optimizer_state"
        for file, rank in zip(self._files, self._ranks, strict=True):
            if not isinstance(rank.get(key), dict) or "param_groups" not in rank[key]:
                raise CheckpointError(
                    f"'{file}' does not have the options of the optimizer (DeepSpeed leaves them"
                    " out with `elastic_checkpoint`, and the state too if it was removed or lies"
                    " on NVMe); only the weights can be read, with `weights_only=True`"
                )
        return [rank[key] for rank in self._ranks]

    def _state_of(
        self, name: str, group: int, states: Sequence[dict[str, Any]], meter: Meter
    ) -> dict[str, Any]:
        pieces = self.pieces[name]
        found = [states[piece.rank]["state"].get(group) for piece in pieces]
        if not any(found):  # never stepped
            return {}
        entries: dict[str, Any] = {}
        for key, value in found[0].items():
            if not isinstance(value, Tensor) or not value.dim():
                is_tensor = isinstance(value, Tensor)
                entries[key] = value.clone() if is_tensor else value
                if key == "step":
                    entries[key] = _step(value)
                continue
            for piece, content in zip(pieces, found, strict=True):
                part = (content or {}).get(key)
                if not isinstance(part, Tensor) or part.numel() < piece.start + piece.numel:
                    raise CorruptCheckpointError(
                        f"'{self._files[piece.rank]}' has no '{key}', or a shorter one, for the"
                        f" part of '{name}' that is in it"
                    )
            entries[key] = self._join(name, functools.partial(_entry, states, key))
            meter.add(entries[key].nbytes)
        return entries


def _entry(states: Sequence[dict[str, Any]], key: str, rank: int, group: int) -> Tensor:
    value: Tensor = states[rank]["state"][group][key]
    return value


def _step(value: Any) -> Tensor:
    # Optimizers of torch count in a tensor, DeepSpeed's own in an int.
    return torch.tensor(float(value))
