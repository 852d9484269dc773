"""From what the ranks measured to rounds, from rounds to summaries, and from those to a table."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

from harness.job import Job


class Spread(NamedTuple):
    """Median, least and largest over rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None if there is no value."""
        return cls(statistics.median(values), min(values), max(values)) if values else None

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Round:
    """One backend in one round: means over ranks, the largest rank for memory."""

    name: str
    number: int
    step_ms: float
    tokens_per_s: float
    cpu_ms: float
    page_faults: float
    sent_mb: float | None
    sent_by: str
    """Who counted the bytes: "interface", "package" or "nobody"."""
    base_mb: float | None
    steady_mb: float | None
    peak_mb: float | None
    shared_mb: float | None
    foreign_cpu: float | None
    """Share of the machine's CPU time that other programs took meanwhile."""
    losses: list[float]
    counters: dict[str, float] | None
    step_ms_of_ranks: list[list[float]] = field(repr=False)


@dataclass(frozen=True)
class Summary:
    """One backend over all rounds."""

    name: str
    error: str | None
    rounds: list[Round] = field(default_factory=list)
    ratios: dict[str, Spread] = field(default_factory=dict)
    """Step time divided by a reference's in the same round, by reference."""
    loss_difference: float | None = None

    def middle(self, get: Callable[[Round], float | None]) -> float | None:
        """Median over rounds of one figure."""
        values = [value for value in map(get, self.rounds) if value is not None]
        return statistics.median(values) if values else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _largest(ranks: Sequence[dict[str, Any]], moment: str, kind: str) -> float | None:
    known: list[float | None] = [rank[moment][kind] for rank in ranks if rank[moment]]
    return max((value for value in known if value is not None), default=None)


def _sent(ranks: Sequence[dict[str, Any]]) -> tuple[float | None, str]:
    interface = _mean([rank["interface_bytes"] for rank in ranks])
    if interface is not None:
        return interface / 1e6, "interface"
    package = _mean([(rank["counters"] or {}).get("sent_bytes") for rank in ranks])
    return (package / 1e6, "package") if package is not None else (None, "nobody")


def _foreign_cpu(ranks: Sequence[dict[str, Any]], steps: int) -> float | None:
    whole: float | None = ranks[0]["machine_cpu_s"]
    if whole is None:
        return None
    own: float = sum(rank["cpu_ms"] for rank in ranks) * steps / 1e3
    available: float = ranks[0]["window_s"] * (os.cpu_count() or 1)
    return max(0.0, (whole - own) / available)


def make_round(name: str, number: int, job: Job, ranks: Sequence[dict[str, Any]]) -> Round:
    """Reduce the ranks' results to one record."""
    step_ms = statistics.fmean(statistics.median(rank["step_ms"]) for rank in ranks)
    sent_mb, sent_by = _sent(ranks)
    return Round(
        name=name,
        number=number,
        step_ms=step_ms,
        tokens_per_s=1e3 * job.micro_batch * job.seq * len(ranks) / step_ms,
        cpu_ms=statistics.fmean(rank["cpu_ms"] for rank in ranks),
        page_faults=statistics.fmean(rank["page_faults"] for rank in ranks),
        sent_mb=sent_mb,
        sent_by=sent_by,
        base_mb=_largest(ranks, "memory_base", "private"),
        steady_mb=_largest(ranks, "memory_end", "private"),
        peak_mb=_largest(ranks, "memory_end", "peak"),
        shared_mb=_largest(ranks, "memory_end", "shared"),
        foreign_cpu=_foreign_cpu(ranks, job.steps),
        losses=[statistics.fmean(each) for each in zip(*(r["losses"] for r in ranks), strict=True)],
        counters=ranks[0]["counters"],
        step_ms_of_ranks=[rank["step_ms"] for rank in ranks],
    )


