"""The report's figures, each drawn from records alone and readable on its own."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from validation.attribution import OWN_LAW, PARTS
from validation.compare import Comparison, Row, paper_cells
from validation.records import Record

__all__ = ["FIGURES", "MEASURED", "draw", "draw_measured", "save"]

# Okabe and Ito's colours, which readers with colour blindness tell apart; a marker and a line style go with each.
COLOURS = {"full": "#0072B2", "128": "#E69F00", "32": "#009E73", "other": "#CC79A7"}
MARKERS = {"full": "o", "128": "s", "32": "^", "other": "D"}
LINES = {1: "-", 2: "--", 5: ":"}
WIDTH = 7.2  # inches


def batch_of(record: Record) -> str:
    """The key of a record's colour."""
    name = str(record.config.batch_size)
    return name if name in COLOURS else "other"


def short_name(record: Record) -> str:
    """A cell in a legend: b, τ and, if it is not the usual one, α."""
    c = record.config
    local = f"τ={c.local_epochs}" if c.local_steps is None else f"{c.local_steps} steps"
    alpha = "" if c.alpha == 100 else f", α={c.alpha:g}"
    return f"b={c.batch_size}, {local}{alpha}"


def recovery_against_steps(found: Comparison) -> Figure | None:
    """The paper's Fig. 1: recovery factor against local steps, with the paper's values and ours in it."""
    figure, axes = _figure(3.8)
    cohort = found.rows[0].records[0].config.cohort
    with_paper = [row for row in found.rows if row.paper is None or row.paper.table == 1]
    for batch in COLOURS:
        own = sorted((r for r in with_paper if batch_of(r.records[0]) == batch), key=lambda r: r.local_steps)
        colour, marker = COLOURS[batch], MARKERS[batch]
        if any(row.paper for row in with_paper):
            theirs = [c for c in paper_cells() if c.table == 1 and c.id.startswith(f"b{batch}-")]
            x, y = [c.local_steps for c in theirs], [c.values["recovery_factor"] for c in theirs]
            if theirs:
                axes.plot(x, y, color=colour, marker=marker, mfc="white", ls="--", lw=1, label=f"paper, b = {batch}")
        if own:
            values = [row.ours["recovery_factor"] for row in own]
            y = np.array([v.value for v in values])
            ends = np.array([v.seeds or v.within for v in values])
            error = np.clip(np.abs(ends.T - y), 0, None)
            x = [row.local_steps for row in own]
            axes.errorbar(x, y, error, color=colour, marker=marker, capsize=3, label=f"ours, b = {batch}")
    _log_x(axes)
    axes.set(xlabel="local steps", ylabel=f"recovery factor 1/Δ_S (of {cohort})", ylim=(0, cohort))
    axes.axhline(1, color="0.6", lw=0.8)
    axes.legend(ncols=2, fontsize=8, frameon=False)
    return figure


def recovery_over_rounds(found: Comparison) -> Figure | None:
    """Recovery factor in every round of every cell."""
    figure, axes = _figure(4.2)
    for record in _runs(found):
        axes.plot(*_curve(record, "recovery_factor"), **_style(record), label=short_name(record))
    axes.axhline(1, color="0.6", lw=0.8)
    axes.set(xlabel="round", ylabel="recovery factor 1/Δ_S", yscale="log")
    ticks = [1, 2, 3, 5, 10]
    axes.set_yticks(ticks, [str(t) for t in ticks])
    axes.minorticks_off()
    _outside_legend(axes)
    return figure


