"""What rides along with a state dict, and what users see of a loaded checkpoint."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lightning_zero
from tests.support.distributed import run_on_ranks
from tests.support.models import Regression, mlp, regression_loader
from tests.support.runs import full_state, make_trainer

FORMATS = ["full", "sharded"]


class Versioned(nn.Linear):
    """Doubles weights of files from before version 2."""

    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        value = state_dict[f"{prefix}weight"]
        assert type(value) is Tensor
        assert value.numpy().shape == (7, 7)
        if args[0].get("version", 1) < 2:
            state_dict[f"{prefix}weight"] = value * 2
        super()._load_from_state_dict(state_dict, prefix, *args)


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x

    def get_extra_state(self) -> Any:
        return {"seen": self.seen.clone(), "kinds": Counter("ab")}

    def set_extra_state(self, state: Any) -> None:
        assert type(state["kinds"]) is Counter
        self.seen = torch.tensor(state["seen"].tolist())


class Keeps(pl.Callback):
    """Keeps the weights and a few counts in its own state."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.weights: dict[str, Tensor] = {}
        self.last: Any = np.float64(0)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self.counts["steps"] += 1
        self.last = np.float64(self.counts["steps"] / 3)

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts, "last": self.last, "order": OrderedDict(b=1, a=2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert type(state["counts"]) is Counter
        assert type(state["order"]) is OrderedDict
        state["order"].move_to_end("b")
        self.counts, self.last = state["counts"], state["last"]


class Rides(Regression):
    def __init__(self) -> None:
        super().__init__(_net)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        value = state["net.2.weight"]
        assert type(value) is Tensor
        state["net.2.bias"].zero_()
        torch.save(checkpoint["state_dict"], self.trainer.default_root_dir + f"/{self.global_rank}")
        assert value.tolist() == torch.from_dlpack(value).tolist()
        entries = checkpoint["optimizer_states"][0]["state"]
        self.note("moments", sum(e["exp_avg"].numpy().sum() for e in entries.values()))

    def on_fit_start(self) -> None:
        self.note("loaded", self.net[0].weight.detach())


def _net() -> nn.Sequential:
    return nn.Sequential(Versioned(7, 7), Remembers(), nn.Linear(7, 5))


def _save(strategy: Any, path: Path) -> Any:
    module, kept = Rides(), Keeps()
    trainer = make_trainer(strategy, callbacks=[kept], default_root_dir=path.parent)
    trainer.fit(module, regression_loader())
    trainer.save_checkpoint(path)
    return full_state(module.net[0]), kept.counts, kept.last


def _resume(strategy: Any, path: Path) -> Any:
    module, kept = Rides(), Keeps()
    trainer = make_trainer(strategy, callbacks=[kept], default_root_dir=path.parent, max_epochs=2)
    trainer.fit(module, regression_loader(), ckpt_path=path, weights_only=False)
    return module.notes, full_state(module.net[2]), kept.counts, kept.last, module.net[1].seen


@pytest.mark.parametrize("save_format", FORMATS)
@pytest.mark.parametrize("stage", [1, 3])
def test_what_rides_along_comes_back(stage: int, save_format: str, tmp_path: Path) -> None:
    results = []
    for name, strategy in (
        ("ddp", "ddp"),
        ("zero", partial(lightning_zero.ZeroStrategy, stage, save_format=save_format)),
    ):
        path = tmp_path / f"{name}.ckpt"
        saved = run_on_ranks(_save, 2, strategy, path)
        results.append((saved, run_on_ranks(_resume, 2, strategy, path)))
    (saved, resumed), (saved_, resumed_) = results
    for rank in range(2):
        assert saved[rank][1:] == saved_[rank][1:]
        (notes, state, *rest), (notes_, state_, *rest_) = resumed[rank], resumed_[rank]
        assert torch.equal(notes["loaded"][0], notes_["loaded"][0])
        assert notes["moments"][0] == pytest.approx(notes_["moments"][0], rel=1e-5)
        assert all(torch.equal(state[key], state_[key]) for key in state)
        assert rest[:2] == rest_[:2]
        assert torch.equal(rest[2], rest_[2])


@pytest.mark.parametrize("save_format", FORMATS)
def test_one_file_has_the_versions_of_modules(save_format: str, tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    strategy = partial(lightning_zero.ZeroStrategy, 3, save_format=save_format)
    run_on_ranks(_save, 2, strategy, path)
    if save_format == "sharded":
        lightning_zero.consolidate(path, tmp_path / "one.ckpt")
        path = tmp_path / "one.ckpt"
    # as DDP's file: the callback keeps a numpy scalar
    found = torch.load(path, weights_only=False)["state_dict"]
    assert found._metadata["net.0"] == {"version": 2}
    net = Rides()
    net.load_state_dict(found)
    assert torch.equal(net.net[0].weight, found["net.0.weight"])


# -- failures and contradictions


class Broken(pl.plugins.TorchCheckpointIO):  # type: ignore[name-defined, misc]
    def save_checkpoint(self, *_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")


def _fails(plugins: list[Any], save_format: str, path: Path, options: Any) -> str:
    strategy = partial(lightning_zero.ZeroStrategy, 3, save_format=save_format)
    trainer = make_trainer(strategy, plugins=plugins, default_root_dir=path.parent)
    try:
        trainer.fit(Regression(mlp), regression_loader())
        trainer.save_checkpoint(path, storage_options=options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing failed"


@pytest.mark.parametrize(
    ("plugins", "save_format", "options", "words"),
    [
        ([Broken()], "full", None, r"CheckpointError: .*rank 0: OSError.*No space left"),
        ([Broken()], "sharded", None, r"Misconfig.*Broken would never be called"),
        ([], "sharded", {"a": 1}, r"TypeError: `storage_options` are for a CheckpointIO"),
        ([], "full", {"a": 1}, r"CheckpointError.*`Trainer.save_checkpoint.*storage_options"),
    ],
    ids=["disk_full", "plugin", "options", "options_of_the_file"],
)
def test_a_save_that_can_not_be_raises_on_every_rank(
    plugins: list[Any], save_format: str, options: Any, words: str, tmp_path: Path
) -> None:
    for text in run_on_ranks(_fails, 2, plugins, save_format, tmp_path / "a.ckpt", options):
        assert re.search(words, text), text
