"""What rides along with a state dict: versions of modules, types, attributes, order."""

from __future__ import annotations

import datetime
import io
import re
import time
from collections import Counter, OrderedDict, deque
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import nn

from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint.consolidate import consolidate
from tests.distributed.test_checkpoint_lightning import FORMATS, Saves, data, trainer_for
from tests.support.checkpoints import Rich
from tests.support.compare import assert_same
from tests.support.distributed import run_on_ranks
from tests.support.models import rank
from tests.support.runs import DDP_UNUSED, make_trainer


class Halves(nn.Linear):
    """From version 2 on its weights are saved as they are; older ones are mended on the way in."""

    _version = 2

    def _load_from_state_dict(
        self, state: Any, prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        self.loaded_version = local_metadata.get("version")
        if self.loaded_version is None or self.loaded_version < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state, prefix, local_metadata, *rest)


class Versioned(Rich):
    def __init__(self) -> None:
        super().__init__()
        self.last = Halves(13, 5)


def keep_versions(save_format: str, path: Path) -> None:
    saved = Versioned()
    trainer_for(save_format, max_epochs=1, callbacks=[Saves(path)]).fit(saved, data())
    loaded = Versioned()
    trainer_for(save_format, max_epochs=1).validate(loaded, data(), ckpt_path=path)
    assert loaded.last.loaded_version == 2
    assert_same(dict(loaded.state_dict()), dict(saved.state_dict()), exact=True, label="weights")
    if save_format == "sharded":
        if rank() == 0:
            consolidate(path, path.with_name("one.ckpt"))
        torch.distributed.barrier()
        path = path.with_name("one.ckpt")
    other = path.with_name("ddp.ckpt")
    module = Versioned()
    make_trainer(DDP_UNUSED, callbacks=[Saves(other)], use_distributed_sampler=False).fit(
        module, data()
    )
    ours, theirs = (torch.load(file, weights_only=True)["state_dict"] for file in (path, other))
    assert type(ours) is type(theirs) is OrderedDict
    assert list(ours) == list(theirs)
    assert ours._metadata == theirs._metadata
    assert type(ours._metadata) is OrderedDict
    resumed = Versioned.load_from_checkpoint(path, map_location="cpu")
    assert torch.equal(resumed.last.weight, saved.last.weight)


@pytest.mark.parametrize("save_format", FORMATS)
def test_versions_of_modules_are_saved(save_format: str, tmp_path: Path) -> None:
    run_on_ranks(keep_versions, 2, save_format, tmp_path / "versioned.ckpt")


class Point(NamedTuple):
    x: Any
    y: Any


class Kept(pl.Callback):
    """Keeps objects of many kinds; what it finds in them again is left for the test."""

    def __init__(self, state: Any, hook_keys: list[str] | None = None) -> None:
        self.state, self.found = state, None
        self.hook_keys: list[str] = [] if hook_keys is None else hook_keys

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.found = state

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.hook_keys += list(checkpoint)


def states(module: nn.Module | None = None) -> dict[str, Any]:
    shared = [torch.arange(3), Counter("aab")]
    parameter = {} if module is None else {"weight": module.first.weight}  # type: ignore[union-attr]
    return {
        "shared": (shared, shared),
        "ordered": OrderedDict(b=np.float32(2.5), a=deque([1], maxlen=2)),
        "named": Point({Path("a"): {1, 2}}, np.arange(4).reshape(2, 2)),
        "bytes": io.BytesIO(b"abc"),
        "when": datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc),
        **parameter,
    }