def signal_and_noise(found: Comparison) -> Figure | None:
    """The two estimates over rounds, on one scale."""
    figure, both = plt.subplots(1, 2, figsize=(WIDTH, 3.8), sharey=True, layout="constrained")
    for record in _runs(found):
        for axes, name in zip(both, ("signal", "noise"), strict=True):
            x, y = _curve(record, name)
            axes.plot(x, np.where(y > 0, y, np.nan), **_style(record), label=short_name(record))
            axes.set(xlabel="round", title=name, yscale="log")
    both[0].set_ylabel("squared norm")
    handles, labels = both[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def accuracy_over_rounds(found: Comparison) -> Figure | None:
    """Test accuracy where it was evaluated."""
    figure, axes = _figure(3.8)
    for record in _runs(found):
        x, y = _curve(record, "accuracy")
        known = np.isfinite(y)
        axes.plot(x[known], 100 * y[known], **_style(record), label=short_name(record))
    axes.set(xlabel="round", ylabel="test accuracy, %", ylim=(0, None))
    _outside_legend(axes)
    return figure


def per_block(found: Comparison) -> Figure | None:
    """Recovery factor of every block, in the median over the last quarter of a run, as a heat map over cells."""
    runs = _runs(found)
    names = runs[0].content["blocks"]["names"]
    columns = []
    for record in runs:
        rounds, factors = record.block_factors()
        late = [place for place, r in enumerate(rounds) if r > record.config.rounds - record.last]
        columns.append(np.nanmedian(factors[late or [-1]], axis=0))
    height = 1.6 + 0.14 * len(names)
    figure, axes = plt.subplots(figsize=(WIDTH, height), layout="constrained")
    cohort = runs[0].config.cohort
    image = axes.imshow(np.array(columns).T, aspect="auto", cmap="viridis", norm="log", vmin=0.8, vmax=cohort)
    axes.set_xticks(range(len(runs)), [short_name(r) for r in runs], rotation=45, ha="right", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=6 if len(names) > 20 else 8)
    bar = figure.colorbar(image, ax=axes, label="recovery factor of the block", ticks=[1, 2, 3, 5, 10])
    bar.ax.set_yticklabels(["1", "2", "3", "5", "10"])
    bar.ax.minorticks_off()
    return figure


def heterogeneity(found: Comparison) -> Figure | None:
    """The factor over α, unweighted and weighted, beside the paper's Table II."""
    own = [row for row in found.rows if row.paper is not None and row.paper.table == 2]
    if len(own) < 2:
        return None
    figure, axes = _figure(3.4)
    theirs = [c for c in paper_cells() if c.table == 2]
    for name, colour, marker, label in (
        ("recovery_factor", "#0072B2", "o", "unweighted"),
        ("recovery_factor_weighted", "#D55E00", "s", "n_k-weighted"),
    ):
        alphas = [float(c.id.rpartition("alpha")[2]) for c in theirs]
        y = [c.values[name] for c in theirs]
        axes.plot(alphas, y, color=colour, marker=marker, mfc="white", ls="--", lw=1, label=f"paper, {label}")
        axes.errorbar(
            [row.records[0].config.alpha for row in own],
            [row.ours[name].value for row in own],
            _errors(own, name),
            color=colour,
            marker=marker,
            capsize=3,
            label=f"ours, {label}",
        )
    axes.set(xlabel="Dirichlet α (smaller: more heterogeneous)", ylabel="recovery factor", xscale="log")
    axes.set_ylim(bottom=0.9)
    axes.legend(fontsize=8, frameon=False)
    return figure


FIGURES: dict[str, tuple[str, Callable[[Comparison], Figure | None]]] = {
    "recovery-steps": ("Recovery against local steps, the paper's Fig. 1 with both in it", recovery_against_steps),
    "recovery-rounds": ("Recovery over rounds", recovery_over_rounds),
    "signal-noise": ("Signal and noise over rounds", signal_and_noise),
    "accuracy": ("Test accuracy over rounds", accuracy_over_rounds),
    "blocks": ("Recovery of each block, median over the last quarter of the rounds", per_block),
    "heterogeneity": ("Heterogeneity", heterogeneity),
}


MEASURED: dict[str, tuple[str, str]] = {  # kind of measurement → file name and title
    "attribution": ("noise-parts", "What the noise is made of"),
    "batch sizes": ("batch-sizes", "Noise of one local step against the batch size"),
    "curvature": ("curvature", "What masks cost, and what the second-order expansion says"),
}


def draw_measured(kind: str, found: Sequence[Mapping[str, Any]]) -> Figure:
    """The figure of one kind of measurement."""
    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        drawn = {"attribution": noise_parts_figure, "batch sizes": batch_size_figure, "curvature": curvature_figure}
        return drawn[kind](found)


def draw(name: str, found: Comparison) -> Figure | None:
    """One figure of FIGURES, or None if the runs have nothing for it."""
    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        return FIGURES[name][1](found)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG and let it go; the bytes are a function of the figure."""
    figure.savefig(path, dpi=160, metadata={"Software": None})
    plt.close(figure)


def _figure(height: float) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(WIDTH, height), layout="constrained")
    return figure, axes


def _runs(found: Comparison) -> list[Record]:
    """Each cell's run of the lowest seed, once."""
    runs = {row.id: row.records[0] for row in found.rows}
    return list(runs.values())


def _curve(record: Record, name: str) -> tuple[np.ndarray, np.ndarray]:
    values = record.column(name)
    return np.arange(1, len(values) + 1), values


def _style(record: Record) -> dict[str, object]:
    batch = batch_of(record)
    usual = record.config.alpha == 100
    style = LINES.get(record.config.local_epochs, "-.") if usual else "-."
    colour = COLOURS[batch] if usual else "#56B4E9" if record.config.alpha == 1 else "#D55E00"
    return {"color": colour, "ls": style, "lw": 1.3, "marker": MARKERS[batch], "ms": 3.5, "markevery": 0.2}


def _errors(own: Sequence[Row], name: str) -> np.ndarray:
    y = np.array([row.ours[name].value for row in own])
    ends = np.array([row.ours[name].seeds or row.ours[name].within for row in own])
    return np.abs(ends.T - y)


def _log_x(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    ticks = [1, 2, 4, 8, 16, 32, 80]
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.minorticks_off()


def _outside_legend(axes: Axes) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)


def noise_parts_figure(found: Sequence[Mapping[str, Any]]) -> Figure:
    """Shares of the noise, a group of bars each measured cell and round."""
    figure, axes = _figure(1.8 + 0.85 * len(found))
    height = 0.16
    bars = (*PARTS, *OWN_LAW)
    for place, (name, colour) in enumerate(
        zip(bars, ("#0072B2", "#E69F00", "#009E73", "#F0E442", "#56B4E9"), strict=True)
    ):
        shares = np.array([one["parts"][name]["share"] for one in found])
        ends = np.array([one["parts"][name]["share_interval"] for one in found])
        y = np.arange(len(found)) + (place - 2) * height
        axes.barh(y, 100 * shares, height, color=colour, label=name)
        error = 100 * np.abs(ends.T - shares)
        axes.errorbar(100 * shares, y, xerr=error, fmt="none", ecolor="0.25", capsize=2, lw=1)
    axes.set_yticks(range(len(found)), [f"{one['cell']}\nafter round {one['after_round']}" for one in found])
    axes.invert_yaxis()
    axes.axvline(0, color="0.4", lw=0.8)
    axes.set_xlabel("share of the noise, % (95 % over clients)")
    axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=3, frameon=False, fontsize=8)
    return figure


