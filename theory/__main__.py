"""``python -m theory``: verify every claim. ``show``, ``mutants`` and ``table`` beside it."""

import sys
from collections.abc import Iterable
from typing import Annotated, cast

import typer
from rich.console import Console
from rich.progress import track

from fedmask.display import run_app
from fedmask.errors import FedmaskError
from fedmask.files import to_json
from fedmask.randomness import fresh_seed
from theory.claims import CLAIMS
from theory.registry import LEVELS, Level
from theory.verification import (
    Result,
    claim_named,
    count_of_checks,
    derivation_text,
    kill_table,
    markdown_table,
    results_json,
    results_table,
    verify,
    verify_mutants,
    verify_seeds,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")

Seed = Annotated[int | None, typer.Option(help="Replays a run; default: a fresh one, which is printed.")]
Only = Annotated[list[str] | None, typer.Option(help="Only this claim; may be given several times.")]
Workers = Annotated[int | None, typer.Option(help="Processes; default: one a core.")]


@app.callback(invoke_without_command=True)
def everything(
    context: typer.Context,
    seed: Seed = None,
    only: Only = None,
    level: Annotated[list[str] | None, typer.Option(help=f"Only this level: {', '.join(LEVELS)}.")] = None,
    workers: Workers = None,
    as_json: Annotated[bool, typer.Option("--json", help="Strict JSON instead of a table.")] = False,
) -> None:
    """Verify the paper's claims, and more: symbolically, over all masks, by sampling, and on networks.

    All sampled checks together raise a false alarm with probability below one in a million.
    """
    if context.invoked_subcommand is not None:
        return
    chosen = _seed(seed)
    if unknown := [name for name in level or () if name not in LEVELS]:
        raise FedmaskError(f"level {unknown[0]!r} is unknown; the levels are {', '.join(LEVELS)}")
    levels = cast(list[Level], level) if level else list(LEVELS)
    results = _watched(
        verify(chosen, only=only or (), levels=levels, workers=workers), count_of_checks(only=only or ())
    )
    failed = [result for result in results if not result.outcome.passed]
    if as_json:
        typer.echo(to_json(results_json(results, chosen), indent=2))
    else:
        _console().print(results_table(results))
        typer.echo(f"{len(results) - len(failed)} of {len(results)} checks pass, seed {chosen}")
    for result in failed:
        typer.echo(
            f"{result.claim} fails at level {result.level}: {result.outcome.found}; replay: "
            f"python -m theory --only {result.claim} --level '{result.level}' --seed {chosen}",
            err=True,
        )
    if failed:
        raise typer.Exit(1)


@app.command()
def mutants(seed: Seed = None, only: Only = None, workers: Workers = None) -> None:
    """Show that every check can fail: each wrong version of a claim, and the levels that reject it."""
    chosen = _seed(seed)
    results = _watched(
        verify_mutants(chosen, only=only or (), workers=workers), count_of_checks(only=only or (), mutants=True)
    )
    _console().print(kill_table(results))
    names = {(r.claim, r.mutant) for r in results}
    killed = {(r.claim, r.mutant) for r in results if not r.outcome.passed}
    levels = {(r.claim, r.level) for r in results}
    idle = levels - {(r.claim, r.level) for r in results if not r.outcome.passed}
    typer.echo(f"{len(killed)} of {len(names)} mutants rejected, seed {chosen}")
    for claim, mutant in sorted(names - killed, key=str):
        typer.echo(f"{claim}: mutant {mutant!r} survives every level", err=True)
    for claim, level in sorted(idle):
        typer.echo(f"{claim}: level {level} rejects none of its mutants", err=True)
    if names != killed or idle:
        raise typer.Exit(1)


@app.command()
def alarms(
    seeds: Annotated[int, typer.Option(help="How many fresh seeds.")] = 200,
    seed: Seed = None,
    workers: Workers = None,
) -> None:
    """Count false alarms: every sampled check, on right claims, over many fresh seeds.

    Each seed's line is there when its checks are done; to go on after a stop, give the next seed and how many remain.
    """
    first, checks = _seed(seed), sum("monte carlo" in claim.checks for claim in CLAIMS)
    chosen = range(first, first + seeds)
    results: list[Result] = []
    by_seed: dict[int, list[Result]] = {one: [] for one in chosen}
    longest = 0.0
    for result in verify_seeds(chosen, "monte carlo", workers=workers):
        results.append(result)
        ours = by_seed[result.seed]
        ours.append(result)
        if len(ours) == checks:
            alarmed = sum(not one.outcome.passed for one in ours)
            seconds, drawn = sum(one.seconds for one in ours), sum(one.outcome.samples for one in ours)
            longest = max(longest, seconds)
            typer.echo(f"seed {result.seed}: {alarmed} of {checks} alarms, {drawn:,} samples, {seconds:.1f} s")
    failed = [result for result in results if not result.outcome.passed]
    samples = sum(result.outcome.samples for result in results)
    typer.echo(
        f"{len(failed)} false alarms in {len(results)} sampled checks over seeds {first} to {first + seeds - 1}, "
        f"{samples:,} samples, at most {longest:.1f} s a seed on one core"
    )
    for result in failed:
        typer.echo(f"{result.claim}: {result.outcome.found} after {result.outcome.samples} samples", err=True)
    if failed:
        raise typer.Exit(1)


@app.command()
def show(
    claim: Annotated[str, typer.Argument(help="A claim's id.")],
    latex: Annotated[bool, typer.Option("--latex", help="Formulas as LaTeX.")] = False,
) -> None:
    """Print a claim, its assumptions, the steps of its proof and what its checks do."""
    typer.echo(derivation_text(claim_named(claim), latex=latex))


@app.command()
def table() -> None:
    """Print the README's table of claims."""
    typer.echo(markdown_table(), nl=False)


def _watched(results: Iterable[Result], total: int) -> list[Result]:
    console = Console(stderr=True)
    bar = track(results, description="checking", total=total, console=console, disable=not console.is_terminal)
    return list(bar)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 140)


def _seed(seed: int | None) -> int:
    return fresh_seed() if seed is None else seed


if __name__ == "__main__":
    run_app(app, "theory")
