"""Comparisons, verdicts and measurements as tables for a terminal, as Markdown and as JSON values."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from fedmask.display import number, percent
from validation.attribution import OWN_LAW, PARTS
from validation.compare import QUANTITIES, TITLES, Comparison, Row
from validation.verdicts import Verdict, verdicts

__all__ = [
    "CURVATURE_HEADS",
    "batch_table",
    "cell_text",
    "comparison_json",
    "comparison_tables",
    "curvature_row",
    "curvature_tables",
    "formatter",
    "markdown",
    "measured_markdown",
    "parts_table",
    "settings",
    "verdict_table",
]


def settings(found: Comparison) -> list[str]:
    """What the runs were, each kind once: rounds, seeds, network, data, device, commit."""
    lines: dict[str, list[str]] = {}
    for record in (record for row in found.rows for record in row.records):
        c, where = record.config, record.content["provenance"]
        line = (
            f"medians over the last {record.last} rounds; {where['device']}; torch {where['versions']['torch']}; "
            f"commit {record.commits}; data {record.content['data']['name']}"
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
    caption = "paper · ours [within the run, rough] (smallest to largest over seeds)"
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
    lines = [f"{found.label}. Paper · ours [within the run, rough: see `compare --help`]:", ""]
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


def parts_table(found: Sequence[dict[str, Any]]) -> Table:
    """Measured parts of the noise, a row each part."""
    table = Table(title="What the noise is made of, 95 % over clients", title_justify="left")
    for column in ("run", "after round", "part"):
        table.add_column(column)
    for column in ("squared norm", "share of the noise", "95 %"):
        table.add_column(column, justify="right")
    for one in found:
        where = (one["cell"], str(one["after_round"]))
        table.add_row(*where, "signal", number(one["signal"]), "", "")
        table.add_row("", "", "noise", number(one["noise"]), percent(1), "")
        for name in (*PARTS, *OWN_LAW):
            part = one["parts"][name]
            low, high = part["share_interval"]
            interval = f"{percent(low)} to {percent(high)}"
            table.add_row("", "", name, number(part["value"]), percent(part["share"]), interval)
        table.add_section()
    return table


def batch_table(found: Sequence[dict[str, Any]]) -> Table:
    """Predicted and measured noise and factor of one local step, a row each batch size."""
    table = Table(title="One local step: predicted from per-sample gradients, and measured", title_justify="left")
    for column in ("run", "after round", "batch size"):
        table.add_column(column)
    for column in ("noise predicted", "measured", "1/Δ_S predicted", "measured"):
        table.add_column(column, justify="right")
    for one in found:
        for point in one["points"]:
            predicted, measured = point["predicted"], point["measured"]
            noise, factor = measured["noise_interval"], measured["recovery_factor_interval"]
            table.add_row(
                one["cell"],
                str(one["after_round"]),
                str(point["batch_size"]),
                number(predicted["noise"]),
                f"{number(measured['noise'])} \\[{number(noise[0])}, {number(noise[1])}]",
                f"{predicted['recovery_factor']:.2f}",
                f"{measured['recovery_factor']:.2f} \\[{factor[0]:.2f}, {factor[1]:.2f}]",
            )
        full = one["full_batch"]
        factor = f"{full['recovery_factor']:.2f}"
        table.add_row(one["cell"], str(one["after_round"]), "full", "", number(full["noise"]), "", factor)
    return table


NORMS = {"euclidean": "Euclidean", "hessian": "Hessian", "ggn": "Gauss-Newton"}


def curvature_tables(found: Sequence[dict[str, Any]], *, blocks: int = 12) -> list[Table]:
    """Recovery factors in three norms, the blocks with most of the penalty, and the excess beside R."""
    factors = Table(title="1/Δ_S in three norms, weighted [95 %: over clients; over block signs]", title_justify="left")
    for column in ("run", "after round", *NORMS.values()):
        factors.add_column(column)
    excess = Table(title="Excess loss of masks, p = ½, beside the expansion s²R", title_justify="left")
    for column in (
        "run",
        "after round",
        "masks",
        "s",
        "excess [95 %, asymptotic]",
        "s²R, Hessian",
        "s²R, Gauss-Newton",
    ):
        excess.add_column(column)
    tables = [factors, excess]
    for one in found:
        state = (one["cell"], str(one["after_round"]))
        factors.add_row(*state, *(factor_text(one["norms"][name]).replace("[", "\\[") for name in NORMS))
        for point in one["excess"]:
            excess.add_row(*state, *excess_cells(one, point, "\\["))
        by_block = Table(
            title=f"{one['cell']} after round {one['after_round']}: share of R_ind and 1/Δ_S of a block",
            title_justify="left",
        )
        by_block.add_column("block")
        for name in NORMS.values():
            by_block.add_column(f"{name}: share", justify="right")
            by_block.add_column("1/Δ_S", justify="right")
        shares = np.array(one["norms"]["hessian"]["block_shares"])
        for b in np.argsort(-np.abs(shares))[:blocks]:
            cells = []
            for name in NORMS:
                norm = one["norms"][name]
                factor = norm["block_factors"][b]
                cells += [percent(norm["block_shares"][b]), "–" if factor is None else f"{factor:.2f}"]
            by_block.add_row(one["blocks"][b], *cells)
        tables.append(by_block)
    return tables


def factor_text(norm: Mapping[str, Any]) -> str:
    """A recovery factor with its interval."""
    low, high = norm["interval"]
    return f"{norm['factor']:.2f} [{low:.2f}, {high:.2f}]"


def excess_cells(one: dict[str, Any], point: dict[str, Any], bracket: str = "[") -> list[str]:
    """Masks, scale, excess with its interval, and the penalties at that scale."""
    low, high = point["interval"]
    scale = point["scale"]
    expected = [number(scale**2 * one["penalties"][name][point["sharing"]]) for name in ("hessian", "ggn")]
    return [
        point["sharing"],
        f"{scale:g}",
        f"{number(point['excess'])} {bracket}{number(low)}, {number(high)}]",
        *expected,
    ]


CURVATURE_HEADS = (
    "run",
    "after round",
    *(f"1/Δ_S, {name}" for name in NORMS.values()),
    "excess, independent: measured",
    "R_ind",
    "excess, synchronized: measured",
    "R_shr",
)


def curvature_row(one: Mapping[str, Any]) -> list[str]:
    """A state in one line: three factors, and at s = 1 the excess of both kinds of masks beside the Hessian's R."""
    cells = [one["cell"], str(one["after_round"]), *(factor_text(one["norms"][name]) for name in NORMS)]
    for sharing in ("independent", "synchronized"):
        point = next(p for p in one["excess"] if p["sharing"] == sharing and p["scale"] == 1)
        low, high = point["interval"]
        ends = one["norms"]["hessian"]["independent_interval" if sharing == "independent" else "shared_interval"]
        expected = f"{number(one['penalties']['hessian'][sharing])} [{number(ends[0])}, {number(ends[1])}]"
        cells += [f"{number(point['excess'])} [{number(low)}, {number(high)}]", expected]
    return cells


