"""Tensors to save in checkpoint folders, and ranks that are no processes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from lightning_zero.checkpoint.folder import TensorPart, load_tensors
from lightning_zero.checkpoint.rectangles import rectangles


def whole(tensor: Tensor) -> TensorPart:
    """A tensor that one rank holds alone."""
    return TensorPart(tuple(tensor.shape), tensor.dtype, [((0,) * tensor.dim(), tensor)])


def wholes(tensors: Mapping[str, Tensor]) -> dict[str, TensorPart]:
    return {name: whole(tensor) for name, tensor in tensors.items()}


def part_of(tensor: Tensor, start: int, stop: int) -> TensorPart:
    """The elements `start .. stop` in memory order, as a rank holds them."""
    chunks = []
    for rectangle in rectangles(tuple(tensor.shape), tensor.stride(), start, stop):
        chunk = tensor
        for dim, (offset, length) in enumerate(
            zip(rectangle.offsets, rectangle.lengths, strict=True)
        ):
            chunk = chunk.narrow(dim, offset, length)
        chunks.append((rectangle.offsets, chunk))
    return TensorPart(tuple(tensor.shape), tensor.dtype, chunks)


def shards(tensors: Mapping[str, Tensor], rank: int, world_size: int) -> dict[str, TensorPart]:
    """Every tensor cut into as many runs of memory as there are ranks."""
    return {
        name: part_of(
            tensor,
            tensor.numel() * rank // world_size,
            tensor.numel() * (rank + 1) // world_size,
        )
        for name, tensor in tensors.items()
    }


def odd_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Shapes, strides and dtypes of all sorts."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "model.net.0.weight": random(7, 5),
        "model.scale": random(),
        "model.empty": random(0, 3),
        "model.conv": random(4, 3, 5, 5).to(memory_format=torch.channels_last),
        "model.half": random(33).bfloat16(),
        "model.tiny": random(9).to(torch.float8_e4m3fn),
        "model.count": torch.arange(6).reshape(2, 3),
        "model.mask": random(17) > 0,
        "model.wave": torch.complex(random(3, 4), random(3, 4)),
        "optimizer_0.state.net.0.weight.exp_avg": random(7, 5).t(),
    }


def blank(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Zeros with the same shapes and strides."""
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def bits(tensor: Tensor) -> Tensor:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    return flat.copy_(tensor.reshape(-1)).view(torch.uint8)


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, name
        assert found[name].dtype == tensor.dtype, name
        if math.prod(tensor.shape):
            assert torch.equal(bits(found[name]), bits(tensor)), name


def load_whole(path: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of a folder."""
    found = blank(like)
    load_tensors(path, wholes(found))
    return found
