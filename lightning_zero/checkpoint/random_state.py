"""The states of the random number generators of one rank, in plain numbers and tensors."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from lightning_zero.comm.collectives import Collectives


def random_states(device: torch.device) -> dict[str, Any]:
    """The generators of Python, NumPy (if it is in use), PyTorch and the device."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = [kind, torch.from_numpy(keys.astype("int64")), *rest]
    return states


def gather_random_states(device: torch.device, collectives: Collectives) -> list[dict[str, Any]]:
    """:func:`random_states` by rank. Collective."""
    # numbers travel without torch.save, which somebody may have put a double in place of
    plain = tree_map_only(
        torch.Tensor, lambda t: _Numbers(t.tolist(), t.dtype), random_states(device)
    )
    gathered = collectives.all_gather_object(plain, "the random states")
    return [
        tree_map_only(_Numbers, lambda n: torch.tensor(n.values, dtype=n.dtype), states)
        for states in gathered
    ]


@dataclass(frozen=True)
class _Numbers:
    values: list[int]
    dtype: torch.dtype


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Set the generators for which there is a state."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        kind, keys, *rest = states["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
