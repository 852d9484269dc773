"""The delayed update against a loop that is written out by hand."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.compare import assert_same
from tests.support.distributed import run_on_ranks
from tests.support.models import Regression, mlp, regression_loader
from tests.support.offload import COARSE, CPU, strategy
from tests.support.runs import make_trainer

NUM_BATCHES = 6
DEEP = partial(mlp, 7, 13, 11, 5)
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


class Watched(Regression):
    """Notes the weights with which each step, and the validation, computes."""

    def __init__(self) -> None:
        super().__init__(DEEP, ADAMW)
        torch.manual_seed(3)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.note("loss", loss)
        self.note("batch", batch)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note("validation", self.loss(batch))
        self.note("validation_batch", batch)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def train(strategies: list[Any], clip: float | None, validates: bool) -> list[dict[str, Any]]:
    results = []
    for made in strategies:
        module = Watched()
        trainer = make_trainer(
            made, gradient_clip_val=clip, limit_val_batches=1 if validates else 0
        )
        trainer.fit(module, regression_loader(NUM_BATCHES), regression_loader(1))
        state = {k: v.detach().clone() for k, v in module.state_dict().items()}
        results.append({**module.notes, "state": state})
    return results


def by_hand(
    by_rank: list[list[dict[str, Any]]], clip: float | None, after: int
) -> tuple[list[list[Tensor]], list[Tensor], dict[str, Tensor]]:
    """On the batches of these runs. Step t computes with weights that have seen t - 2 updates
    (t - 1 in the first `after` ones).
    """
    world_size = len(by_rank)
    latest = Watched()
    used = copy.deepcopy(latest)
    optimizer = latest.configure_optimizers()[0][0]
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    loaders = [results[0]["batch"] for results in by_rank]
    losses: list[list[Tensor]] = [[] for _ in range(world_size)]
    for step in range(NUM_BATCHES):
        used.zero_grad()
        for rank, rows in enumerate(loaders):
            loss = used.loss(rows[step])
            (loss / world_size).backward()
            losses[rank].append(loss.detach())
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(used.parameters(), clip)
        # what the update before has made is used from now on, this one only after the next
        before = copy.deepcopy(latest.state_dict())
        for mine, theirs in zip(latest.parameters(), used.parameters(), strict=True):
            assert theirs.grad is not None
            mine.grad = theirs.grad.clone()
        optimizer.step()
        schedule.step()
        used.load_state_dict(before if step >= after else latest.state_dict())
    seen = [batch for results in by_rank for batch in results[0].get("validation_batch", [])]
    validation = [latest.loss(batch).detach() for batch in seen]
    return losses, validation, dict(latest.state_dict())


STRATEGIES: list[Any] = [
    partial(strategy, stage, bucket_bytes, delayed_update=True, **CPU)
    for stage, bucket_bytes in ((1, 1), (2, COARSE), (3, 1))
]
STRATEGIES.append(partial(strategy, 3, params="cpu", delayed_update=True, **CPU))


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_weights_lag_by_one_update(world_size: int, clip: float | None) -> None:
    by_rank = run_on_ranks(train, world_size, STRATEGIES, clip, True)
    losses, validation, state = by_hand(by_rank, clip, after=0)
    for rank, results in enumerate(by_rank):
        for number, got in enumerate(results):
            label = f"strategy {number}, rank {rank} of {world_size}"
            assert_same(got["loss"], losses[rank], exact=False, label=label)
            assert_same(got["validation"], [validation[rank]], exact=False, label=label)
            assert_same(got["state"], state, exact=False, label=label)


def test_the_delay_begins_after_some_steps() -> None:
    delayed = [partial(strategy, stage, delayed_update=3, **CPU) for stage in (2, 3)]
    by_rank = run_on_ranks(train, 2, delayed, None, False)
    losses, _, state = by_hand(by_rank, None, after=3)
    for got in by_rank[0]:
        assert_same(got["loss"], losses[0], exact=False, label="losses")
        assert_same(got["state"], state, exact=False, label="weights")


def test_the_recipe_can_tell_one_update_more_or_less() -> None:
    by_rank = run_on_ranks(train, 2, [partial(strategy, 2)], None, False)
    got = by_rank[0][0]
    plain, _, state = by_hand(by_rank, None, after=NUM_BATCHES)
    assert_same(got["loss"], plain[0], exact=False, label="losses")
    assert_same(got["state"], state, exact=False, label="weights")
    lagging, _, _ = by_hand(by_rank, None, after=0)
    assert torch.equal(got["loss"][0], lagging[0][0])
    assert not torch.allclose(got["loss"][1], lagging[0][1], rtol=1e-4)
