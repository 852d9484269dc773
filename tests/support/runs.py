"""Training cases that several strategies run, and the comparison of what came out.

A `Case` says nothing of the strategy. `check_parity` runs it under DDP and under the three stages
on one set of processes, keeps the records, and compares those of the stage that a test asks for.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn

from tests.support import models
from tests.support.compare import assert_same
from tests.support.distributed import POOL, RankFailure, run_on_ranks

STAGES = ("zero1", "zero2", "zero3")
# By default small modules share one unit and one bucket. Every case runs with the least size, so
# that units are gathered and freed, and buckets reduced, one by one, and at some stages with the
# default size as well. Stage 2 needs none: it replicates what stage 1 does and shards what stage 3
# does.
FINE = "_fine"
DDP = "ddp"
DDP_UNUSED = "ddp_find_unused_parameters_true"

StrategyLike = str | Callable[[], Strategy]


def fit(trainer: pl.Trainer, module: pl.LightningModule, case: Case) -> None:
    """Train; validate too if the case has validation data."""
    validation = case.validation_data() if case.validation_data else None
    trainer.fit(module, case.data(), validation)


@dataclass(frozen=True, eq=False)
class Case:
    """A training run without its strategy. Every callable is found by name in the workers."""

    module: Callable[[], pl.LightningModule] = models.Regression
    data: Callable[[], Any] = models.regression_loader
    validation_data: Callable[[], Any] | None = None
    trainer: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[pl.Callback]] | None = None
    drive: Callable[[pl.Trainer, pl.LightningModule, Case], Any] = fit
    reference: str = DDP
    is_exact: bool = True
    """False where DDP adds in another order or by another kernel: rounding may differ."""
    accumulates: bool = False
    """Several backwards precede a step: stage 1 adds before it reduces, stages 2 and 3 after."""
    local_state: str | None = None
    """Pattern of the state that DDP leaves different on each rank (batch norm's buffers)."""
    precision: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the stages' ZeroPrecision; the reference gets the precision of that name."""
    stage_3_refusal: str | None = None
    """Stage 3 may refuse the case on every rank, with an error that matches this."""

    @property
    def adds_before_step(self) -> bool:
        return self.accumulates or self.trainer.get("accumulate_grad_batches", 1) != 1


@dataclass
class RunRecord:
    """What one rank saw of one run."""

    losses: list[Tensor] = field(default_factory=list)
    lrs: list[list[float]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    metrics: list[dict[str, Tensor]] = field(default_factory=list)
    notes: dict[str, list[Any]] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    result: Any = None


@dataclass(frozen=True)
class RunError:
    """A run that raised on one rank."""

    message: str
    traceback: str


RankResults = list[RunRecord | RunError]


@contextmanager
def whole(module: nn.Module, trainer: pl.Trainer, write: bool = False) -> Iterator[None]:
    """`full_params` under a stage; under DDP parameters are whole anyway. Collective."""
    if type(trainer.strategy) is DDPStrategy:
        scope: Any = nullcontext()
    else:
        import lightning_zero

        scope = lightning_zero.full_params(module, write=write)
    with scope:
        yield


class _Recorder(pl.Callback):
    def __init__(self, record: RunRecord) -> None:
        self.record = record

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None:
            self.record.losses.append(loss.detach().clone())
        self.record.steps.append(trainer.global_step)
        self.record.lrs.append(
            [float(group["lr"]) for opt in trainer.optimizers for group in opt.param_groups]
        )

    def _keep_metrics(self, trainer: pl.Trainer, *_: Any) -> None:
        metrics = trainer.callback_metrics
        self.record.metrics.append({k: v.detach().clone() for k, v in metrics.items()})

    on_train_end = on_validation_end = on_test_end = _keep_metrics


def make_trainer(strategy: StrategyLike, **kwargs: Any) -> pl.Trainer:
    """A silent CPU Trainer for the ranks that the harness has started."""
    if isinstance(strategy, str) and strategy.startswith("zero"):
        import lightning_zero  # noqa: F401 - registers the names
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": models.world_size(),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
    }
    made = strategy if isinstance(strategy, str) else strategy()
    return pl.Trainer(strategy=made, **{**defaults, **kwargs})


def train(case: Case, strategy: StrategyLike) -> RunRecord:
    """Run a case on this rank. Collective."""
    # Ranks start from different weights: those of rank 0 have to reach the others.
    torch.manual_seed(100 + models.rank())
    module = case.module()
    record = RunRecord()
    callbacks = [*(case.callbacks() if case.callbacks else []), _Recorder(record)]
    options = {**case.trainer, **_precision_options(case, strategy)}
    trainer = make_trainer(strategy, callbacks=callbacks, **options)
    torch.manual_seed(200 + models.rank())  # dropout draws the same under every strategy
    record.result = case.drive(trainer, module, case)
    record.notes = dict(getattr(module, "notes", {}))
    record.state = full_state(module)
    return record


def _precision_options(case: Case, strategy: StrategyLike) -> dict[str, Any]:
    if not case.precision:
        return {}
    if strategy in (DDP, DDP_UNUSED):
        return {"precision": case.precision["precision"]}
    import lightning_zero

    return {"plugins": [lightning_zero.ZeroPrecision(**case.precision)]}


def full_state(module: nn.Module) -> dict[str, Tensor]:
    """A copy of the module's state dict."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def train_under_each(case: Case, strategies: list[StrategyLike]) -> RankResults:
    """Run a case under one strategy after the other, until one raises. Collective."""
    results: RankResults = []
    for strategy in strategies:
        try:
            results.append(train(case, strategy))
        except Exception as error:
            results.append(RunError(f"{type(error).__name__}: {error}", traceback.format_exc()))
            # Ranks that went on, or that wait, fail at once instead of hanging.
            torch.distributed.destroy_process_group()
            break
    return results


def run_under_each(
    case: Case, strategies: Mapping[str, StrategyLike], world_size: int, timeout: float = 120.0
) -> dict[str, RankResults]:
    """The results of each strategy by rank; what raises or hangs does so for itself alone."""
    results: dict[str, RankResults] = {}
    pending = list(strategies)
    group_size = len(pending)
    while pending:
        group = pending[:group_size]
        chosen = [strategies[name] for name in group]
        try:
            by_rank = run_on_ranks(train_under_each, world_size, case, chosen, timeout=timeout)
        except RankFailure as failure:
            if len(group) == 1:
                error = RunError("the ranks hang, or their process died", str(failure))
                results[pending.pop(0)] = [error] * world_size
            group_size = 1
            continue
        num_done = min(len(rank_results) for rank_results in by_rank)
        for index, name in enumerate(group[:num_done]):
            results[name] = [rank_results[index] for rank_results in by_rank]
        if any(isinstance(rank_results[-1], RunError) for rank_results in by_rank):
            POOL.kill()  # processes in which a run broke off are not trusted with another
        pending = pending[num_done:]
    return results


@dataclass(frozen=True)
class ParityRun:
    """The results of a case by strategy and rank."""

    case: Case
    by_strategy: Mapping[str, RankResults]

    def records(self, strategy: str) -> list[RunRecord]:
        """The records of a strategy by rank; raises if the run raised on any of them."""
        ranks = self.by_strategy[strategy]
        errors = [
            f"--- rank {rank} under {strategy}:\n{result.traceback}"
            for rank, result in enumerate(ranks)
            if isinstance(result, RunError)
        ]
        if errors:
            raise AssertionError("\n" + "\n".join(errors))
        return [result for result in ranks if isinstance(result, RunRecord)]

    def sizes(self, stage: str) -> list[str]:
        """The names under which a stage was run."""
        names = [name for name in (stage, stage + FINE) if name in self.by_strategy]
        assert names, f"{stage} was not run"
        return names

    def has_records(self, strategy: str) -> bool:
        """Whether the strategy was run, and to the end on every rank."""
        ranks = self.by_strategy.get(strategy, [])
        return bool(ranks) and all(isinstance(result, RunRecord) for result in ranks)

    def is_refused(self, strategy: str, pattern: str) -> bool:
        """Whether the run raised on every rank, with a matching message on each."""
        return all(
            isinstance(result, RunError) and re.search(pattern, result.message) is not None
            for result in self.by_strategy[strategy]
        )


class Control:
    """With `--control`, DDP stands in for the stages: every case has to pass against itself."""

    is_on = False


def fine_strategy(
    stage: str, bucket_bytes: int = 1, save_format: Literal["full", "sharded"] = "full"
) -> Strategy:
    """A stage with units and buckets as small as they get, and little patience."""
    import lightning_zero

    return lightning_zero.ZeroStrategy(
        int(stage[-1]),  # type: ignore[arg-type]
        bucket_bytes=bucket_bytes,
        save_format=save_format,
        stall_timeout=timedelta(seconds=5),
    )


def strategies_of(case: Case, world_size: int) -> dict[str, StrategyLike]:
    """The reference, each stage in the least size, and some in the default size."""
    if Control.is_on:
        return {case.reference: case.reference, **dict.fromkeys(STAGES, case.reference)}
    coarse = {stage: stage for stage in (("zero1", "zero3") if world_size <= 2 else ("zero3",))}
    fine = {stage + FINE: partial(fine_strategy, stage) for stage in STAGES}
    return {case.reference: case.reference, **coarse, **fine}


_RUNS: dict[tuple[int, int], ParityRun] = {}


def parity_run(case: Case, world_size: int) -> ParityRun:
    """The case under DDP and all stages; run once, since a test looks at one stage of it."""
    key = (id(case), world_size)
    if key not in _RUNS:
        strategies = strategies_of(case, world_size)
        _RUNS[key] = ParityRun(case, run_under_each(case, strategies, world_size))
    return _RUNS[key]


def check_parity(case: Case, stage: str, world_size: int = 2) -> None:
    """Assert that a case gives under a stage what it gives under DDP and the stages below.

    Bitwise on up to two ranks, where there is only one order in which to add; on more ranks, and
    where the case says that DDP computes differently, to rounding. Stages agree bitwise with each
    other, ranks with ranks, and any size of unit and bucket with any other.
    """
    run = parity_run(case, world_size)
    for name in run.sizes(stage):
        compare_stage(run, name, world_size)


def compare_stage(run: ParityRun, name: str, world_size: int) -> None:
    """The comparisons of `check_parity` for one strategy, on records that exist."""
    case = run.case
    stage = name.removesuffix(FINE)
    reference = run.records(case.reference)
    if stage == "zero3" and case.stage_3_refusal and run.is_refused(name, case.stage_3_refusal):
        return
    records = run.records(name)
    adds_as_ddp = stage == "zero1" or not case.adds_before_step
    exact = case.is_exact and world_size <= 2 and adds_as_ddp
    _compare(records, reference, exact, f"{name} against {case.reference}")
    shared = [_shared_state(record, case.local_state) for record in records]
    for rank, state in enumerate(shared[1:], start=1):
        assert_same(state, shared[0], exact=True, label=f"{name}, rank {rank} against rank 0")
    for other in STAGES[: STAGES.index(stage)]:
        same_size = other + FINE if name.endswith(FINE) else other
        if run.has_records(same_size) and not (other == "zero1" and case.adds_before_step):
            _compare(records, run.records(same_size), True, f"{name} against {same_size}")
    if name != stage and run.has_records(stage):
        _compare(records, run.records(stage), case.is_exact, f"{name} against {stage}")


def _compare(records: list[RunRecord], reference: list[RunRecord], exact: bool, label: str) -> None:
    for rank, (got, want) in enumerate(zip(records, reference, strict=True)):
        assert_same(vars(got), vars(want), exact=exact, label=f"rank {rank}, {label}")


def _shared_state(record: RunRecord, local: str | None) -> dict[str, Tensor]:
    return {k: v for k, v in record.state.items() if local is None or not re.search(local, k)}
