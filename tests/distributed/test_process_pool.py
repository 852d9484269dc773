"""The harness itself: it must report, not hang, and not lie."""

from __future__ import annotations

import os
import threading
import time

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import POOL, RankFailure, distributed, run_on_ranks


def _rank_and_sum() -> tuple[int, int, float]:
    total = torch.tensor([float(os.environ["RANK"]) + 1])
    dist.all_reduce(total)
    return os.getpid(), dist.get_rank(), total.item()


def _raise_on(rank: int) -> str:
    if int(os.environ["RANK"]) == rank:
        raise LookupError("the planned mishap")
    return "fine"


def _wait_for_a_rank_that_raised() -> None:
    _raise_on(1)
    dist.barrier()


def _sleep_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        time.sleep(600)


def _die_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        os._exit(7)


def _leave_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(30,), name="forgotten", daemon=True).start()


def _change_the_environment() -> None:
    os.environ["LEFT_BEHIND"] = "1"
    os.environ["RANK"] = "77"


def _environment_is_clean() -> bool:
    return "LEFT_BEHIND" not in os.environ and not dist.is_initialized()


def _trainer_facts(devices: int) -> tuple[str, int, bool]:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    environment = trainer.strategy.cluster_environment
    assert environment is not None
    return type(environment).__name__, trainer.world_size, environment.creates_processes_externally


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_takes_part(world_size: int) -> None:
    results = run_on_ranks(_rank_and_sum, world_size, init_group=True)
    assert [rank for _, rank, _ in results] == list(range(world_size))
    assert {total for *_, total in results} == {world_size * (world_size + 1) / 2}
    assert len({pid for pid, *_ in results}) == world_size


def test_processes_are_reused_after_a_success() -> None:
    first = run_on_ranks(_rank_and_sum, 2, init_group=True)
    second = run_on_ranks(_rank_and_sum, 2, init_group=True)
    assert [pid for pid, *_ in first] == [pid for pid, *_ in second]


def test_a_failure_shows_every_rank_and_costs_the_pool() -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 0 returned.*rank 1 raised.*planned mishap"):
        run_on_ranks(_raise_on, 2, 1)
    assert POOL.workers == []


def test_expected_failures_come_back_as_outcomes() -> None:
    outcomes = run_on_ranks(_raise_on, 2, 1, expect_failure=True)
    assert [outcome.error_type for outcome in outcomes] == [None, "LookupError"]
    assert outcomes[0].value == "fine"
    assert outcomes[1].message == "the planned mishap"


def test_a_rank_that_raises_frees_the_peers_that_wait_for_it() -> None:
    outcomes = run_on_ranks(
        _wait_for_a_rank_that_raised, 2, init_group=True, expect_failure=True, timeout=30
    )
    assert outcomes[0].is_failure
    assert outcomes[0].seconds < 10


def test_a_hung_rank_shows_its_stack() -> None:
    run_on_ranks(_raise_on, 2, 5)  # the processes are up: what is slow now hangs
    with pytest.raises(RankFailure, match=r"(?s)rank\(s\) \[1\] hang.*_sleep_on"):
        run_on_ranks(_sleep_on, 2, 1, timeout=3)
    assert run_on_ranks(_raise_on, 2, 5) == ["fine", "fine"]


def test_a_process_that_dies_is_reported() -> None:
    with pytest.raises(RankFailure, match="process of rank 0 died"):
        run_on_ranks(_die_on, 2, 0)


def test_a_forgotten_thread_is_a_failure() -> None:
    with pytest.raises(RankFailure, match="forgotten"):
        run_on_ranks(_leave_a_thread, 1)


def test_nothing_of_a_call_reaches_the_next() -> None:
    run_on_ranks(_change_the_environment, 2, init_group=True)
    assert run_on_ranks(_environment_is_clean, 2) == [True, True]


def test_lightning_takes_the_ranks_as_they_are() -> None:
    for name, world_size, starts_nothing in run_on_ranks(_trainer_facts, 2, 2):
        assert name == "TorchElasticEnvironment"
        assert world_size == 2
        assert starts_nothing


@pytest.mark.parametrize("value", [3, 5])
@distributed(world_size=2, init_group=True)
def test_a_plain_function_becomes_a_test_on_every_rank(value: int) -> None:
    gathered = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(gathered, torch.tensor([float(value * dist.get_rank())]))
    assert torch.cat(gathered).tolist() == [0.0, float(value)]
