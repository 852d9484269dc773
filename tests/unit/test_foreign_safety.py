"""Files of other systems that would execute something, and the file that is made of good ones."""

from __future__ import annotations

import io
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lightning_zero.checkpoint import foreign
from lightning_zero.checkpoint.failures import CheckpointError, CorruptCheckpointError
from lightning_zero.checkpoint.foreign import convert, read_foreign
from tests.unit.test_foreign import make_run


class Attack:
    """Makes a folder when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.proof),)


class Mine:
    """A class of the user."""

    def __init__(self) -> None:
        self.value = 3


@pytest.fixture
def proof(tmp_path: Path) -> Any:
    path = tmp_path / "executed"
    yield path
    assert not path.exists()


def dcp_folder(folder: Path, extra: Any = None) -> Path:
    state = {"model": {"w": torch.arange(6.0).view(2, 3)}, "extra": extra}
    with pytest.MonkeyPatch.context() as patch:
        # Saving without a process group warns that it does.
        patch.setattr(
            "torch.distributed.checkpoint.state_dict_saver.warnings.warn", lambda *a, **k: 0
        )
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("where", ["mp_rank_00_model", "bf16_zero_pp_rank_1_mp_rank_00_optim"])
def test_deepspeed_files_are_not_executed(tmp_path: Path, proof: Path, where: str) -> None:
    inner = make_run().save(tmp_path / "run")
    path = inner / f"{where}_states.pt"
    torch.save({"module": {}, "optimizer_state_dict": {"x": Attack(proof)}}, path)
    with pytest.raises(
        CheckpointError, match=rf"{where}_states.pt' holds a '\w+.mkdir', which runs commands"
    ):
        read_foreign(tmp_path / "run")


def test_the_old_format_of_torch_save_is_not_executed_either(tmp_path: Path, proof: Path) -> None:
    inner = make_run().save(tmp_path / "run")
    path = inner / "mp_rank_00_model_states.pt"
    torch.save({"module": Attack(proof)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"model_states.pt' holds a"):
        read_foreign(tmp_path / "run")


def test_an_object_of_dcp_is_not_executed(tmp_path: Path, proof: Path) -> None:
    folder = dcp_folder(tmp_path / "run", Attack(proof))
    with pytest.raises(CheckpointError, match=r"__0_0.distcp' holds a '\w+.mkdir'"):
        read_foreign(folder)
    assert read_foreign(folder, weights_only=True)["state_dict"].keys() == {"w"}


def test_metadata_and_meta_are_not_executed(tmp_path: Path, proof: Path) -> None:
    folder = dcp_folder(tmp_path / "run")
    torch.save({"callbacks": Attack(proof)}, folder / "meta.pt")
    with pytest.raises(CheckpointError, match=r"meta.pt' holds a '\w+.mkdir'"):
        read_foreign(folder)
    (folder / ".metadata").write_bytes(pickle.dumps(Attack(proof)))
    with pytest.raises(CorruptCheckpointError, match=r"\.metadata' is not the metadata"):
        read_foreign(folder)


def test_metadata_can_not_point_out_of_the_folder(tmp_path: Path) -> None:
    folder = dcp_folder(tmp_path / "run")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = "../other"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"outside of the folder, '\.\./other'"):
        read_foreign(folder)


def test_dcp_files_that_are_missing_cut_or_mixed(tmp_path: Path) -> None:
    folder = dcp_folder(tmp_path / "run")
    path = folder / "__0_0.distcp"
    data = path.read_bytes()
    path.write_bytes(data[:100])
    with pytest.raises(CorruptCheckpointError, match=r"__0_0.distcp' has 100 bytes; too few for"):
        read_foreign(folder)
    other = io.BytesIO()
    torch.save(torch.zeros(3, 2, dtype=torch.float64), other)
    path.write_bytes(other.getvalue() + data[len(other.getvalue()) :])
    with pytest.raises(CorruptCheckpointError, match=r"another tensor where|is damaged"):
        read_foreign(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"__0_0.distcp' is missing"):
        read_foreign(folder)


def test_a_class_of_the_user_is_read_once_it_is_trusted(tmp_path: Path) -> None:
    make_run(beside={"hyper_parameters": {"mine": Mine()}}).save(tmp_path)
    before = set(torch.serialization.get_safe_globals())
    with pytest.raises(CheckpointError, match=r"holds a 'tests.unit.test_foreign_safety.Mine'"):
        read_foreign(tmp_path)
    with torch.serialization.safe_globals([Mine]):
        checkpoint = read_foreign(tmp_path)
    assert checkpoint["hyper_parameters"]["mine"].value == 3
    assert set(torch.serialization.get_safe_globals()) == before


# ---- one file


def test_the_file_is_all_there_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(beside={"callbacks": {"a": 1}})
    run.save(tmp_path / "run")
    out = tmp_path / "new" / "file.ckpt"
    convert(tmp_path / "run", out)
    saved = torch.load(out)
    assert saved["callbacks"] == {"a": 1}
    head, emb = saved["state_dict"]["head.weight"], saved["state_dict"]["emb.weight"]
    assert head.data_ptr() == emb.data_ptr()
    largest = sum(w.nbytes for w in run.params.values()) * 3
    assert out.stat().st_size < largest + 60_000

    def fail(content: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    before = out.read_bytes()
    monkeypatch.setattr(foreign.torch, "save", fail)
    with pytest.raises(OSError, match=r"disk full"):
        convert(tmp_path / "run", out)
    assert out.read_bytes() == before
    assert list(out.parent.iterdir()) == [out]


def test_weights_alone(tmp_path: Path) -> None:
    run = make_run(beside={"callbacks": {}, "epoch": 2})
    run.save(tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "file.ckpt", weights_only=True)
    saved = torch.load(tmp_path / "file.ckpt")
    assert saved.keys() == {"state_dict", "epoch", "global_step", "pytorch-lightning_version"}
    with pytest.raises(CheckpointError, match=r"is a folder; give the name of a file"):
        convert(tmp_path / "run", tmp_path)


def test_safetensors(tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    run = make_run()
    run.save(tmp_path / "run")
    out = tmp_path / "file.safetensors"
    convert(tmp_path / "run", out)
    weights = load_file(out)
    assert torch.equal(weights["head.weight"], run.params["emb.weight"])
    assert weights.keys() == {*run.params, *run.frozen, *run.buffers, *run.tied}


def test_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run().save(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(CheckpointError, match=r"pip install safetensors"):
        convert(tmp_path / "run", tmp_path / "file.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
