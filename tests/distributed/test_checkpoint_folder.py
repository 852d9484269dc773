"""Checkpoint folders that several processes write, and others read."""

from __future__ import annotations

import errno
import os
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_zero.checkpoint.failures import CheckpointError
from lightning_zero.checkpoint.files import TensorFile
from lightning_zero.checkpoint.folder import (
    TensorPart,
    load_tensors,
    read_info,
    read_meta,
    save_folder,
    verify,
)
from lightning_zero.comm.collectives import Collectives
from lightning_zero.comm.groups import collectives_for
from tests.support.distributed import run_on_ranks
from tests.support.folders import assert_same, load_whole, odd_tensors, shards


def ranks() -> Collectives:
    return collectives_for(torch.device("cpu"), timedelta(seconds=60), {})


def save_shards(path: Path, seed: int = 0, meta: dict[str, Any] | None = None) -> None:
    collectives = ranks()
    parts = shards(odd_tensors(seed), collectives.rank, collectives.world_size)
    save_folder(path, parts, meta or {"seed": seed}, {"seed": seed}, collectives)


def load_shards(path: Path) -> None:
    """Each rank gets its own run of every tensor, whoever wrote what."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    expected = shards(odd_tensors(), rank, world_size)
    wanted = shards(
        {name: torch.zeros_like(t) for name, t in odd_tensors().items()}, rank, world_size
    )
    load_tensors(path, wanted)
    for name, part in expected.items():
        for (_, found), (_, chunk) in zip(wanted[name].chunks, part.chunks, strict=True):
            assert_same({name: found}, {name: chunk})


@pytest.mark.parametrize(("writers", "readers"), [(2, 3), (3, 2)])
def test_saved_by_some_and_loaded_by_others(tmp_path: Path, writers: int, readers: int) -> None:
    path = tmp_path / "last.ckpt"
    run_on_ranks(save_shards, writers, path, init_group=True)
    verify(path, every_byte=True)
    assert read_meta(path) == {"seed": 0}
    assert len([name for name in read_info(path).files if name.endswith(".distcp")]) == writers
    run_on_ranks(load_shards, readers, path, init_group=True)
    assert_same(load_whole(path, odd_tensors()), odd_tensors())
    assert os.listdir(tmp_path) == ["last.ckpt"]


def load_with_dcp(path: Path) -> None:
    tensors = odd_tensors()
    plain = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(plain, checkpoint_id=path)
    assert_same(plain, tensors)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    expected = {name: tensors[name] for name in ("model.net.0.weight", "model.conv")}
    for placement in Shard(0), Shard(1), Replicate():
        found = {
            name: distribute_tensor(torch.zeros_like(tensor), mesh, [placement])
            for name, tensor in expected.items()
        }
        dcp.load(found, checkpoint_id=path)
        full = {}
        for name, tensor in found.items():
            assert isinstance(tensor, DTensor)
            full[name] = tensor.full_tensor()
        assert_same(full, expected)


@pytest.mark.parametrize("writers", [2, 3])
def test_stock_dcp_reads_it_into_tensors_and_dtensors(tmp_path: Path, writers: int) -> None:
    run_on_ranks(save_shards, writers, tmp_path / "a", init_group=True)
    run_on_ranks(load_with_dcp, 2, tmp_path / "a", init_group=True)


def save_dtensors(path: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = odd_tensors()
    state = {
        name: distribute_tensor(tensors[name], mesh, [Shard(1)])
        for name in ("model.net.0.weight", "model.conv")
    }
    dcp.save(state, checkpoint_id=path)


def test_sharded_folders_of_stock_dcp_are_read(tmp_path: Path) -> None:
    run_on_ranks(save_dtensors, 2, tmp_path / "a", init_group=True)
    tensors = odd_tensors()
    expected = {name: tensors[name] for name in ("model.net.0.weight", "model.conv")}
    assert_same(load_whole(tmp_path / "a", expected), expected)


def fail_on_one_rank(path: Path, failing: int, where: str) -> None:
    """A save that fails on one rank, and then one that does not."""
    save_shards(path, seed=1)
    full = OSError(errno.ENOSPC, "No space left on device")
    target = {
        "write": mock.patch.object(TensorFile, "write", side_effect=full),
        "fsync": mock.patch.object(os, "fsync", side_effect=full),
        "rename": mock.patch.object(os, "rename", side_effect=full),
    }[where]
    message = ""
    with target if dist.get_rank() == failing else mock.MagicMock():
        try:
            save_shards(path, seed=2)
        except CheckpointError as error:
            message = str(error)
    assert f"rank {failing}: OSError: [Errno 28] No space left on device" in message, message
    ranks().all_gather_object(None, "everybody has failed")
    assert os.listdir(path.parent) == [path.name]
    assert read_meta(path) == {"seed": 1}
    assert_same(load_whole(path, odd_tensors()), odd_tensors(1))
    ranks().all_gather_object(None, "everybody has looked")
    save_shards(path, seed=3)
    assert_same(load_whole(path, odd_tensors()), odd_tensors(3))


@pytest.mark.parametrize(
    ("failing", "where"),
    [(0, "write"), (1, "write"), (0, "fsync"), (1, "fsync"), (0, "rename")],
)
def test_an_error_on_one_rank_is_an_error_on_all(tmp_path: Path, failing: int, where: str) -> None:
    run_on_ranks(fail_on_one_rank, 2, tmp_path / "last.ckpt", failing, where, init_group=True)


def save_into_a_file(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rank 0: (NotADirectory|FileExists)Error"):
        save_shards(path)


def test_an_impossible_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    run_on_ranks(save_into_a_file, 2, tmp_path / "file" / "a", init_group=True)


def save_what_only_rank_1_has(path: Path) -> None:
    collectives = ranks()
    mine = TensorPart((2,), torch.float32, [((0,), torch.ones(2))])
    save_folder(path, {"t": mine} if collectives.rank else {}, {}, {}, collectives)
    with pytest.raises(CheckpointError, match="overlap or leave holes in 't'"):
        save_folder(path, {"t": mine}, {}, {}, collectives)
    shape = (2,) if collectives.rank else (3,)
    differing = TensorPart(shape, torch.float32, [])
    with pytest.raises(CheckpointError, match="different shapes or dtypes of 't'"):
        save_folder(path, {"t": differing}, {}, {}, collectives)


def test_ranks_may_have_different_tensors_but_not_contradict_each_other(tmp_path: Path) -> None:
    run_on_ranks(save_what_only_rank_1_has, 2, tmp_path / "a", init_group=True)
    assert_same(load_whole(tmp_path / "a", {"t": torch.ones(2)}), {"t": torch.ones(2)})
