"""The paper's tables beside recorded runs, with intervals, and its qualitative claims with verdicts."""

import csv
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float64
from rich.table import Table

from fedmask.display import number, percent
from validation.intervals import block_bootstrap, wilson
from validation.records import Record

__all__ = [
    "Comparison",
    "Estimate",
    "PaperCell",
    "Row",
    "Verdict",
    "comparison_json",
    "comparison_tables",
    "comparisons",
    "markdown",
    "paper_cells",
    "settings",
    "verdict_table",
    "verdicts",
]

FOLDER = Path(__file__).parent / "paper"
QUANTITIES = ("recovery_factor", "recovery_factor_weighted", "signal", "noise", "accuracy", "share_below_one")
TITLES = dict(zip(QUANTITIES, ("1/Δ_S", "1/Δ_S weighted", "signal", "noise", "accuracy", "below one"), strict=True))


@dataclass(frozen=True)
class PaperCell:
    """A row of the paper's tables: its cell's id, its table, and its figures by the names of QUANTITIES."""

    id: str
    table: int
    name: str
    local_steps: int
    values: dict[str, float]


def paper_cells() -> list[PaperCell]:
    """The nine rows of Table I and the three of Table II."""
    cells = []
    for number_, file in ((1, "table1.csv"), (2, "table2.csv")):
        with (FOLDER / file).open(encoding="utf-8", newline="") as stream:
            for row in csv.DictReader(stream):
                batch, epochs, alpha = (
                    row.get("batch_size", "32"),
                    row.get("local_epochs", "2"),
                    row.get("alpha", "100"),
                )
                values = {
                    "recovery_factor": float(row["recovery_unweighted"]),
                    "recovery_factor_weighted": float(row["recovery_weighted"]),
                    "signal": float(row["signal"]),
                    "noise": float(row["noise"]),
                    "accuracy": float(row["accuracy"]),
                    "share_below_one": float(row["rounds_below_one_percent"]) / 100,
                }
                name = f"{'full batch' if batch == 'full' else f'batch {batch}'}, τ = {epochs}"
                name = name if number_ == 1 else f"{name}, α = {alpha}"
                steps = int(row.get("local_steps", 32))
                cells.append(PaperCell(f"b{batch}-t{epochs}-alpha{float(alpha):g}", number_, name, steps, values))
    return cells


@dataclass(frozen=True)
class Estimate:
    """A quantity of a cell: its median over seeds, the interval within one run, and the spread over seeds.

    Attributes:
        value: median over the seeds of each run's median over its last quarter (accuracy: at the end; share
            below one: over all rounds).
        within: a 95 % interval within the run of the lowest seed: block bootstrap over rounds; Wilson's over test
            images for the accuracy, and over blocks of rounds for a share of none or all.
        seeds: smallest and largest over the seeds, or None for one seed.
    """

    value: float
    within: tuple[float, float]
    seeds: tuple[float, float] | None


@dataclass(frozen=True)
class Row:
    """A cell with its runs, what the paper has for it (None if nothing), and what the runs give."""

    id: str
    name: str
    local_steps: int
    paper: PaperCell | None
    records: tuple[Record, ...]
    ours: dict[str, Estimate]


@dataclass(frozen=True)
class Comparison:
    """Rows of one kind of run: one network, one data set, one length. Kinds are never in one table."""

    label: str
    rows: tuple[Row, ...]


def comparisons(records: Sequence[Record]) -> list[Comparison]:
    """The runs by kind, each with one row a cell that was run, in the paper's order and then what it has not.

    A row of Table II that is in Table I too comes twice. Runs that are not of the paper's experiment (another
    network or data set, another number of clients) have no figures of the paper beside them.
    """
    kinds: dict[str, list[Record]] = {}
    for record in records:
        kinds.setdefault(record.kind, []).append(record)
    return [Comparison(label, tuple(_rows(runs))) for label, runs in kinds.items()]