class KeptInFit(Kept):
    """Keeps a sharded parameter as well."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.state = states(module)


def keep_states(strategy: Any, path: Path) -> Any:
    options = {"use_distributed_sampler": False}
    kept = KeptInFit(states())
    make_trainer(strategy, callbacks=[kept, Saves(path)], **options).fit(Rich(), data())
    again, module = KeptInFit(states()), Rich()
    trainer = make_trainer(strategy, callbacks=[again], max_epochs=2, **options)
    trainer.fit(module, data(), ckpt_path=path, weights_only=False)
    found: Any = again.found
    assert found["shared"][0] is found["shared"][1]
    found["shared"][0][1]["new"] += 1
    assert found["bytes"].read() == b"abc"
    assert found["weight"].detach().numpy().shape == (13, 7)
    kinds = {key: type(value) for key, value in found.items()}
    inner = [type(part) for part in (*found["ordered"].values(), *found["named"])]
    return again.hook_keys, kinds, inner, found["shared"][0], found["when"]


@pytest.mark.parametrize("save_format", FORMATS)
def test_states_of_callbacks_come_back_as_under_ddp(save_format: str, tmp_path: Path) -> None:
    zero = partial(ZeroStrategy, 3, bucket_bytes=1, save_format=save_format)
    ours = run_on_ranks(keep_states, 2, zero, tmp_path / "zero.ckpt")
    theirs = run_on_ranks(keep_states, 2, DDP_UNUSED, tmp_path / "ddp.ckpt")
    for mine, other in zip(ours, theirs, strict=True):
        assert mine[0] == other[0]  # hooks see the same keys, in the same order
        (kinds, inner, shared, when), (kinds_, inner_, shared_, when_) = mine[1:], other[1:]
        kinds.pop("weight"), kinds_.pop("weight")  # a parameter of its own under DDP
        assert (kinds, inner, shared[1], when) == (kinds_, inner_, shared_[1], when_)
        assert torch.equal(shared[0], shared_[0])


class Odd:
    """Of no kind that a folder holds."""


def refuse(place: str, folder: Path) -> tuple[str, int]:
    class Extra(nn.Module):
        def get_extra_state(self) -> Any:
            return {"odd": Odd()}

        def set_extra_state(self, state: Any) -> None: ...

    module = Rich()
    if place == "module":
        module.extra = Extra()
    state = {"a": [1, {"odd": Odd()}]} if place == "callback" else {}
    callbacks = [ModelCheckpoint(folder, every_n_train_steps=1), Kept(state)]
    trainer = trainer_for("sharded", callbacks=callbacks)
    if place == "later":
        callbacks[1].on_train_start = lambda *_: callbacks[1].state.update(late=Odd())  # type: ignore[attr-defined, method-assign]
    try:
        trainer.fit(module, data())
    except Exception as error:
        return f"{type(error).__name__}: {error}", trainer.global_step
    return "nothing happened", trainer.global_step


@pytest.mark.parametrize(
    ("place", "words", "step"),
    [
        ("callback", r"`callbacks\['Kept'\]\['a'\]\[1\]\['odd'\]` is a \S+\.Odd", 0),
        ("module", r"`state_dict\['extra\._extra_state'\]\['odd'\]` is a", 0),
        ("later", r"`checkpoint\['callbacks'\]\['Kept'\]\['late'\]` is a", 1),
    ],
)
def test_what_a_folder_can_not_hold_is_refused_by_all_ranks(
    place: str, words: str, step: int, tmp_path: Path
) -> None:
    for text, at in run_on_ranks(refuse, 2, place, tmp_path):
        assert re.search(rf"CheckpointError: .*{words}.*save_format='full'", text), text
        assert at == step  # before anything is trained, where it can be known


def save_where_one_can_not(save_format: str, folder: Path) -> str:
    class Fails(Kept):
        def on_save_checkpoint(self, *_: Any) -> None:
            if rank() == 1:
                raise ValueError("this hook fails on rank 1")

    trainer = trainer_for(save_format, callbacks=[Fails({}), Saves(folder / "x.ckpt")])
    try:
        trainer.fit(Rich(), data())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing happened"


@pytest.mark.parametrize("save_format", FORMATS)
def test_a_hook_that_fails_on_one_rank_ends_the_run_on_all(
    save_format: str, tmp_path: Path
) -> None:
    for text in run_on_ranks(save_where_one_can_not, 2, save_format, tmp_path):
        assert "this hook fails on rank 1" in text


def load_where_one_can_not(path: Path) -> str:
    trainer = trainer_for("full", max_epochs=1)
    try:
        trainer.fit(Rich(), data(), ckpt_path=path if rank() == 0 else path.with_name("missing"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing happened"


def test_a_file_that_is_missing_on_one_rank_ends_the_run_on_all(tmp_path: Path) -> None:
    run_on_ranks(save_plainly, 2, tmp_path / "x.ckpt")
    for text in run_on_ranks(load_where_one_can_not, 2, tmp_path / "x.ckpt"):
        assert "missing" in text
        assert "not found" in text


def save_plainly(path: Path) -> None:
    trainer_for("full", max_epochs=1, callbacks=[Saves(path)]).fit(Rich(), data())


def save_in_the_background(path: Path) -> None:
    trainer = trainer_for("full", max_epochs=1, plugins=[Slow()], callbacks=[SavesEarly(path)])
    trainer.fit(Rich(), data())


class Slow(AsyncCheckpointIO):
    """Writes when the run has gone on."""

    def __init__(self) -> None:
        super().__init__(Late())


class Late(TorchCheckpointIO):
    def save_checkpoint(self, *args: Any, **options: Any) -> None:
        time.sleep(1.0)
        super().save_checkpoint(*args, **options)


class SavesEarly(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)
            trainer.strategy.checkpoint_io = TorchCheckpointIO()
            trainer.save_checkpoint(self.path.with_name("now.ckpt"))
            trainer.strategy.checkpoint_io = self.io  # type: ignore[attr-defined]

    def setup(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self.io = trainer.strategy.checkpoint_io


def test_a_file_that_is_written_in_the_background_is_of_its_step(tmp_path: Path) -> None:
    run_on_ranks(save_in_the_background, 2, tmp_path / "late.ckpt")
    late, now = (torch.load(tmp_path / f"{n}.ckpt", weights_only=True) for n in ("late", "now"))
    for key in ("state_dict", "optimizer_states", "global_step", "lr_schedulers"):
        assert_same(late[key], now[key], exact=True, label=key)
