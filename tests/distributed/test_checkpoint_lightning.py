"""What users do with checkpoints in Lightning works with folders as it does with files."""

from __future__ import annotations

import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import (
    Checkpoint,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroPrecision, ZeroStrategy
from lightning_zero.checkpoint.consolidate import consolidate
from lightning_zero.checkpoint.folder import is_folder, read_info, read_meta, verify
from tests.support.checkpoints import GLOBAL_BATCH, MODULES, DealtRows, Rich, dataset
from tests.support.compare import assert_same
from tests.support.distributed import run_on_ranks
from tests.support.models import rank, world_size
from tests.support.runs import DDP_UNUSED, make_trainer

FORMATS = ["sharded", "full"]


def data() -> DataLoader[Any]:
    sampler = DealtRows(len(dataset()), rank(), world_size())
    return DataLoader(dataset(), batch_size=GLOBAL_BATCH // world_size(), sampler=sampler)


PATIENCE, IMPATIENCE = timedelta(seconds=20), timedelta(seconds=4)  # of ranks that can't go on


def trainer_for(
    save_format: str, stage: int = 3, stall_timeout: timedelta = PATIENCE, **options: Any
) -> pl.Trainer:
    strategy = partial(
        ZeroStrategy, stage, bucket_bytes=1, save_format=save_format, stall_timeout=stall_timeout
    )
    is_saving = any(isinstance(c, Checkpoint) for c in options.get("callbacks", []))
    defaults = {
        "use_distributed_sampler": False,
        "enable_checkpointing": is_saving,
        "max_epochs": 3,
    }
    return make_trainer(strategy, **{**defaults, **options})


def keep_best_and_last(save_format: str, folder: Path, save_last: Any) -> None:
    saver = ModelCheckpoint(
        folder, monitor="val", save_top_k=1, save_last=save_last, every_n_train_steps=2
    )
    trainer = trainer_for(save_format, callbacks=[saver], val_check_interval=2)
    for _ in range(2):  # the second time finds the first one's
        trainer.fit(MODULES["rich"](), data(), data())
        trainer = trainer_for(save_format, callbacks=[saver], val_check_interval=2)
    if rank() == 0:
        names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
        assert len([name for name in names if not name.startswith("last")]) == 1, names
        assert [name for name in names if name.startswith("last")], names
        assert not [path for path in folder.iterdir() if path.name.startswith(".zero")]
        best = Path(saver.best_model_path)
        assert is_folder(best) == (save_format == "sharded")
    module = MODULES["rich"]()
    trainer = trainer_for(save_format, callbacks=[saver])
    (metrics,) = trainer.validate(module, data(), ckpt_path=saver.best_model_path)
    assert metrics["val"] == pytest.approx(float(saver.best_model_score), rel=1e-5)
    trainer_for(save_format, max_epochs=4).fit(module, data(), ckpt_path=folder / "last.ckpt")
    assert module.notes["loss"]


@pytest.mark.parametrize("save_last", [True, "link"])
@pytest.mark.parametrize("save_format", FORMATS)
def test_model_checkpoint_keeps_the_best_and_the_last(
    save_format: str, save_last: Any, tmp_path: Path
) -> None:
    run_on_ranks(keep_best_and_last, 2, save_format, tmp_path, save_last)


class Edits(Rich):
    """Adds an entry, takes a weight away, and changes another on the way out and in."""

    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False
        self.received: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"note": "kept", "numbers": [1, 2.5]}
        state = checkpoint["state_dict"]
        state["first.bias"] = state["first.bias"] * 0 + 7
        del state["last.bias"]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.received = checkpoint["mine"]
        checkpoint["state_dict"]["gain"].fill_(3.0)


class Saves(pl.Callback):
    def __init__(self, path: Path, **options: Any) -> None:
        self.path, self.options = path, options

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path, **self.options)


def edit(save_format: str, path: Path) -> None:
    trainer_for(save_format, callbacks=[Saves(path)]).fit(Edits(), data())
    module = Edits()
    trainer = trainer_for(save_format)
    with torch.no_grad():
        module.last.bias.fill_(5.0)
    trainer.validate(module, data(), ckpt_path=path)
    assert module.received == {"note": "kept", "numbers": [1, 2.5]}
    assert torch.equal(module.first.bias, torch.full((13,), 7.0))
    assert torch.equal(module.last.bias, torch.full((5,), 5.0))
    assert module.gain.item() == 3.0


