"""Sums run in rank order whatever the own rank is and wherever the result goes."""

from __future__ import annotations

import pytest
import torch

from lightning_zero.comm.gloo import sum_in_rank_order


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
@pytest.mark.parametrize("in_place", [True, False])
def test_every_rank_gets_the_same_bits(world_size: int, in_place: bool) -> None:
    generator = torch.Generator().manual_seed(world_size)
    parts = [torch.randn(1000, generator=generator) * 10.0**i for i in range(world_size)]
    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part
    for rank in range(world_size):
        copies = [part.clone() for part in parts]
        out = copies[rank] if in_place else torch.empty(1000)
        sum_in_rank_order(copies, rank, out)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_own_part_is_left_alone_if_the_result_goes_elsewhere(rank: int) -> None:
    parts = [torch.full((3,), float(i)) for i in range(3)]
    sum_in_rank_order(parts, rank, torch.empty(3))
    assert torch.equal(parts[rank], torch.full((3,), float(rank)))
