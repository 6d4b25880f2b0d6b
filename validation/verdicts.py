"""The paper's qualitative claims on its experiment, judged on recorded runs; "not reproduced" is a verdict too."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from fedmask.display import number, percent
from validation.compare import Row, paper_cells

__all__ = ["Verdict", "verdicts"]


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
FULL = TABLE_I[:3]
TABLE_II = [_id("32", 2, alpha) for alpha in (100, 1, 0.1)]


def _judged(
    claim: str,
    needed: Iterable[str],
    paper: Cells,
    ours: Cells,
    judge: Callable[[Cells], tuple[bool, str]],
    *,
    least: Sequence[Sequence[str]] | None = None,
) -> Verdict:
    """Judge with all needed cells; or, given ``least``, with those that were run if one of each group is there.

    The groups hold the cells without which the others could show neither the claim nor its failure.
    """
    wanted = list(dict.fromkeys(needed))
    there = [cell for cell in wanted if cell in ours]
    missing = [cell for cell in wanted if cell not in ours]
    theirs = judge({cell: paper[cell] for cell in wanted})[1]
    groups = [[cell] for cell in wanted] if least is None else least
    if not all(any(cell in ours for cell in group) for group in groups):
        return Verdict(claim, "cannot be judged", theirs, f"not run: {', '.join(missing)}")
    shown, words = judge({cell: ours[cell] for cell in there})
    if missing:
        words += f" ({len(there)} of {len(wanted)} cells)"
    return Verdict(claim, "reproduced" if shown else "not reproduced", theirs, words)


def _cliff(paper: Cells, ours: Cells) -> Verdict:
    def judge(cells: Cells) -> tuple[bool, str]:
        full = [c.factor for id_, c in cells.items() if id_.startswith("bfull")]
        mini = [c.factor for id_, c in cells.items() if not id_.startswith("bfull")]
        words = f"full batch {_span(full)}, minibatch {_span(mini)}: smallest full {min(full) / max(mini):.2f} times"
        return min(full) >= 2 * max(mini), f"{words} the largest minibatch"

    claim = "A cliff lies between full batch and minibatch: every full-batch cell at least twice every minibatch cell"
    return _judged(claim, TABLE_I, paper, ours, judge, least=[FULL, [c for c in TABLE_I if c not in FULL]])


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
    several = any(sum(_id(batch, epochs) in ours for epochs in (1, 2, 5)) > 1 for batch in ("full", "128", "32"))
    return _judged(claim, TABLE_I, paper, ours, judge, least=[] if several else None)


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
    return _judged(claim, TABLE_I, paper, ours, judge, least=[[_id("full", 1)], [_id("full", 2)], [_id("32", 5)]])


def _heterogeneity(paper: Cells, ours: Cells) -> Verdict:
    def judge(cells: Cells) -> tuple[bool, str]:
        shards = [cells[id_].factor for id_ in TABLE_II if id_ in cells]
        protocol = [cells[id_].factor for id_ in TABLE_I if id_ in cells]
        ratios = max(shards) / min(shards), max(protocol) / min(protocol)
        return ratios[0] < ratios[
            1
        ], f"over α by {ratios[0]:.2f} times, over the local protocol by {ratios[1]:.1f} times"

    claim = "Heterogeneity moves the factor less than the local protocol does"
    return _judged(claim, [*TABLE_II, *TABLE_I], paper, ours, judge, least=[*([cell] for cell in TABLE_II), FULL])


def _weights(paper: Cells, ours: Cells) -> Verdict:
    def judge(cells: Cells) -> tuple[bool, str]:
        gaps = {id_: abs(c.factor - c.values["recovery_factor_weighted"]) for id_, c in cells.items()}
        wide = [id_ for id_, gap in gaps.items() if gap > 0.05]
        skewed = _id("32", 2, 0.1)
        others = max((gap for id_, gap in gaps.items() if id_ != skewed), default=0.0)
        at = f"{gaps[skewed]:.2f} at α = 0.1" if skewed in gaps else "α = 0.1 not run"
        return wide == [skewed], f"{at}, at most {others:.3f} elsewhere"

    claim = "Weighted and unweighted factor differ by more than 0.05 at α = 0.1 only"
    least = [[cell] for cell in TABLE_II]
    return _judged(claim, [*TABLE_II, *TABLE_I], paper, ours, judge, least=least)


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
    return _judged(claim, [*TABLE_I, *TABLE_II], paper, ours, judge, least=[FULL, [_id("128", 1)]])


def _span(values: Sequence[float]) -> str:
    return number(values[0]) if len(values) == 1 else f"{number(min(values))} to {number(max(values))}"


CLAIMS = (_cliff, _monotone, _like_accuracy, _spans, _heterogeneity, _weights, _dominated, _below)
