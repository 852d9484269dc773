"""Checkpoint folders that one process writes and reads."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import threading
import zipfile
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_zero.checkpoint import files as files_module
from lightning_zero.checkpoint import workplace
from lightning_zero.checkpoint.checksum import BLOCK, crc_of_tail
from lightning_zero.checkpoint.failures import CheckpointError, CorruptCheckpointError
from lightning_zero.checkpoint.folder import (
    TensorPart,
    is_folder,
    load_tensors,
    read_info,
    read_meta,
    remove_folder,
    save_folder,
    verify,
)
from lightning_zero.comm.collectives import SingleRank
from tests.support.folders import (
    assert_same,
    blank,
    load_whole,
    odd_tensors,
    part_of,
    whole,
    wholes,
)

INFO = {"step": 7, "stage": 3, "names": ["a", "b"]}
META = {"epoch": 1, "callbacks": {"x": [1.5, None, "s"]}, "loops": {"t": torch.arange(3)}}
# one of a block and a half, so that files have inner blocks
LARGE = {"large": torch.arange(BLOCK * 3 // 8, dtype=torch.float32)}


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def save(path: Path, tensors: dict[str, Tensor], meta: dict[str, Any] | None = None) -> None:
    save_folder(path, wholes(tensors), META if meta is None else meta, INFO, SingleRank())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(tmp_path / "last.ckpt", {**odd_tensors(), **LARGE})
    return tmp_path / "last.ckpt"


def hidden(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(".")]


def test_all_comes_back(saved: Path) -> None:
    tensors = {**odd_tensors(), **LARGE}
    assert_same(load_whole(saved, tensors), tensors)
    assert read_meta(saved).keys() == META.keys()
    info = read_info(saved)
    assert info.info == INFO
    assert sorted(info.names) == sorted(tensors)
    assert info.shapes["model.conv"] == (4, 3, 5, 5)
    assert info.dtypes["model.half"] == torch.bfloat16
    assert sorted(info.files) == [".metadata", "__0_0.distcp", "meta.pt"]
    assert info.bytes == sum(info.files.values())
    assert is_folder(saved)
    seen: list[tuple[int, int]] = []
    verify(saved, every_byte=True, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (info.bytes, info.bytes)
    assert hidden(saved.parent) == []


def test_stock_dcp_reads_it(saved: Path, tmp_path: Path) -> None:
    tensors = {**odd_tensors(), **LARGE}
    found = blank(tensors)
    dcp.load(found, checkpoint_id=saved)
    assert_same(found, tensors)
    dcp_to_torch_save(saved, tmp_path / "one.pt")
    nested = torch.load(tmp_path / "one.pt", weights_only=True)
    flat = {f"model.{key}": value for key, value in nested.pop("model").items()}
    for name, entries in nested.pop("optimizer_0", {}).get("state", {}).items():
        flat.update({f"optimizer_0.state.{name}.{key}": v for key, v in entries.items()})
    assert_same({**flat, **nested}, tensors)


def test_what_stock_dcp_wrote_is_read(tmp_path: Path) -> None:
    tensors = odd_tensors()
    del tensors["model.tiny"], tensors["model.wave"]
    dcp.save(dict(tensors), checkpoint_id=tmp_path / "dcp")
    assert_same(load_whole(tmp_path / "dcp", tensors), tensors)
    row = torch.zeros(2, 5)
    load_tensors(
        tmp_path / "dcp",
        {"model.net.0.weight": TensorPart((7, 5), torch.float32, [((3, 0), row)])},
    )
    assert torch.equal(row, tensors["model.net.0.weight"][3:5])
    assert not is_folder(tmp_path / "dcp")
    assert read_info(tmp_path / "dcp").shapes["model.conv"] == (4, 3, 5, 5)
    with pytest.raises(CheckpointError, match=r"it has no meta\.pt"):
        read_meta(tmp_path / "dcp")
    with pytest.raises(CheckpointError, match="it has no manifest"):
        verify(tmp_path / "dcp", every_byte=False)


def test_every_item_is_a_valid_zip_archive(saved: Path) -> None:
    metadata = dcp.FileSystemReader(saved).read_metadata()
    data = (saved / "__0_0.distcp").read_bytes()
    for index, place in metadata.storage_data.items():
        item = data[place.offset : place.offset + place.length]
        assert zipfile.ZipFile(BytesIO(item)).testzip() is None, index.fqn


def test_the_manifest_has_true_checksums(saved: Path) -> None:
    manifest = json.loads((saved / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        data = (saved / name).read_bytes()
        assert entry["bytes"] == len(data)
        assert int(entry["crc32"], 16) == zlib.crc32(data)


def test_the_checksum_of_a_tail() -> None:
    head, tail = os.urandom(1000), os.urandom(12345)
    whole_crc = zlib.crc32(head + tail)
    assert crc_of_tail(zlib.crc32(head), whole_crc, len(tail)) == zlib.crc32(tail)


def test_parts_dtypes_and_strides_other_than_the_saved_ones(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conv, large = odd_tensors()["model.conv"], LARGE["large"]
    for stage in (files_module._STAGE, 64):
        monkeypatch.setattr(files_module, "_STAGE", stage)
        halves = torch.zeros(4, 3, 5, 5, dtype=torch.float64)
        middle = torch.zeros(4, 1, 3, 2)
        wanted = {
            "model.conv": TensorPart((4, 3, 5, 5), torch.float64, [((0, 0, 0, 0), halves)]),
            "large": part_of(torch.zeros_like(large), 70, 2000),
        }
        load_tensors(saved, wanted)
        assert torch.equal(halves, conv.double())
        assert torch.equal(wanted["large"].chunks[0][1], large[70:2000])
        load_tensors(
            saved, {"model.conv": TensorPart((4, 3, 5, 5), conv.dtype, [((0, 1, 2, 3), middle)])}
        )
        assert torch.equal(middle, conv[:, 1:2, 2:5, 3:5])


def test_two_threads_read_large_tensors(saved: Path) -> None:
    tensors = {"t": torch.randn(BLOCK), "u": torch.randn(2 * BLOCK)}
    save(saved, tensors)
    assert tensors["t"].nbytes // BLOCK >= files_module._SHARED
    assert_same(load_whole(saved, tensors), tensors)
    flip(saved / "__0_0.distcp", 5 * BLOCK)
    with pytest.raises(CorruptCheckpointError, match=r"damaged: bytes 5242880 \.\. 6291456"):
        load_whole(saved, tensors)


def test_strided_tensors_are_staged_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "_STAGE", 1000)
    monkeypatch.setattr(files_module, "_SMALL", 500)
    monkeypatch.setattr(files_module, "_FLUSH", 5000)
    tensors = {
        "t": torch.randn(50, 70).t(),
        "cut": torch.randn(2, 300, 9)[:, ::2],
        "conj": torch.randn(600, dtype=torch.complex64).conj(),
    }
    save(tmp_path / "a", tensors)
    assert_same(load_whole(tmp_path / "a", tensors), tensors)
    verify(tmp_path / "a", every_byte=True)


def test_missing_names_and_other_shapes_are_listed(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="does not have 'x', 'y'"):
        load_tensors(saved, wholes({"x": torch.zeros(1), "y": torch.zeros(1), **odd_tensors()}))
    with pytest.raises(
        CheckpointError, match=r"model.scale: \(\) in the checkpoint, \(2,\) wanted"
    ):
        load_tensors(saved, wholes({"model.scale": torch.zeros(2)}))
    outside = TensorPart((7, 5), torch.float32, [((6, 0), torch.zeros(2, 5))])
    with pytest.raises(CheckpointError, match="does not lie within"):
        load_tensors(saved, {"model.net.0.weight": outside})
    with pytest.raises(CheckpointError, match="does not exist"):
        read_info(saved.parent / "other")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        read_info(saved.parent)


def test_holes_and_overlaps_are_refused_on_save(tmp_path: Path) -> None:
    def save_chunks(*chunks: tuple[tuple[int, ...], Tensor]) -> None:
        part = TensorPart((4, 2), torch.float32, list(chunks))
        save_folder(tmp_path / "a", {"t": part}, {}, {}, SingleRank())

    two, three = torch.zeros(2, 2), torch.zeros(3, 2)
    for chunks in [((0, 0), two)], [((0, 0), three), ((1, 0), three)], [((3, 0), two)]:
        with pytest.raises(CheckpointError, match="overlap or leave holes in 't'"):
            save_chunks(*chunks)
    with pytest.raises(CheckpointError, match="overlap or leave holes"):
        save_chunks(((0, 0), two), ((1, 0), two))
    with pytest.raises(CheckpointError, match=r"is torch.float64, not torch.float32"):
        save_chunks(((0, 0), torch.zeros(4, 2, dtype=torch.float64)))
    assert os.listdir(tmp_path) == []
    save_chunks(((0, 0), two), ((2, 0), two))
    assert is_folder(tmp_path / "a")


class Custom:
    """Not something that can be loaded safely."""


def test_meta_that_could_not_be_loaded_is_refused_with_its_key(saved: Path) -> None:
    meta = {"callbacks": {"good": 1, "Mine": {"state": [1, Custom()]}}}
    with pytest.raises(CheckpointError, match=r"`meta\['callbacks'\]\['Mine'\]\['state'\]\[1\]`"):
        save(saved, odd_tensors(), meta)
    with pytest.raises(CheckpointError, match=r"`meta\['f'\]` can not be saved"):
        save(saved, odd_tensors(), {"f": lambda: 1})
    with pytest.raises(CheckpointError, match="`info` can not be written as JSON"):
        save_folder(saved, {}, {}, {"path": Path()}, SingleRank())
    assert read_meta(saved)["epoch"] == 1  # the old one
    assert hidden(saved.parent) == []


# --- damage


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "meta.pt", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncate", "empty", "delete", "flip", "flip_first"])
def test_damaged_files_are_named(saved: Path, name: str, damage: str) -> None:
    file = saved / name
    size = file.stat().st_size
    if damage == "truncate":
        os.truncate(file, size - 1)
    elif damage == "empty":
        os.truncate(file, 0)
    elif damage == "delete":
        file.unlink()
        if name == "manifest.json":
            # what remains is a folder of stock DCP
            assert not is_folder(saved)
            return
    else:
        flip(file, 0 if damage == "flip_first" else size // 2)
    with pytest.raises(CorruptCheckpointError, match=f"{name}' (is|has)"):
        verify(saved, every_byte=True)
    if name == "meta.pt":
        with pytest.raises(CorruptCheckpointError, match=f"{name}' (is|has)"):
            read_meta(saved)
    elif not (name == "__0_0.distcp" and damage == "flip_first"):  # nobody reads that byte's block
        with pytest.raises(CorruptCheckpointError, match=f"{name}' (is|has)"):
            load_whole(saved, {**odd_tensors(), **LARGE})


def test_any_flipped_bit_of_the_data_is_found_on_load(saved: Path) -> None:
    tensors = {**odd_tensors(), **LARGE}
    file = saved / "__0_0.distcp"
    good = file.read_bytes()
    for position in range(0, len(good), len(good) // 23):
        flip(file, position)
        with pytest.raises(CorruptCheckpointError, match="distcp' is damaged"):
            load_whole(saved, tensors)
        file.write_bytes(good)
    assert_same(load_whole(saved, tensors), tensors)


def test_files_of_another_checkpoint_are_found(saved: Path) -> None:
    tensors = odd_tensors()
    other = saved.parent / "other"
    save(
        other,
        {**{name: -t if t.dtype == torch.float32 else t for name, t in tensors.items()}, **LARGE},
    )
    shutil.copy(other / "__0_0.distcp", saved / "__0_0.distcp")  # the same size
    with pytest.raises(CorruptCheckpointError, match="distcp' is damaged"):
        load_whole(saved, tensors)


class Hostile:
    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.witness),)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "meta.pt"])
def test_pickles_are_not_executed(saved: Path, name: str) -> None:
    witness = saved.parent / "witness"
    tensors = odd_tensors()
    bomb = pickle.dumps(Hostile(witness))
    if name == "meta.pt":
        archive = BytesIO()
        torch.save(Hostile(witness), archive)
        bomb = archive.getvalue()
    (saved / name).write_bytes(bomb)
    read = read_meta if name == "meta.pt" else lambda path: load_whole(path, tensors)
    with pytest.raises(CorruptCheckpointError, match=name):
        read(saved)
    with pytest.raises(CorruptCheckpointError, match=name):
        verify(saved, every_byte=True)
    # and where sizes and checksums have been adjusted, or there are none
    if name == "meta.pt":
        from lightning_zero.checkpoint.checksum import FileRecord
        from lightning_zero.checkpoint.index import dump_manifest, parse_manifest

        file = saved / "manifest.json"
        records = parse_manifest(file.read_bytes(), file).files
        file.write_bytes(dump_manifest({}, {**records, name: FileRecord.of(bomb)}))
    else:
        (saved / "manifest.json").unlink()
    with pytest.raises(CorruptCheckpointError, match=name):
        read(saved)
    assert not witness.exists()


def test_metadata_that_points_outside_is_refused(saved: Path) -> None:
    metadata = dcp.FileSystemReader(saved).read_metadata()
    for place in metadata.storage_data.values():
        place.relative_path = "../other"
    (saved / "manifest.json").unlink()
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpointError, match=r"outside of the folder"):
        load_whole(saved, odd_tensors())


# --- replacing, leftovers, removing


def test_a_save_replaces_files_and_checkpoints_and_nothing_else(saved: Path) -> None:
    new = {"t": torch.ones(3)}
    save(saved, new)
    assert read_info(saved).names == ["t"]
    (saved.parent / "file").write_text("a checkpoint of another kind")
    save(saved.parent / "file", new)
    assert_same(load_whole(saved.parent / "file", new), new)
    (saved.parent / "empty").mkdir()
    save(saved.parent / "empty", new)
    assert is_folder(saved.parent / "empty")
    precious = saved.parent / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("...")
    for action in (lambda: save(precious, new), lambda: remove_folder(precious)):
        with pytest.raises(CheckpointError, match="not a checkpoint; it is left alone"):
            action()
    assert os.listdir(precious) == ["thesis.tex"]
    assert hidden(saved.parent) == []


def test_a_checkpoint_that_was_moved_aside_is_put_back(saved: Path) -> None:
    tensors = odd_tensors()

    def kill_between_the_renames() -> None:
        place = workplace.Workplace(saved)
        os.rename(saved, place._folder / "old")
        os.close(place._handle)

    kill_between_the_renames()
    assert is_folder(saved)
    kill_between_the_renames()
    assert_same(load_whole(saved, tensors), tensors)
    kill_between_the_renames()
    save(saved.parent / "other", tensors)
    assert sorted(os.listdir(saved.parent)) == ["last.ckpt", "other"]
    assert_same(load_whole(saved, tensors), tensors)


def test_leftovers_are_removed_and_live_saves_are_not(saved: Path) -> None:
    # A lock belongs to an open file, so a live save of this process is like one of another.
    with workplace.Workplace(saved) as live:
        dead = workplace.Workplace(saved)
        (dead.new / "file").write_text("x")
        os.close(dead._handle)
        save(saved.parent / "other", odd_tensors())
        assert live.new.is_dir()
        assert not dead.new.exists()
    assert hidden(saved.parent) == []


def test_readers_wait_while_a_live_save_replaces_the_folder(saved: Path) -> None:
    with workplace.Workplace(saved) as live:
        os.rename(saved, live._folder / "old")
        timer = threading.Timer(0.2, os.rename, (live._folder / "old", saved))
        timer.start()
        assert is_folder(saved)
        timer.join()


def test_without_locks_only_old_leftovers_are_removed(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workplace, "fcntl", None)
    dead = workplace.Workplace(saved)
    save(saved.parent / "other", odd_tensors())
    assert dead.new.is_dir()
    os.utime(dead._lock, (0, 0))
    save(saved.parent / "other", odd_tensors())
    assert hidden(saved.parent) == []
    os.close(dead._handle)


def test_remove(saved: Path) -> None:
    remove_folder(saved)
    remove_folder(saved)
    assert os.listdir(saved.parent) == []


def test_an_error_of_the_rename_leaves_the_old_one(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def fail(source: Path, target: Path) -> None:
        if Path(source).name == "new":
            raise OSError(5, "planned")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        with pytest.raises(CheckpointError, match=r"rank 0: OSError: .*planned"):
            save(saved, {"t": torch.ones(3)})
    assert_same(load_whole(saved, odd_tensors()), odd_tensors())
    assert hidden(saved.parent) == []


def test_chunks_that_are_empty_are_no_chunks(tmp_path: Path) -> None:
    part = TensorPart((2,), torch.float32, [((0,), torch.ones(2)), ((2,), torch.ones(0))])
    save_folder(tmp_path / "a", {"t": part, "u": whole(torch.ones(0))}, None, {}, SingleRank())
    out = torch.zeros(2)
    wanted = {"t": TensorPart((2,), torch.float32, [((0,), out), ((1,), torch.ones(0))])}
    load_tensors(tmp_path / "a", wanted)
    assert out.tolist() == [1, 1]
    assert read_meta(tmp_path / "a") == {}
