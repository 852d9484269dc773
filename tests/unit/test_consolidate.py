"""One file from a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from lightning_zero.checkpoint import consolidate as module
from lightning_zero.checkpoint import safetensors_format
from lightning_zero.checkpoint.consolidate import consolidate
from lightning_zero.checkpoint.failures import CheckpointError, CorruptCheckpointError
from lightning_zero.checkpoint.folder import save_folder
from lightning_zero.comm.collectives import SingleRank
from tests.support.folders import assert_same, wholes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def here(name: str) -> dict[str, str]:
    return {"__tensor__": name}


TENSORS = {
    "model.emb.weight": torch.randn(10, 4),
    "model.scale": torch.tensor(2.0),
    "model.half": torch.randn(3).bfloat16(),
    "model.empty": torch.zeros(0, 2),
    "model.steps": torch.arange(3),
    "optimizer_0.state.emb.weight.exp_avg": torch.randn(10, 4),
}
META: dict[str, Any] = {
    "epoch": 3,
    "state_dict": {
        "emb.weight": here("model.emb.weight"),
        "steps": here("model.steps"),
        "scale": here("model.scale"),
        "half": here("model.half"),
        "empty": here("model.empty"),
        "head.weight": here("model.emb.weight"),
        "inline": torch.ones(2),
    },
    "optimizer_states": [
        {
            "state": {
                0: {"step": 5.0, "exp_avg": here("optimizer_0.state.emb.weight.exp_avg")},
                1: {},
            },
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}],
        }
    ],
    "callbacks": {"EMA": {"shadow": [(here("model.scale"), 1)]}},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_folder(tmp_path / "folder", wholes(TENSORS), META, {}, SingleRank())
    return tmp_path / "folder"


def weights() -> dict[str, Tensor]:
    found = {name.removeprefix("model."): t for name, t in TENSORS.items() if "model." in name}
    return {**found, "inline": torch.ones(2)}


def test_a_plain_checkpoint(folder: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    out = tmp_path / "sub" / "model.ckpt"
    assert consolidate(folder, out, progress=lambda *state: seen.append(state)) == [out]
    assert seen[-1][0] == seen[-1][1] > 0
    found = torch.load(out, weights_only=True)
    state = found["state_dict"]
    assert list(state) == list(META["state_dict"])
    assert_same(state, {**weights(), "head.weight": TENSORS["model.emb.weight"]})
    assert state["head.weight"].data_ptr() == state["emb.weight"].data_ptr()
    optimizer = found["optimizer_states"][0]
    assert optimizer["param_groups"] == META["optimizer_states"][0]["param_groups"]
    moment = TENSORS["optimizer_0.state.emb.weight.exp_avg"]
    assert torch.equal(optimizer["state"][0]["exp_avg"], moment)
    assert optimizer["state"][0]["step"] == 5.0
    ((shadow, one),) = found["callbacks"]["EMA"]["shadow"]
    assert (shadow.item(), one, found["epoch"]) == (2.0, 1, 3)
    consolidate(folder, out, weights_only=True)
    assert torch.load(out, weights_only=True).keys() == {"epoch", "state_dict"}
    assert os.listdir(out.parent) == ["model.ckpt"]


def test_one_safetensors_file(folder: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    seen: list[tuple[int, int]] = []
    out = tmp_path / "model.safetensors"
    assert consolidate(folder, out, progress=lambda *state: seen.append(state)) == [out]
    assert seen[-1][0] == seen[-1][1] > 0
    assert_same(library.load_file(out), weights())

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = torch.nn.Embedding(10, 4)
            self.head = torch.nn.Linear(4, 10, bias=False)
            self.head.weight = self.emb.weight

    model = Tied()
    missing, _ = library.load_model(model, out, strict=False)
    assert not missing
    assert torch.equal(model.head.weight, TENSORS["model.emb.weight"])


def test_the_bytes_of_a_safetensors_file(folder: Path, tmp_path: Path) -> None:
    """Read without the library, by the format's definition."""
    out = tmp_path / "model.safetensors"
    consolidate(folder, out)
    data = out.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert header.pop("__metadata__") == {"format": "pt", "head.weight": "emb.weight"}
    assert header.keys() == weights().keys()
    begin, end = header["emb.weight"]["data_offsets"]
    raw = bytearray(data[8 + size + begin : 8 + size + end])
    found = torch.frombuffer(raw, dtype=torch.float32).reshape(header["emb.weight"]["shape"])
    assert torch.equal(found, TENSORS["model.emb.weight"])
    assert size % 8 == 0