def _rows(records: Sequence[Record]) -> list[Row]:
    by_id: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda r: r.config.seed):
        by_id.setdefault(record.id, []).append(record)
    papers = [cell for cell in paper_cells() if cell.id in by_id] if records[0].is_papers_experiment else []
    found = [_row(cell.id, cell.name, cell, by_id[cell.id]) for cell in papers]
    known = {row.id for row in found}
    return found + [_row(id_, id_, None, runs) for id_, runs in by_id.items() if id_ not in known]


def _row(id_: str, name: str, paper: PaperCell | None, runs: list[Record]) -> Row:
    ours = {quantity: _estimate(quantity, runs) for quantity in QUANTITIES}
    return Row(id_, name, runs[0].local_steps, paper, tuple(runs), ours)


def _estimate(quantity: str, runs: Sequence[Record]) -> Estimate:
    values = [_value(quantity, run) for run in runs]
    spread = (min(values), max(values)) if len(values) > 1 else None
    return Estimate(float(np.median(values)), _within(quantity, runs[0]), spread)


def _series(quantity: str, run: Record) -> tuple[Float64[np.ndarray, " rounds"], Callable[..., Any]]:
    """The rounds that a quantity is of, and the statistic that it is of them."""
    if quantity == "share_below_one":
        factors = run.column("recovery_factor")
        return np.where(np.isfinite(factors), factors < 1, np.nan), np.mean
    return run.column(quantity)[-run.last :], np.median


def _value(quantity: str, run: Record) -> float:
    if quantity == "accuracy":
        return run.accuracy()
    series, statistic = _series(quantity, run)
    series = series[np.isfinite(series)]
    return float(statistic(series)) if series.size else math.nan


def _within(quantity: str, run: Record) -> tuple[float, float]:
    if quantity == "accuracy":
        return wilson(run.accuracy(), int(run.content["data"]["test_samples"]))
    series, statistic = _series(quantity, run)
    if quantity == "share_below_one" and _value(quantity, run) in (0, 1):
        # Resampling what never varied says nothing; a block of √n rounds counts as one trial.
        return wilson(_value(quantity, run), round(len(series) ** 0.5))
    return block_bootstrap(series, lambda resampled: statistic(resampled, axis=1))


# The qualitative claims.


@dataclass(frozen=True)
class Verdict:
    """A qualitative claim of the paper, whether the runs show it, and the numbers behind both."""

    claim: str
    verdict: Literal["reproduced", "not reproduced", "cannot be judged"]
    paper: str
    ours: str


def verdicts(found: Sequence[Row]) -> list[Verdict]:
    """The paper's qualitative claims, each judged on the same cells in the paper's numbers and in ours.

    The thresholds are ours: the paper states the claims in words.
    """
    paper = {cell.id: _Numbers(cell.values, cell.local_steps) for cell in paper_cells()}
    ours = {
        row.id: _Numbers({name: e.value for name, e in row.ours.items()}, row.local_steps)
        for row in found
        if row.paper is not None
    }
    return [claim(paper, ours) for claim in CLAIMS]


@dataclass(frozen=True)
class _Numbers:
    values: dict[str, float]
    steps: int

    @property
    def factor(self) -> float:
        return self.values["recovery_factor"]


Cells = dict[str, _Numbers]


def _id(batch: str, epochs: int, alpha: float = 100) -> str:
    return f"b{batch}-t{epochs}-alpha{alpha:g}"


TABLE_I = [_id(batch, epochs) for batch in ("full", "128", "32") for epochs in (1, 2, 5)]
TABLE_II = [_id("32", 2, alpha) for alpha in (100, 1, 0.1)]


