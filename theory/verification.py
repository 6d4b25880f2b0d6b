"""Running all checks, side by side on the machine's cores, and laying them out as tables."""

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

import sympy as sp
import torch
from rich.table import Table

from fedmask.errors import FedmaskError
from fedmask.federated.workers import end_with_parent
from theory.claims import CLAIMS
from theory.registry import LEVELS, Claim, Context, Level, Outcome

__all__ = [
    "Result",
    "claim_named",
    "derivation_text",
    "kill_table",
    "markdown_table",
    "results_json",
    "results_table",
    "verify",
    "verify_mutants",
    "verify_seeds",
]


@dataclass(frozen=True)
class Result:
    """One check's outcome: of the claim itself, or of one of its mutants; and how long it took."""

    claim: str
    level: Level
    mutant: str | None
    outcome: Outcome
    seed: int
    seconds: float = field(compare=False)


def claim_named(name: str) -> Claim:
    """The claim with this id.

    Raises:
        FedmaskError: if there is none.
    """
    for claim in CLAIMS:
        if claim.id == name:
            return claim
    raise FedmaskError(f"claim {name!r} is unknown; the claims are {', '.join(claim.id for claim in CLAIMS)}")


def verify(
    seed: int, *, only: Sequence[str] = (), levels: Sequence[Level] = LEVELS, workers: int | None = None
) -> Iterator[Result]:
    """Check the claims, yielding each result as it is there."""
    tasks = [(c.id, level, None, seed) for c in _chosen(only) for level in c.checks if level in levels]
    return _run(tasks, workers)


def verify_mutants(seed: int, *, only: Sequence[str] = (), workers: int | None = None) -> Iterator[Result]:
    """Check every mutant at every level of its claim."""
    tasks = [
        (claim.id, level, mutant, seed) for claim in _chosen(only) for level in claim.checks for mutant in claim.mutants
    ]
    return _run(tasks, workers)


def verify_seeds(seeds: Sequence[int], level: Level, *, workers: int | None = None) -> Iterator[Result]:
    """One level of every claim that has it, for many seeds."""
    return _run([(c.id, level, None, seed) for seed in seeds for c in CLAIMS if level in c.checks], workers)


def count_of_checks(*, only: Sequence[str] = (), mutants: bool = False) -> int:
    """How many results there will be."""
    return sum(len(c.checks) * (len(c.mutants) if mutants else 1) for c in _chosen(only))


def results_table(results: Sequence[Result]) -> Table:
    """Claims × levels, each with its verdict and what was found."""
    table = Table(title="The claims at each of their levels", title_justify="left")
    for column in ("claim", "place", "level", "verdict", "found"):
        table.add_column(column, overflow="fold")
    table.add_column("samples", justify="right")
    for claim in CLAIMS:
        rows = sorted((r for r in results if r.claim == claim.id), key=lambda r: LEVELS.index(r.level))
        for i, result in enumerate(rows):
            outcome = result.outcome
            table.add_row(
                claim.id if i == 0 else "",
                claim.place if i == 0 else "",
                result.level,
                "pass" if outcome.passed else "[bold red]FAIL[/]",
                outcome.found.replace("[", "\\["),
                f"{outcome.samples:,}" if outcome.samples else "–",
            )
        if rows:
            table.add_section()
    return table


def results_json(results: Sequence[Result], seed: int) -> dict[str, Any]:
    """The same as strict JSON values."""
    claims = []
    for claim in CLAIMS:
        levels = {r.level: r.outcome.to_json() for r in results if r.claim == claim.id}
        if levels:
            claims.append(
                {
                    "id": claim.id,
                    "title": claim.title,
                    "place": claim.place,
                    "statement": claim.statement,
                    "assumptions": list(claim.assumptions),
                    "levels": levels,
                }
            )
    return {"seed": seed, "claims": claims}


def kill_table(results: Sequence[Result]) -> Table:
    """Mutants × levels: which level rejects which wrong version."""
    table = Table(title="Mutants, and the levels that reject them", title_justify="left")
    table.add_column("claim")
    table.add_column("mutant", overflow="fold")
    for level in LEVELS:
        table.add_column(level, justify="center")
    for claim in CLAIMS:
        for i, mutant in enumerate(claim.mutants):
            found = {r.level: r for r in results if r.claim == claim.id and r.mutant == mutant}
            if found:
                cells = [_kill_cell(found.get(level)) for level in LEVELS]
                table.add_row(claim.id if i == 0 else "", mutant, *cells)
        table.add_section()
    return table


def _kill_cell(result: Result | None) -> str:
    if result is None:
        return ""
    if result.outcome.passed:
        return "passes"
    return f"rejected ({result.outcome.samples:,})" if result.outcome.samples else "rejected"


def markdown_table() -> str:
    """The claims as a Markdown table, for the README."""
    lines = ["| claim | in the paper | checked | mutants rejected |", "|---|---|---|---|"]
    lines += [f"| {c.title} | {c.place} | {', '.join(c.checks)} | {len(c.mutants)} |" for c in CLAIMS]
    return "\n".join(lines) + "\n"


def derivation_text(claim: Claim, *, latex: bool = False) -> str:
    """A claim with its assumptions and the steps of its proof."""
    lines = [claim.title, f"  {claim.place}", f"  {claim.statement}"]
    lines += [f"  assumes: {assumption}" for assumption in claim.assumptions]
    if claim.note:
        lines.append(f"  note: {claim.note}")
    steps = claim.derivation() if claim.derivation else []
    for number, step in enumerate(steps, 1):
        lines.append(f"{number}. {step.text}")
        if step.expression is not None:
            form = sp.latex(step.expression) if latex else sp.pretty(step.expression, use_unicode=True)
            lines += [f"      {line}" for line in str(form).splitlines()]
    for level, check in claim.checks.items():
        documented = (check.__doc__ or "").strip().splitlines()
        lines.append(f"{level}: {' '.join(line.strip() for line in documented)}")
    return "\n".join(lines)


def _chosen(only: Sequence[str]) -> list[Claim]:
    return [claim_named(name) for name in only] if only else list(CLAIMS)


def _run(tasks: Sequence[tuple[str, Level, str | None, int]], workers: int | None) -> Iterator[Result]:
    # The slow ones first, so that the cores finish together.
    tasks = sorted(tasks, key=lambda task: task[1] not in ("monte carlo", "network"))
    count = min(os.cpu_count() or 1 if workers is None else workers, len(tasks))
    if count <= 1:
        for task in tasks:
            yield _check(task)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=spawn, initializer=end_with_parent) as pool:
        for future in as_completed([pool.submit(_check, task) for task in tasks]):
            yield future.result()


def _check(task: tuple[str, Level, str | None, int]) -> Result:
    name, level, mutant, seed = task
    before, start = torch.get_num_threads(), time.perf_counter()
    torch.set_num_threads(1)
    try:
        claim = claim_named(name)
        formula = claim.formula if mutant is None else claim.mutants[mutant]
        outcome = claim.checks[level](formula, Context(seed))
        return Result(name, level, mutant, outcome, seed, time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