@pytest.mark.parametrize("save_format", FORMATS)
def test_edits_of_a_checkpoint_are_honoured(save_format: str, tmp_path: Path) -> None:
    run_on_ranks(edit, 2, save_format, tmp_path / "edited.ckpt")


class Adapters(Rich):
    """Saves what is trained, and loads it on top of the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(500, 500).requires_grad_(False)
        self.strict_loading = False

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        trained = {name for name, param in self.named_parameters() if param.requires_grad}
        full = super().state_dict(*args, **kwargs)
        return {name: value for name, value in full.items() if name in trained}


def save_adapters(save_format: str, path: Path) -> None:
    trainer_for(save_format, callbacks=[Saves(path)]).fit(Adapters(), data())
    files = path.rglob("*") if save_format == "sharded" else [path]
    assert sum(file.stat().st_size for file in files) < 300_000, "the base is 1 MB"
    module = Adapters()
    trainer_for(save_format, max_epochs=4).fit(module, data(), ckpt_path=path)
    assert len(module.notes["loss"]) == 4


@pytest.mark.parametrize("save_format", FORMATS)
def test_adapters_are_saved_alone(save_format: str, tmp_path: Path) -> None:
    run_on_ranks(save_adapters, 2, save_format, tmp_path / "adapters.ckpt")


def save_weights(save_format: str, path: Path) -> None:
    trainer_for(save_format, callbacks=[Saves(path, weights_only=True)]).fit(Rich(), data())
    module = Rich()
    trainer_for(save_format).validate(module, data(), ckpt_path=path)
    with pytest.raises(KeyError, match="only the model"):
        trainer_for(save_format).fit(module, data(), ckpt_path=path)


@pytest.mark.parametrize("save_format", FORMATS)
def test_weights_can_be_saved_without_the_rest(save_format: str, tmp_path: Path) -> None:
    path = tmp_path / "weights.ckpt"
    run_on_ranks(save_weights, 2, save_format, path)
    if save_format == "sharded":
        assert not [name for name in read_info(path).names if "optimizer" in name]


def save_on_rank_0_only(save_format: str, path: Path, when: str) -> None:
    class SavesAlone(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.is_global_zero and when == "during":
                trainer.save_checkpoint(path)

    trainer = trainer_for(save_format, stall_timeout=IMPATIENCE, callbacks=[SavesAlone()])
    trainer.fit(Rich(), data())
    if trainer.is_global_zero:
        trainer.save_checkpoint(path)


@pytest.mark.parametrize("save_format", FORMATS)
def test_saving_on_one_rank_only_is_an_error(save_format: str, tmp_path: Path) -> None:
    path = tmp_path / "alone.ckpt"
    outcomes = run_on_ranks(
        save_on_rank_0_only, 2, save_format, path, "during", expect_failure=True
    )
    assert all("wait for different operations" in outcome.message for outcome in outcomes)
    assert not path.exists()


def different_paths(save_format: str, folder: Path) -> None:
    path = folder / f"at-{rank()}.ckpt"  # as if from a time stamp
    trainer_for(save_format, callbacks=[Saves(path)]).fit(Rich(), data())


@pytest.mark.parametrize("save_format", FORMATS)
def test_all_ranks_save_to_the_path_of_rank_0(save_format: str, tmp_path: Path) -> None:
    run_on_ranks(different_paths, 2, save_format, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["at-0.ckpt"]


def save_after_the_run(save_format: str, path: Path, resume: bool) -> dict[str, Tensor]:
    module = Rich()
    trainer = trainer_for(save_format, stage=2)
    if resume:
        trainer.validate(module, data(), ckpt_path=path)
    else:
        trainer.fit(module, data())
        trainer.save_checkpoint(path)
    return dict(module.state_dict())


@pytest.mark.parametrize("save_format", FORMATS)
def test_a_checkpoint_can_be_saved_after_the_run(save_format: str, tmp_path: Path) -> None:
    path = tmp_path / "after.ckpt"
    (want, _) = run_on_ranks(save_after_the_run, 2, save_format, path, False)
    (got,) = run_on_ranks(save_after_the_run, 1, save_format, path, True)
    assert_same(got, want, exact=True, label="weights")


class Averages(WeightAveraging):
    def __init__(self) -> None:
        super().__init__(avg_fn=lambda old, new, _: 0.9 * old + 0.1 * new)


def average(save_format: str, path: Path, resume: bool) -> dict[str, Tensor]:
    module = Rich()
    callbacks = [Averages(), *([] if resume else [SavesFirstEpoch(path)])]
    trainer = trainer_for(save_format, callbacks=callbacks)
    trainer.fit(module, data(), ckpt_path=path if resume else None)
    return dict(module.state_dict())


class SavesFirstEpoch(Saves):
    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)

    def on_train_end(self, *_: Any) -> None: ...


@pytest.mark.parametrize("save_format", FORMATS)
def test_averages_of_weights_are_resumed(save_format: str, tmp_path: Path) -> None:
    path = tmp_path / "average.ckpt"
    want = run_on_ranks(average, 2, save_format, path, False)
    got = run_on_ranks(average, 2, save_format, path, True)
    assert_same(got, want, exact=True, label="averages")


def fit_plain(strategy: str, path: Path, resume: bool) -> dict[str, Any]:
    """Stock Lightning, without this package."""
    module = Rich()
    options: dict[str, Any] = {"devices": 1} if strategy == "auto" else {}
    callbacks = [] if resume else [SavesFirstEpoch(path)]
    trainer = make_trainer(
        strategy, callbacks=callbacks, max_epochs=3, use_distributed_sampler=False, **options
    )
    trainer.fit(module, data(), ckpt_path=path if resume else None)
    return dict(module.state_dict())


def fit_sharded(stage: int, path: Path, resume: bool) -> dict[str, Any]:
    module = Rich()
    callbacks = [] if resume else [SavesFirstEpoch(path)]
    trainer = trainer_for("sharded", stage, callbacks=callbacks)
    trainer.fit(module, data(), ckpt_path=path if resume else None)
    return dict(module.state_dict())


def test_stock_lightning_and_this_package_resume_each_other(tmp_path: Path) -> None:
    (want, _) = run_on_ranks(fit_plain, 2, DDP_UNUSED, tmp_path / "ddp.ckpt", False)
    for stage in (1, 2, 3):
        for got in run_on_ranks(fit_sharded, 2, stage, tmp_path / "ddp.ckpt", True):
            assert_same(got, want, exact=True, label=f"DDP's file at stage {stage}")
        run_on_ranks(fit_sharded, 2, stage, tmp_path / f"{stage}.ckpt", False)
        out = tmp_path / f"{stage}_whole.ckpt"
        consolidate(tmp_path / f"{stage}.ckpt", out)
        for got in run_on_ranks(fit_plain, 2, DDP_UNUSED, out, True):
            assert_same(got, want, exact=True, label=f"stage {stage} under DDP")
    (got,) = run_on_ranks(fit_plain, 1, "auto", out, True)
    assert_same(got, want, exact=False, label="stage 3 on one device")
    loaded = torch.load(out, weights_only=True)
    assert list(loaded["state_dict"]) == list(Rich().state_dict())


class Hyper(Rich):
    """Hyper-parameters of which one can not be saved safely."""

    def __init__(self, width: int = 3, where: Any = Path("/tmp"), name: str = "net") -> None:
        super().__init__()
        self.save_hyperparameters()


def save_hyper(path: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_for("sharded", callbacks=[Saves(path)]).fit(Hyper(width=5), data())
    return [str(warning.message) for warning in caught]


def test_a_folder_has_the_hyper_parameters_that_are_safe(tmp_path: Path) -> None:
    path, out = tmp_path / "hyper.ckpt", tmp_path / "whole.ckpt"
    (messages, _) = run_on_ranks(save_hyper, 2, path)
    assert any("'where'" in message for message in messages)
    assert read_meta(path)["hyper_parameters"] == {"width": 5, "name": "net"}
    consolidate(path, out)
    loaded = Hyper.load_from_checkpoint(out, strict=True, where=Path("/"))
    assert loaded.hparams["width"] == 5


def precisions(path: Path) -> None:
    plugin = ZeroPrecision("bf16-mixed")
    strategy = partial(ZeroStrategy, 3, save_format="sharded", precision_plugin=plugin)
    make_trainer(strategy, callbacks=[Saves(path)]).fit(Rich(), data())


def test_masters_are_what_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "mixed.ckpt"
    run_on_ranks(precisions, 2, path)
    info = read_info(path)
    assert info.dtypes["model.first.weight"] == torch.float32
    assert info.dtypes["model.seen"] == torch.int64
    assert "model.scratch" not in info.names
    assert info.info["stage"] == 3
    assert info.info["world_size"] == 2


def saves_to(url: str) -> str:
    saver = ModelCheckpoint(url)
    module = Rich()
    try:
        trainer_for("sharded", callbacks=[saver]).fit(module, data())
    except Exception as error:
        assert "loss" not in module.notes, "trained before it was refused"
        return str(error)
    return "works"


def test_folders_on_other_file_systems_are_refused_at_setup() -> None:
    for message in run_on_ranks(saves_to, 2, "memory://checkpoints"):
        assert "save_format='full'" in message


def to_a_url(url: str, save_format: str) -> str:
    try:
        trainer_for(save_format, callbacks=[Saves(url)]).fit(Rich(), data())  # type: ignore[arg-type]
        trainer_for(save_format).validate(Rich(), data(), ckpt_path=url)
    except Exception as error:
        return str(error)
    return "works"


@pytest.mark.parametrize("save_format", FORMATS)
def test_urls_work_or_are_refused(save_format: str, tmp_path: Path) -> None:
    assert run_on_ranks(to_a_url, 2, f"file://{tmp_path}/a.ckpt", save_format) == ["works"] * 2
    (message,) = run_on_ranks(to_a_url, 1, "memory://b.ckpt", save_format)
    if save_format == "full":
        assert message == "works"
    else:
        assert "save_format='full'" in message


class Breaks(Rich):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == 3 and (self.only_rank is None or self.only_rank == rank()):
            raise RuntimeError("a fault of the user's")
        return super().training_step(batch, batch_idx)

    only_rank: int | None = None


def save_on_exception(save_format: str, folder: Path, only_rank: int | None) -> None:
    module = Breaks()
    module.only_rank = only_rank
    trainer = trainer_for(
        save_format, stall_timeout=IMPATIENCE, callbacks=[OnExceptionCheckpoint(folder)]
    )
    trainer.fit(module, data())


@pytest.mark.parametrize("save_format", FORMATS)
def test_a_failing_run_saves_itself(save_format: str, tmp_path: Path) -> None:
    outcomes = run_on_ranks(save_on_exception, 2, save_format, tmp_path, None, expect_failure=True)
    assert all("a fault of the user's" in outcome.message for outcome in outcomes)
    (path,) = tmp_path.iterdir()
    if save_format == "sharded":
        verify(path, every_byte=True)
        assert read_info(path).info["step"] == 3
    else:
        assert torch.load(path, weights_only=True)["global_step"] == 3


def test_one_failing_rank_does_not_hang_the_others(tmp_path: Path) -> None:
    outcomes = run_on_ranks(
        save_on_exception, 2, "sharded", tmp_path, 1, expect_failure=True, timeout=90
    )
    assert all(outcome.is_failure for outcome in outcomes)
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".")]


def resume_from(path: Path) -> str:
    try:
        trainer_for("sharded").fit(Rich(), data(), ckpt_path=path)
    except Exception as error:
        return str(error)
    return "trained"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_folders_of_others_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    dcp.save({"model": {"weight": torch.ones(3)}}, checkpoint_id=tmp_path / "other", no_dist=True)
    for message in run_on_ranks(resume_from, 2, tmp_path / "empty"):
        assert "no manifest" in message
    for message in run_on_ranks(resume_from, 2, tmp_path / "other"):
        assert f"lightning-zero convert {tmp_path / 'other'}" in message