def test_several_safetensors_files_and_back(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "model.safetensors"
    files = consolidate(folder, out, max_shard_bytes=100)
    index = json.loads((out.parent / "model.safetensors.index.json").read_text())
    assert files[0].name == "model-00001-of-00002.safetensors"
    assert files[-1].name == "model.safetensors.index.json"
    assert set(index["weight_map"].values()) == {file.name for file in files[:-1]}
    assert index["weight_map"].keys() == weights().keys()
    assert sorted(os.listdir(out.parent)) == sorted(file.name for file in files)
    if library := pytest.importorskip("safetensors.torch"):
        found: dict[str, Tensor] = {}
        for file in files[:-1]:
            found |= library.load_file(file)
        assert_same(found, weights())
    consolidate(folder, out)
    assert not (out.parent / "model.safetensors.index.json").exists()


def test_a_folder_of_stock_dcp(tmp_path: Path) -> None:
    tensors = {name: t for name, t in TENSORS.items() if t.numel()}
    dcp.save(dict(tensors), checkpoint_id=tmp_path / "dcp")
    consolidate(tmp_path / "dcp", tmp_path / "a.ckpt")
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    names = [name for name in tensors if name.startswith("model.")]
    assert_same(state, {name.removeprefix("model."): tensors[name] for name in names})


def test_refusals_leave_the_old_file(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.ckpt"
    out.write_text("old")
    with pytest.raises(ValueError, match="not 'bin'"):
        consolidate(folder, tmp_path / "a.bin")
    save_folder(tmp_path / "b", {}, {"x": [here("gone")]}, {}, SingleRank())
    with pytest.raises(CheckpointError, match="does not have 'gone'"):
        consolidate(tmp_path / "b", out)
    save_folder(tmp_path / "c", wholes({"z": torch.ones(2) * 1j}), {}, {}, SingleRank())
    with pytest.raises(CheckpointError, match=r"no dtype for z \(torch.complex64\)"):
        consolidate(tmp_path / "c", out, kind="safetensors")
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "__0_0.distcp").write_bytes(data)
    for kind in "ckpt", "safetensors":
        with pytest.raises(CorruptCheckpointError, match="distcp' is damaged"):
            consolidate(folder, out, kind=kind)
    assert out.read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["b", "c", "folder", "model.ckpt"]


@pytest.mark.parametrize("kind", ["ckpt", "safetensors"])
def test_a_file_that_is_not_what_was_written_is_noticed(
    folder: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def then_damage(write: Any) -> Any:
        """The disk changes one byte of a tensor."""

        def write_and_damage(*args: Any) -> None:
            write(*args)
            (path,) = [arg for arg in args if isinstance(arg, Path)]
            pattern = bytes(TENSORS["model.emb.weight"].view(torch.uint8).flatten().tolist())
            data = path.read_bytes()
            place = data.index(pattern)
            changed = bytes([pattern[0] ^ 1]) + pattern[1:]
            path.write_bytes(data[:place] + changed + data[place + len(pattern) :])

        return write_and_damage

    monkeypatch.setattr(safetensors_format, "write", then_damage(safetensors_format.write))
    monkeypatch.setattr(torch, "save", then_damage(torch.save))
    with pytest.raises(CheckpointError, match=r"emb.weight' in .* is not what was written"):
        consolidate(folder, tmp_path / f"out.{kind}")
    assert os.listdir(tmp_path) == ["folder"]


MEASURE = """
import resource, sys
from lightning_zero.checkpoint.consolidate import consolidate

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

# once without much data, for the memory of all that is imported and allocated in any case
consolidate(sys.argv[2], sys.argv[3] + ".small." + sys.argv[4])
before = peak()
consolidate(sys.argv[1], sys.argv[3] + "." + sys.argv[4])
print(peak() - before)
"""


@pytest.mark.parametrize(("kind", "limit_mb"), [("safetensors", 45), ("ckpt", 130)])
def test_memory(folder: Path, tmp_path: Path, kind: str, limit_mb: int) -> None:
    """100 MB in 10 MB tensors."""
    large = {f"model.{i}": torch.randn(2_500_000) for i in range(10)}
    save_folder(tmp_path / "large", wholes(large), {}, {}, SingleRank())
    command = [sys.executable, "-c", MEASURE, tmp_path / "large", folder, tmp_path / "out", kind]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert int(output) < limit_mb * 1e6, f"{int(output) / 1e6:.0f} MB"


def test_the_batches_are_bounded(folder: Path, tmp_path: Path) -> None:
    entries = [
        safetensors_format.Entry(f"t{i}", (module._BATCH // 12,), torch.float32) for i in range(7)
    ]
    assert [len(s) for s in safetensors_format.split(entries, module._BATCH)] == [3, 3, 1]