def _judged(
    claim: str,
    needed: Iterable[str],
    paper: Cells,
    ours: Cells,
    judge: Callable[[Cells], tuple[bool, str]],
    *,
    least: int | None = None,
) -> Verdict:
    """Judge with all needed cells, or with as many as were run if there are ``least`` of them."""
    wanted = list(dict.fromkeys(needed))
    there = [cell for cell in wanted if cell in ours]
    missing = [cell for cell in wanted if cell not in ours]
    theirs = judge({cell: paper[cell] for cell in wanted})[1]
    if len(there) < (len(wanted) if least is None else least):
        return Verdict(claim, "cannot be judged", theirs, f"not run: {', '.join(missing)}")
    shown, words = judge({cell: ours[cell] for cell in there})
    if missing:
        words += f" ({len(there)} of {len(wanted)} cells)"
    return Verdict(claim, "reproduced" if shown else "not reproduced", theirs, words)


def _cliff(paper: Cells, ours: Cells) -> Verdict:
    def judge(cells: Cells) -> tuple[bool, str]:
        full = [c.factor for id_, c in cells.items() if id_.startswith("bfull")]
        mini = [c.factor for id_, c in cells.items() if not id_.startswith("bfull")]
        if not full or not mini:
            return False, "no full-batch or no minibatch cell"
        words = f"full batch {_span(full)}, minibatch {_span(mini)}: smallest full {min(full) / max(mini):.1f} times"
        return min(full) >= 2 * max(mini), f"{words} the largest minibatch"

    claim = "A cliff lies between full batch and minibatch: every full-batch cell at least twice every minibatch cell"
    return _judged(claim, TABLE_I, paper, ours, judge, least=2)


def _monotone(paper: Cells, ours: Cells) -> Verdict:
    def judge(cells: Cells) -> tuple[bool, str]:
        groups, falling = [], True
        for batch in ("full", "128", "32"):
            group = [cells[id_].factor for id_ in (_id(batch, epochs) for epochs in (1, 2, 5)) if id_ in cells]
            falling &= all(a > b for a, b in itertools.pairwise(group))
            if group:
                groups.append(f"{batch}: {' > '.join(number(f) for f in group)}".replace(" > ", " → "))
        return falling, "; ".join(groups)

    claim = "Within a batch size the factor falls with the number of local steps"
    return _judged(claim, TABLE_I, paper, ours, judge, least=5)


def _like_accuracy(paper: Cells, ours: Cells) -> Verdict:
    def judge(cells: Cells) -> tuple[bool, str]:
        full, mini = cells[_id("full", 5)], cells[_id("128", 1)]
        words = " against ".join(
            f"{number(c.factor)} at {c.steps} steps, accuracy {percent(c.values['accuracy'])}" for c in (full, mini)
        )
        near = abs(full.values["accuracy"] - mini.values["accuracy"]) <= 0.1
        return full.factor >= 2 * mini.factor and near, words

    claim = "Five full-batch steps recover at least twice what four minibatch steps do, at accuracies within ten points"
    return _judged(claim, [_id("full", 5), _id("128", 1)], paper, ours, judge)


def _spans(paper: Cells, ours: Cells) -> Verdict:
    def judge(cells: Cells) -> tuple[bool, str]:
        orders = {}
        for name in ("noise", "signal"):
            values = [c.values[name] for c in cells.values()]
            positive = [v for v in values if v > 0]
            orders[name] = math.log10(max(positive) / min(positive)) if positive else math.nan
        words = f"noise spans {orders['noise']:.1f} orders of magnitude, signal {orders['signal']:.1f}"
        return orders["noise"] >= 2.5 and orders["signal"] <= orders["noise"] / 2, words

    claim = "Over Table I noise spans three orders of magnitude (at least 2.5) and signal at most half as many"
    return _judged(claim, TABLE_I, paper, ours, judge, least=7)


