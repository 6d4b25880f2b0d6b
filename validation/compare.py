"""The cells of the paper's tables beside recorded runs, each figure with its interval."""

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from validation.intervals import block_bootstrap, wilson
from validation.records import Record

__all__ = ["QUANTITIES", "TITLES", "Comparison", "Estimate", "PaperCell", "Row", "comparisons", "paper_cells"]

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