def summarise(
    names: Sequence[str],
    rounds: Sequence[Round],
    errors: dict[str, str],
    references: Sequence[str],
) -> list[Summary]:
    """One summary per backend; ratios pair the backends of one round."""
    by_key = {(r.name, r.number): r for r in rounds}
    truth = next((r for r in rounds if r.name in ("lightning_ddp", "ddp")), None)
    summaries = []
    for name in names:
        own = [r for r in rounds if r.name == name]
        ratios = {}
        for reference in references:
            pairs = [(r, by_key.get((reference, r.number))) for r in own]
            spread = Spread.of([r.step_ms / other.step_ms for r, other in pairs if other])
            if spread:
                ratios[reference] = spread
        difference = None
        if truth and own and "alone" not in name:
            difference = max(
                abs(a - b) for r in own for a, b in zip(r.losses, truth.losses, strict=True)
            )
        summaries.append(Summary(name, errors.get(name), own, ratios, difference))
    return summaries


def _number(value: float | None, form: str = ",.0f") -> str:
    return "-" if value is None else format(value, form)


def time_rows(summaries: Sequence[Summary], references: Sequence[str]) -> list[list[str]]:
    """A heading and one row per backend: how long a step takes."""
    heading = ["backend", "ms/step", "tokens/s", *(f"/ {name}" for name in references)]
    table = [[*heading, "CPU ms", "page faults", "rounds", "foreign CPU"]]
    for s in summaries:
        table.append(
            [
                s.name,
                _number(s.middle(lambda r: r.step_ms), ",.1f"),
                _number(s.middle(lambda r: r.tokens_per_s)),
                *(str(s.ratios.get(name, "-")) for name in references),
                _number(s.middle(lambda r: r.cpu_ms)),
                _number(s.middle(lambda r: r.page_faults)),
                str(len(s.rounds)),
                _number(s.middle(lambda r: r.foreign_cpu), ".0%"),
            ]
        )
    return table


def space_rows(summaries: Sequence[Summary]) -> list[list[str]]:
    """A heading and one row per backend: memory, bytes on the wire, and whether losses agree."""
    heading = ["backend", "base MB", "steady MB", "peak MB", "shared MB", "sent MB/step"]
    table = [[*heading, "largest loss difference"]]
    for s in summaries:
        table.append(
            [
                s.name,
                _number(s.middle(lambda r: r.base_mb)),
                _number(s.middle(lambda r: r.steady_mb)),
                _number(s.middle(lambda r: r.peak_mb)),
                _number(s.middle(lambda r: r.shared_mb)),
                _number(s.middle(lambda r: r.sent_mb), ",.1f"),
                _number(s.loss_difference, ".1e"),
            ]
        )
    return table


def print_table(title: str, table: Sequence[Sequence[str]]) -> None:
    """With rich where it is installed and the screen is wide enough, else in plain text."""
    heading, *body = table
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(title)
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for row in table:
            first, *rest = (f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
            print("  ".join([first, *rest]))
        return
    width = max(sum(max(map(len, column)) + 3 for column in zip(*table, strict=True)) + 1, 80)
    rich_table = Table(title=title, title_justify="left")
    for index, name in enumerate(heading):
        rich_table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in body:
        rich_table.add_row(*row)
    Console(width=width).print(rich_table)


def print_errors(summaries: Sequence[Summary]) -> None:
    """Why backends failed."""
    for summary in summaries:
        if summary.error:
            print(f"{summary.name} failed: {summary.error}")


def plot(summaries: Sequence[Summary], reference: str, path: str) -> None:
    """Bars of step time over the reference (with the spread) and of peak memory."""
    import_module("matplotlib").use("Agg")
    pyplot = import_module("matplotlib.pyplot")
    done = [s for s in summaries if s.rounds and reference in s.ratios]
    names = [s.name for s in done]
    spreads = [s.ratios[reference] for s in done]
    low = [spread.median - spread.low for spread in spreads]
    high = [spread.high - spread.median for spread in spreads]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 0.5 * len(done) + 1.5), sharey=True)
    left.barh(names, [spread.median for spread in spreads], xerr=(low, high), capsize=3)
    left.axvline(1.0, color="black", linewidth=1)
    left.set_xlabel(f"step time / {reference}")
    steady = [s.middle(lambda r: r.steady_mb) or 0.0 for s in done]
    peak = [s.middle(lambda r: r.peak_mb) or 0.0 for s in done]
    right.barh(names, peak, color="lightgrey", label="peak")
    right.barh(names, steady, label="between steps")
    right.set_xlabel("private memory of a rank, MB")
    right.legend()
    left.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