def _heterogeneity(paper: Cells, ours: Cells) -> Verdict:
    def judge(cells: Cells) -> tuple[bool, str]:
        shards = [cells[id_].factor for id_ in TABLE_II if id_ in cells]
        protocol = [cells[id_].factor for id_ in TABLE_I if id_ in cells]
        ratios = max(shards) / min(shards), max(protocol) / min(protocol)
        return ratios[0] < ratios[
            1
        ], f"over α by {ratios[0]:.2f} times, over the local protocol by {ratios[1]:.1f} times"

    claim = "Heterogeneity moves the factor less than the local protocol does"
    needed = [*TABLE_II, *TABLE_I]
    if any(id_ not in ours for id_ in TABLE_II):
        return _judged(claim, needed, paper, ours, judge)
    return _judged(claim, needed, paper, ours, judge, least=5)


def _weights(paper: Cells, ours: Cells) -> Verdict:
    def judge(cells: Cells) -> tuple[bool, str]:
        gaps = {id_: abs(c.factor - c.values["recovery_factor_weighted"]) for id_, c in cells.items()}
        wide = [id_ for id_, gap in gaps.items() if gap > 0.05]
        skewed = _id("32", 2, 0.1)
        others = max(gap for id_, gap in gaps.items() if id_ != skewed)
        at = f"{gaps[skewed]:.2f} at α = 0.1" if skewed in gaps else "α = 0.1 not run"
        return wide == [skewed], f"{at}, at most {others:.3f} elsewhere"

    claim = "Weighted and unweighted factor differ by more than 0.05 at α = 0.1 only"
    needed = [_id("32", 2, 0.1), *TABLE_II, *TABLE_I]
    if _id("32", 2, 0.1) not in ours:
        return _judged(claim, needed, paper, ours, judge)
    return _judged(claim, needed, paper, ours, judge, least=4)


def _dominated(paper: Cells, ours: Cells) -> Verdict:
    def judge(cells: Cells) -> tuple[bool, str]:
        beaten = [
            id_
            for id_, cell in cells.items()
            if any(o.factor > cell.factor and o.values["accuracy"] > cell.values["accuracy"] for o in cells.values())
        ]
        return beaten == [_id("128", 1)], f"dominated: {', '.join(beaten) or 'none'}"

    claim = "Of Table I one cell, batch 128 with τ = 1, is dominated: another has both more recovery and more accuracy"
    return _judged(claim, TABLE_I, paper, ours, judge)


def _below(paper: Cells, ours: Cells) -> Verdict:
    def judge(cells: Cells) -> tuple[bool, str]:
        shares = {id_: c.values["share_below_one"] for id_, c in cells.items()}
        full = max((s for id_, s in shares.items() if id_.startswith("bfull")), default=0.0)
        mini = [s for id_, s in shares.items() if not id_.startswith("bfull")]
        words = f"full batch at most {percent(full)}, minibatch {percent(min(mini))} to {percent(max(mini))}"
        return full == 0 and 0 < max(mini) < 0.1, words

    claim = "Rounds below one are there with minibatches, in fewer than a tenth of rounds, and not with full batches"
    return _judged(claim, [*TABLE_I, *TABLE_II], paper, ours, judge, least=4)


def _span(values: Sequence[float]) -> str:
    return number(values[0]) if len(values) == 1 else f"{number(min(values))} to {number(max(values))}"


CLAIMS = (_cliff, _monotone, _like_accuracy, _spans, _heterogeneity, _weights, _dominated, _below)


# Tables.


def settings(found: Comparison) -> list[str]:
    """What the runs were, each kind once: rounds, seeds, network, data, device, commit."""
    lines: dict[str, list[str]] = {}
    for record in (record for row in found.rows for record in row.records):
        c, where = record.config, record.content["provenance"]
        commits = ", ".join((commit or "unknown")[:7] for commit in record.content["provenance"]["commits"])
        line = (
            f"medians over the last {record.last} rounds; {where['device']}; torch {where['versions']['torch']}; "
            f"commit {commits}"
        )
        lines.setdefault(line, []).append(f"seed {c.seed}")
    return [f"{line}; {', '.join(sorted(set(seeds)))}" for line, seeds in lines.items()]


