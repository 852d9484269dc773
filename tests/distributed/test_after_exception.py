"""After an exception that the user catches the module is what it was, and trains on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_zero
from tests.support.distributed import run_on_ranks
from tests.support.models import rank
from tests.support.runs import DDP, STAGES, StrategyLike, fine_strategy, make_trainer

SECONDS = 60.0
PLACES = (
    "training_step",
    "forward",
    "backward",
    "before_step",
    "batch_end",
    "validation",
    "window",
    "train_end",
)


class Mishap(LookupError):
    """What the cases raise."""


class Lit(pl.LightningModule):
    """Raises once, at one place, on some ranks."""

    def __init__(self, place: str, ranks: tuple[int, ...], at: int = 3, kind: type = Mishap):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.register_buffer("seen", torch.zeros(()))
        self.place, self.ranks, self.at, self.kind = place, ranks, at, kind

    def mishap(self, place: str, batch_idx: int) -> None:
        if (place, batch_idx) == (self.place, self.at) and rank() in self.ranks:
            self.place = "none"
            raise self.kind("the planned mishap")

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = x + torch.tanh(layer(x))
            if index == 1 and self.training:
                self.mishap("forward", self.index)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.index = batch_idx
        self.mishap("training_step", batch_idx)
        out = self(batch)
        if self.place == "backward":
            out.register_hook(lambda grad: self.mishap("backward", batch_idx))
        return out.pow(2).mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.mishap("before_step", self.index)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.mishap("batch_end", batch_idx)
        self.mishap("window", batch_idx - 1)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self(batch)
        self.mishap("validation", batch_idx + 3 if self.global_step else -1)

    def on_train_end(self) -> None:
        self.mishap("train_end", 3)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def data() -> DataLoader[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return DataLoader(torch.randn(24, 6, generator=generator), batch_size=2, shuffle=False)  # type: ignore[arg-type]


def trainer_of(strategy: StrategyLike, place: str, **kwargs: Any) -> pl.Trainer:
    if place == "window":
        kwargs["accumulate_grad_batches"] = 3
    return make_trainer(strategy, max_epochs=2, **kwargs)


def break_off(trainer: pl.Trainer, module: Lit, **kwargs: Any) -> BaseException:
    try:
        trainer.fit(module, data(), data() if module.place == "validation" else None, **kwargs)
    except (Exception, SystemExit) as error:
        return error
    raise AssertionError("nothing was raised")


def copy(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def reuse(strategy: StrategyLike, place: str, folder: str) -> list[dict[str, Tensor]]:
    """What is left after the exception, after a save, and after training on in three ways."""
    torch.manual_seed(1)
    module = Lit(place, (0, 1))
    trainer = trainer_of(strategy, place)
    error = break_off(trainer, module)
    assert isinstance(error, Mishap), error
    states = [copy(module)]
    module.zero_grad()  # DDP leaves gradients of the last batch behind
    module(torch.ones(1, 6)).sum().backward()
    states.append({n: p.grad for n, p in module.named_parameters() if p.grad is not None})
    module.zero_grad()
    path = f"{folder}/after-{place}-{strategy if isinstance(strategy, str) else 'fine'}.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    states.append(saved["state_dict"])
    for state in saved["optimizer_states"][0]["state"].values():
        states.append(state)
    trainer.validate(module, data(), verbose=False)
    again = trainer_of(strategy, place)
    again.fit(module, data())
    states.append(copy(module))
    trainer_of(strategy, place, limit_train_batches=2).fit(module, data(), ckpt_path=None)
    states.append(copy(module))
    resumed = trainer_of(strategy, place)
    resumed.fit(module, data(), ckpt_path=path)
    states.append(copy(module))
    return states


def reuse_at(strategy: StrategyLike, places: tuple[str, ...], folder: str) -> list[Any]:
    return [reuse(strategy, place, folder) for place in places]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = str(tmp_path_factory.mktemp("ddp"))
    return run_on_ranks(reuse_at, 2, DDP, PLACES, folder, timeout=SECONDS)


@pytest.mark.parametrize("stage", STAGES)
def test_a_caught_exception_on_all_ranks_leaves_what_ddp_leaves(
    stage: str, expected: list[Any], tmp_path: Path
) -> None:
    got = run_on_ranks(
        reuse_at, 2, partial(fine_strategy, stage), PLACES, str(tmp_path), timeout=SECONDS
    )
    for place_index, place in enumerate(PLACES):
        for of_rank, wanted in zip(got, expected, strict=True):
            pairs = zip(of_rank[place_index], wanted[place_index], strict=True)
            for step, (state, reference) in enumerate(pairs):
                assert state.keys() == reference.keys(), (place, step)
                for name in state:
                    exact = place != "window"
                    close = partial(torch.allclose, rtol=1e-5, atol=1e-6)
                    same: Callable[..., bool] = torch.equal if exact else close
                    assert same(state[name], reference[name]), (place, step, name)


def one_rank_fails(stage: str, place: str, folder: str) -> dict[str, Any]:
    torch.manual_seed(1)
    module = Lit(place, (1,))
    saves = OnExceptionCheckpoint(folder, "half")
    make = partial(fine_strategy, stage)
    trainer = trainer_of(make, place, callbacks=[saves], enable_checkpointing=True)
    error = break_off(trainer, module)
    return {"error": f"{type(error).__name__}: {error}", "state": copy(module)}


@pytest.mark.parametrize("place", ["training_step", "forward", "backward", "batch_end"])
@pytest.mark.parametrize("stage", STAGES)
def test_after_an_exception_on_one_rank_all_ranks_have_the_same_weights_and_say_the_same(
    stage: str, place: str, tmp_path: Path
) -> None:
    first, second = run_on_ranks(one_rank_fails, 2, stage, place, str(tmp_path), timeout=SECONDS)
    assert second["error"] == "Mishap: the planned mishap"
    assert first["error"].startswith("PeerFailedError: Rank 0 stops because another rank failed")
    assert "Mishap: the planned mishap" in first["error"]
    assert not list(tmp_path.iterdir())
    for name, value in first["state"].items():
        assert torch.equal(value, second["state"][name]), name
        assert value.isfinite().all()


def alone(folder: str) -> list[Any]:
    disk: Callable[[], Strategy] = partial(
        lightning_zero.ZeroStrategy,
        3,
        offload_optimizer="nvme",
        offload_params="nvme",
        nvme_path=folder,
    )
    return [[reuse(s, place, folder) for place in PLACES] for s in (disk, DDP)]


def test_one_rank_alone_always_has_its_weights_back(tmp_path: Path) -> None:
    ((got, expected),) = run_on_ranks(alone, 1, str(tmp_path), timeout=SECONDS)
    for place, states, references in zip(PLACES, got, expected, strict=True):
        for step, (state, reference) in enumerate(zip(states, references, strict=True)):
            assert state.keys() == reference.keys(), (place, step)
            for name in state:
                assert torch.equal(state[name], reference[name]), (place, step, name)
