"""One self-contained HTML file about recorded runs, and the figures in it as PNG files beside it."""

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmask.display import number, percent
from fedmask.federated.provenance import now
from fedmask.files import write_atomic
from validation.attribution import OWN_LAW, PARTS
from validation.compare import QUANTITIES, TITLES, Comparison, Row, comparisons
from validation.figures import FIGURES, MEASURED, draw, draw_measured, save
from validation.intervals import COVERAGE
from validation.records import Record
from validation.tables import CURVATURE_HEADS, curvature_row, formatter, settings
from validation.verdicts import verdicts

__all__ = ["INFERRED", "write_report"]

STEMS = {
    "torchvision": "torchvision's 7×7 with max-pool, because a CPU can carry it. An independent program had with it, "
    "for full batch and τ = 1 in rounds 151–200, four times the paper's noise (2.1e-03 against 4.9e-04), so it is "
    "probably not the paper's network",
    "cifar": "3×3 without max-pool; inferred, since the other stem's noise is four times the paper's",
}

# What the paper does not state, and what the runs have instead.
INFERRED = (
    ("stem", lambda c: STEMS.get(c.stem, c.stem) if c.model == "resnet18" else "no ResNet"),
    ("groups of GroupNorm", lambda c: str(c.groups)),
    ("momentum", lambda c: f"{c.momentum:g}"),
    ("weight decay", lambda c: f"{c.weight_decay:g}"),
    ("precision", lambda c: c.precision),
    ("augmentation", lambda c: "none"),
    ("learning-rate schedule", lambda c: "constant"),
    ("gradient clipping", lambda c: "none"),
    ("normalization of images", lambda c: "mean and deviation of the training set's channels"),
    ("least samples of a client", lambda c: str(c.min_samples)),
    ("weighted recovery factor", lambda c: "‖Σa_kΔ_k‖²/Σa_k²‖Δ_k‖², a_k = n_k/Σn"),
    ("keep probability p", lambda c: "none needed: the statistics are of the unmasked updates"),
    ("full batch", lambda c: f"one gradient step an epoch, the gradient summed over chunks of {c.chunk_size} images"),
)

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.3rem; margin-top: 2.5rem; } h3 { font-size: 1.05rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 0.85rem; margin: 0.5rem 0 1rem; }
th, td { border-bottom: 1px solid #ccc; padding: 0.3rem 0.6rem; text-align: left; vertical-align: top; }
th { border-bottom: 2px solid #666; } td.n { text-align: right; white-space: nowrap; }
small { color: #555; display: block; } img { max-width: 100%; } figure { margin: 1rem 0; }
figcaption { color: #333; font-size: 0.9rem; } .reproduced { color: #005a8c; font-weight: 600; }
.not-reproduced { color: #a33b00; font-weight: 600; } .cannot-be-judged { color: #555; }
"""


def write_report(
    records: Sequence[Record],
    out: Path,
    *,
    waiting: Sequence[str] = (),
    measured: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
) -> list[Path]:
    """Write report.html and its figures into ``out``; return the files.

    Args:
        records: finished runs.
        out: a folder, made if need be.
        waiting: runs that are not finished, to be named.
        measured: measurements of the noise's parts and of batch sizes, by kind.
    """
    out.mkdir(parents=True, exist_ok=True)
    files, parts = [], []
    found = comparisons(records)
    for place, kind in enumerate(found):
        parts.append(f"<h2>{_text(kind.label)}</h2>")
        parts.append(_tables(kind))
        if any(row.paper for row in kind.rows):
            parts.append(_verdicts(kind))
        for name, (title, _) in FIGURES.items():
            figure = draw(name, kind)
            if figure is not None:
                path = out / (f"{name}.png" if len(found) == 1 else f"{name}-{place + 1}.png")
                save(figure, path)
                files.append(path)
                parts.append(_image(path, title))
        parts.append(_inferred(kind))
        parts.append(_provenance(kind))
    for measurement, several in (measured or {}).items():
        if several:
            name, title = MEASURED[measurement]
            save(draw_measured(measurement, several), out / f"{name}.png")
            files.append(out / f"{name}.png")
            parts += [f"<h2>{_text(title)}</h2>", _explained(measurement), _image(files[-1], title), _points(several)]
    if waiting:
        parts.append("<h2>Not finished</h2><ul>" + "".join(f"<li>{_text(line)}</li>" for line in waiting) + "</ul>")
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>How much regularization survives averaging</title><style>{STYLE}</style></head><body>"
        "<h1>How much regularization survives averaging: the CIFAR-10 experiment</h1>"
        f"<p>{_lead(found)} Written {_text(now())}.</p>{''.join(parts)}</body></html>\n"
    )
    report = out / "report.html"
    write_atomic(report, page.encode("utf-8"))
    return [report, *files]


def _lead(found: Sequence[Comparison]) -> str:
    runs = sum(len({r.slug for row in kind.rows for r in row.records}) for kind in found)
    return (
        f"{runs} finished {'run' if runs == 1 else 'runs'}. A figure is the median over seeds of each run's median "
        "over its last quarter of rounds; accuracy is at the end; the share below one is of all rounds. In brackets: "
        "an interval within one run, by a block bootstrap over rounds, nominally 95 %: it says nothing of other seeds, "
        f"and is too narrow where rounds are few and correlated ({COVERAGE}); for the accuracy, over test images. "
        "In parentheses: smallest to largest over seeds, where there are several."
    )


def _tables(kind: Comparison) -> str:
    parts = []
    for part, title in ((1, "Table I"), (2, "Table II"), (None, "Not in the paper")):
        chosen = [row for row in kind.rows if (row.paper.table if row.paper else None) == part]
        if not chosen:
            continue
        head = "".join(f"<th>{_text(TITLES[q])}</th>" for q in QUANTITIES)
        body = "".join(
            f"<tr><td>{_text(row.name)}</td><td class=n>{row.local_steps}</td>"
            + "".join(f"<td class=n>{_cell(row, quantity)}</td>" for quantity in QUANTITIES)
            + "</tr>"
            for row in chosen
        )
        caption = "ours, and below it the interval and the paper's figure" if part else "ours, with its interval"
        parts.append(
            f"<h3>{title}: {caption}</h3><div class=scroll><table><tr><th>cell</th><th>local steps</th>{head}</tr>"
            f"{body}</table></div>"
        )
    return "".join(parts)


def _cell(row: Row, quantity: str) -> str:
    show = formatter(quantity)
    estimate = row.ours[quantity]
    low, high = estimate.within
    lines = [f"<b>{show(estimate.value)}</b>"]
    if low == low:
        lines.append(f"<small>[{show(low)}, {show(high)}]</small>")
    if estimate.seeds is not None:
        lines.append(f"<small>({show(estimate.seeds[0])} to {show(estimate.seeds[1])})</small>")
    if row.paper is not None:
        lines.append(f"<small>paper {show(row.paper.values[quantity])}</small>")
    return "".join(lines)


def _verdicts(kind: Comparison) -> str:
    body = "".join(
        f"<tr><td>{_text(v.claim)}</td><td class={v.verdict.replace(' ', '-')}>{v.verdict}</td>"
        f"<td>{_text(v.paper)}</td><td>{_text(v.ours)}</td></tr>"
        for v in verdicts(kind.rows)
    )
    return (
        "<h3>The paper's claims</h3><p>The paper states them in words; the thresholds are ours.</p>"
        "<div class=scroll><table><tr><th>claim</th><th>verdict</th><th>paper</th><th>ours</th></tr>"
        f"{body}</table></div>"
    )


def _image(path: Path, title: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    caption = f"<figcaption>{_text(title)}.</figcaption>"
    return f'<figure><img alt="{_text(title)}" src="data:image/png;base64,{data}">{caption}</figure>'


def _explained(measurement: str) -> str:
    if measurement == "attribution":
        return (
            "<p>Every client of a cohort trained twice on its own shard, with other batches; twice on an i.i.d. shard "
            "of the same size drawn anew from all clients' data; and once on other samples with its own shard's counts "
            "of each class. Minibatch: half the mean squared difference of two trainings on one shard. Finite shards: "
            "the noise of the i.i.d. shards less their minibatch part. Heterogeneity: the rest, negative where shards "
            "are more alike than i.i.d. ones, as those of a large α are, with nearly equal shares of every class. By a "
            "client's own law, finite shards is what other samples of the same classes change, and heterogeneity what "
            "differs between clients beyond that.</p>"
        )
    if measurement == "curvature":
        return (
            "<p>At the mean update's end point θ − Δ̄, on a sample of the training images: 1/Δ_S, weighted, in the "
            "Euclidean norm and exactly, in the inner products of the Hessian's blocks and of the Gauss-Newton "
            "matrix's, from random block signs. Then the loss that masks with p = ½ add, measured over masks and their "
            "complements for the updates times s, beside the penalties s²R_ind and s²R_shr. Intervals are asymptotic: "
            "losses are unbounded.</p>"
        )
    return (
        "<p>The dashed line is what the trace of the per-sample gradient covariance predicts, (tr C/b)(1 − b/n) more "
        "than the full batch's noise; nothing is fitted. The points are measured.</p>"
    )


def _points(several: Sequence[Mapping[str, Any]]) -> str:
    heads: tuple[str, ...]
    body = []
    if several[0]["kind"] == "attribution":
        heads = ("run", "after round", "noise", "signal", *PARTS, *OWN_LAW)
        for one in several:
            shares = [
                f"{percent(one['parts'][name]['share'])} "
                f"[{', '.join(percent(end) for end in one['parts'][name]['share_interval'])}]"
                for name in (*PARTS, *OWN_LAW)
            ]
            body.append((one["cell"], str(one["after_round"]), number(one["noise"]), number(one["signal"]), *shares))
    elif several[0]["kind"] == "curvature":
        heads = CURVATURE_HEADS
        body = [tuple(curvature_row(one)) for one in several]
    else:
        heads = ("run", "after round", "batch size", "noise predicted", "measured", "1/Δ_S predicted", "measured")
        for one in several:
            for point in one["points"]:
                p, m = point["predicted"], point["measured"]
                noise = ", ".join(number(end) for end in m["noise_interval"])
                factor = ", ".join(f"{end:.2f}" for end in m["recovery_factor_interval"])
                measured = (f"{number(m['noise'])} [{noise}]", f"{m['recovery_factor']:.2f} [{factor}]")
                where = (one["cell"], str(one["after_round"]), str(point["batch_size"]))
                predicted = (number(p["noise"]), f"{p['recovery_factor']:.2f}")
                body.append((*where, predicted[0], measured[0], predicted[1], measured[1]))
    head = "".join(f"<th>{_text(name)}</th>" for name in heads)
    lines = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in body)
    return f"<div class=scroll><table><tr>{head}</tr>{lines}</table></div>"


def _inferred(kind: Comparison) -> str:
    config = kind.rows[0].records[0].config
    body = "".join(f"<tr><td>{_text(name)}</td><td>{_text(value(config))}</td></tr>" for name, value in INFERRED)
    return f"<h3>Settings that the paper does not state: inferred</h3><table>{body}</table>"


def _provenance(kind: Comparison) -> str:
    seen: dict[str, Record] = {record.slug: record for row in kind.rows for record in row.records}
    body = ""
    for slug, record in seen.items():
        where = record.content["provenance"]
        versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version)
        cells = (slug, where["started"], where["starts"], where["device"], record.commits, versions)
        body += "<tr>" + "".join(f"<td>{_text(str(cell))}</td>" for cell in cells) + "</tr>"
    head = "".join(f"<th>{name}</th>" for name in ("run", "started", "starts", "device", "commit", "versions"))
    lines = "".join(f"<li>{_text(line)}</li>" for line in settings(kind))
    return f"<h3>Provenance</h3><ul>{lines}</ul><div class=scroll><table><tr>{head}</tr>{body}</table></div>"


def _text(value: str) -> str:
    return html.escape(value)