def comparison_tables(found: Comparison) -> list[Table]:
    """Table I and Table II, paper and ours side by side, and what the paper has not."""
    titles = {1: "Table I", 2: "Table II", None: "Not in the paper"}
    tables = []
    for part, title in titles.items():
        chosen = [row for row in found.rows if (row.paper.table if row.paper else None) == part]
        if chosen:
            tables.append(_table(f"{title}. {found.label}", chosen))
    return tables


def _table(title: str, chosen: Sequence[Row]) -> Table:
    caption = "paper · ours [95 % within the run] (smallest to largest over seeds)"
    table = Table(title=f"{title}\n{caption}", title_justify="left")
    table.add_column("cell")
    table.add_column("steps", justify="right")
    for quantity in QUANTITIES:
        table.add_column(TITLES[quantity])
    for row in chosen:
        table.add_row(row.name, str(row.local_steps), *(cell_text(row, quantity) for quantity in QUANTITIES))
    return table


def formatter(quantity: str) -> Callable[[float | None], str]:
    """How a quantity is written: the factors with two decimals, as the paper has them."""
    if quantity in ("accuracy", "share_below_one"):
        return percent
    return number if quantity in ("signal", "noise") else lambda value: "–" if value is None else f"{value:.2f}"


def cell_text(row: Row, quantity: str, *, separator: str = "\n") -> str:
    """Paper, ours, the interval within the run, and the spread over seeds."""
    show = formatter(quantity)
    estimate = row.ours[quantity]
    paper = "" if row.paper is None else f"{show(row.paper.values[quantity])} · "
    low, high = estimate.within
    within = "" if math.isnan(low) else f"{separator}\\[{show(low)}, {show(high)}]"
    seeds = "" if estimate.seeds is None else f"{separator}({show(estimate.seeds[0])} to {show(estimate.seeds[1])})"
    return f"{paper}{show(estimate.value)}{within}{seeds}"


def verdict_table(found: Sequence[Verdict]) -> Table:
    """The qualitative claims as rows."""
    table = Table(title="The paper's claims on this experiment", title_justify="left", show_lines=True)
    for column in ("claim", "verdict", "paper", "ours"):
        table.add_column(column, overflow="fold")
    for verdict in found:
        table.add_row(verdict.claim, verdict.verdict, verdict.paper, verdict.ours)
    return table


def markdown(found: Comparison) -> str:
    """A comparison as Markdown, for the README."""
    header = ["cell", "steps", *(TITLES[quantity] for quantity in QUANTITIES)]
    lines = [f"{found.label}. Paper · ours [95 % within the run]:", ""]
    lines += [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    for row in found.rows:
        cells = [cell_text(row, quantity, separator=" ").replace("\\[", "[") for quantity in QUANTITIES]
        lines.append(f"| {row.name} | {row.local_steps} | {' | '.join(cells)} |")
    lines += ["", "| claim of the paper | verdict | paper | ours |", "|---|---|---|---|"]
    lines += [f"| {v.claim} | {v.verdict} | {v.paper} | {v.ours} |" for v in verdicts(found.rows)]
    lines += ["", *(f"Runs: {line}." for line in settings(found))]
    return "\n".join(lines) + "\n"


def comparison_json(found: Comparison) -> dict[str, Any]:
    """A comparison as JSON values."""
    return {
        "label": found.label,
        "cells": [
            {
                "id": row.id,
                "table": row.paper.table if row.paper else None,
                "local_steps": row.local_steps,
                "seeds": [record.config.seed for record in row.records],
                "paper": row.paper.values if row.paper else None,
                "ours": {
                    quantity: {"value": e.value, "within_run": list(e.within), "over_seeds": e.seeds}
                    for quantity, e in row.ours.items()
                },
            }
            for row in found.rows
        ],
        "claims": [vars(verdict) for verdict in verdicts(found.rows)],
        "runs": settings(found),
    }
