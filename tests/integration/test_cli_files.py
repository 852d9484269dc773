"""The command `lightning-zero`, given a single file, or what is no checkpoint."""

from __future__ import annotations

import argparse
import pickle
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.integration.test_cli import Call, call

__all__ = ["call"]  # a fixture


class Unknown:
    """Only unpickling makes it."""


def fill(folder: Path) -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    checkpoint: dict[str, Any] = {
        "pytorch-lightning_version": "2.6.0",
        "epoch": 3,
        "global_step": 7,
        "state_dict": module.state_dict(),
        "hyper_parameters": {"namespace": argparse.Namespace(a=1), "mine": Unknown()},
        "callbacks": {"A": Counter("aab")},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(3, 4)}}}],
    }
    torch.save(checkpoint, folder / "odd.ckpt")
    torch.save({**checkpoint, "hyper_parameters": {}}, folder / "run.ckpt")
    torch.save(module.state_dict(), folder / "weights.pt")
    torch.save(module, folder / "module.pt")
    (folder / "cut.ckpt").write_bytes((folder / "run.ckpt").read_bytes()[:900])
    (folder / "empty.ckpt").touch()
    (folder / "text.txt").write_text("a text of some length")
    (folder / "old.pkl").write_bytes(pickle.dumps({1: 2}))
    zipfile.ZipFile(folder / "other.zip", "w").writestr("a", "b")
    for name in ("empty", "hf", "runs", "parts"):
        (folder / name).mkdir()
    (folder / "hf" / "config.json").write_text("{}")
    (folder / "parts" / "__0_0.distcp").touch()
    torch.save({"a": 1}, folder / "runs" / "last.ckpt")
    return module


def test_inspect_shows_a_file_whatever_objects_are_in_it(call: Call, tmp_path: Path) -> None:
    fill(tmp_path)
    for name, words in {
        "odd.ckpt": ["checkpoint of Lightning", "global_step", "7", "0.weight", "(4, 3)"],
        "run.ckpt": ["checkpoint of Lightning", "optimizer_states", "float32", "48"],
        "weights.pt": ["state dict", "1.bias", "(4,)", "16 B"],
        "module.pt": ["Sequential"],
    }.items():
        done = call("inspect", tmp_path / name, "--verify=true")
        assert done.returncode == 0, done.stderr
        assert all(word in done.stdout for word in [*words, "every byte is right"]), done.stdout


def test_a_changed_byte_of_a_file_is_found(call: Call, tmp_path: Path) -> None:
    fill(tmp_path)
    path = tmp_path / "weights.pt"
    data, wanted = bytearray(path.read_bytes()), torch.load(path)["0.weight"]
    data[data.find(wanted.numpy().tobytes())] ^= 1
    path.write_bytes(data)
    assert call("inspect", path).returncode == 0
    done = call("inspect", path, "--verify=true")
    assert done.returncode == 1
    assert "is damaged" in done.stderr


def test_consolidate_copies_a_file_or_takes_its_weights(call: Call, tmp_path: Path) -> None:
    module, out = fill(tmp_path), tmp_path / "out"
    for name in ("odd", "run"):
        done = call("consolidate", tmp_path / f"{name}.ckpt", out / f"{name}.ckpt")
        assert done.returncode == 0, done.stderr
        assert "is one file already" in done.stdout
        assert (out / f"{name}.ckpt").read_bytes() == (tmp_path / f"{name}.ckpt").read_bytes()
    safetensors = pytest.importorskip("safetensors.torch")
    for name in ("run.ckpt", "weights.pt"):
        path = out / f"{name}.safetensors"
        assert call("consolidate", tmp_path / name, path).returncode == 0
        found = safetensors.load_file(path)
        assert found.keys() == module.state_dict().keys()
        assert all(torch.equal(found[key], value) for key, value in module.state_dict().items())
        assert "1.bias" in call("inspect", path).stdout
    done = call("consolidate", tmp_path / "run.ckpt", out / "w.ckpt", "--weights_only=true")
    assert done.returncode == 0, done.stderr
    left = torch.load(out / "w.ckpt", weights_only=True)
    assert left["epoch"] == 3
    assert "optimizer_states" not in left


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cut.ckpt", "was cut off"),
        ("empty.ckpt", "is empty"),
        ("text.txt", "no file of torch.save"),
        ("old.pkl", "a bare pickle"),
        ("other.zip", "none of torch.save"),
        ("empty", "the folder is empty"),
        ("hf", "from_pretrained"),
        ("runs", "runs/last.ckpt"),
        ("parts", "The save was cut off"),
        ("missing/run.ckpt", "does not exist"),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "consolidate", "convert"])
def test_what_is_no_checkpoint_is_said_to_be_what_it_is(
    call: Call, command: str, name: str, words: str, tmp_path: Path
) -> None:
    fill(tmp_path)
    out = [] if command == "inspect" else [tmp_path / "out.ckpt"]
    done = call(command, tmp_path / name, *out)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out.ckpt").exists()
    is_file = (tmp_path / name).is_file()
    said = "lightning-zero inspect" if command == "convert" and is_file else words
    assert said in done.stderr.replace("\n", " ")
    if command == "convert":  # and what it knows
        assert "DeepSpeed" in done.stderr
        assert "FSDP" in done.stderr