def measured_markdown(
    parts: Sequence[dict[str, Any]], sizes: Sequence[dict[str, Any]], curvature: Sequence[dict[str, Any]] = ()
) -> str:
    """Measured parts of the noise, of one local step, and curvature as Markdown, for the README; empty without any."""
    lines = []
    if parts:
        names = (*PARTS, *OWN_LAW)
        lines += [f"| run | after round | noise | {' | '.join(names)} |", f"|{'---|' * (3 + len(names))}"]
        for one in parts:
            shares = []
            for name in names:
                low, high = one["parts"][name]["share_interval"]
                shares.append(f"{percent(one['parts'][name]['share'])} [{percent(low)}, {percent(high)}]")
            lines.append(f"| {one['cell']} | {one['after_round']} | {number(one['noise'])} | {' | '.join(shares)} |")
        lines.append("")
    if sizes:
        heads = ("run", "after round", "one step, batch", "noise predicted", "measured", "1/Δ_S predicted", "measured")
        lines += [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
        for one in sizes:
            for point in one["points"]:
                predicted, measured = point["predicted"], point["measured"]
                noise = ", ".join(number(end) for end in measured["noise_interval"])
                factor = ", ".join(f"{end:.2f}" for end in measured["recovery_factor_interval"])
                lines.append(
                    f"| {one['cell']} | {one['after_round']} | {point['batch_size']} | {number(predicted['noise'])} | "
                    f"{number(measured['noise'])} [{noise}] | {predicted['recovery_factor']:.2f} | "
                    f"{measured['recovery_factor']:.2f} [{factor}] |"
                )
        lines.append("")
    if curvature:
        lines += [f"| {' | '.join(CURVATURE_HEADS)} |", f"|{'---|' * len(CURVATURE_HEADS)}"]
        lines += [f"| {' | '.join(row)} |" for row in map(curvature_row, curvature)]
        lines.append("")
    return "\n".join(lines)