def batch_size_figure(found: Sequence[Mapping[str, Any]]) -> Figure:
    """Noise of one local step against the batch size: predicted lines, measured points."""
    figure, axes = _figure(3.8)
    for one, colour in zip(found, itertools.cycle(COLOURS.values()), strict=False):
        points = sorted(one["points"], key=lambda point: point["batch_size"])
        x = [point["batch_size"] for point in points]
        name = f"{one['cell']}, after round {one['after_round']}"
        axes.plot(x, [p["predicted"]["noise"] for p in points], color=colour, ls="--", label=f"predicted: {name}")
        y = np.array([p["measured"]["noise"] for p in points])
        ends = np.array([p["measured"]["noise_interval"] for p in points])
        axes.errorbar(x, y, np.abs(ends.T - y), color=colour, fmt="o", capsize=3, label="measured, 95 % over draws")
        axes.axhline(one["full_batch"]["noise"], color=colour, ls=":", lw=1, label="full batch")
    axes.set(xscale="log", yscale="log", xlabel="batch size of one local step", ylabel="noise σ̂²")
    ticks = sorted({p["batch_size"] for one in found for p in one["points"]})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), fontsize=8, frameon=False)
    return figure


def curvature_figure(found: Sequence[Mapping[str, Any]]) -> Figure:
    """Excess loss of independent and synchronized masks against the updates' scale, beside s²R of the Hessian."""
    figure, panels = plt.subplots(
        1, len(found), figsize=(max(WIDTH, 2.6 * len(found)), 3.2), layout="constrained", squeeze=False, sharey=True
    )
    for one, axes in zip(found, panels[0], strict=True):
        for sharing, colour in (("independent", "#0072B2"), ("synchronized", "#D55E00")):
            points = sorted((p for p in one["excess"] if p["sharing"] == sharing), key=lambda point: point["scale"])
            x, y = (np.array([p[name] for p in points]) for name in ("scale", "excess"))
            ends = np.array([p["interval"] for p in points])
            axes.errorbar(x, y, np.abs(ends.T - y), color=colour, fmt="o", capsize=3, label=f"{sharing}: measured")
            axes.plot(x, x**2 * one["penalties"]["hessian"][sharing], color=colour, ls="--", label=f"{sharing}: s²R")
        axes.set(xscale="log", yscale="log", xlabel="updates × s")
        axes.set_xticks(x, [f"{value:g}" for value in x])
        axes.minorticks_off()
        axes.set_title(f"{one['cell']}\nafter round {one['after_round']}", fontsize=8)
    panels[0][0].set_ylabel("excess loss, p = ½ (95 %)")
    panels[0][-1].legend(fontsize=7, frameon=False)
    return figure
