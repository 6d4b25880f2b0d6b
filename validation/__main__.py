"""``python -m validation run PROTOCOL``."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from fedmask.display import run_app
from fedmask.errors import FedmaskError
from fedmask.federated import load_data
from fedmask.files import to_json
from validation.attribution import State, data_of, load_measurements, open_state, write_measurement
from validation.attribution import attribute as measure_parts
from validation.attribution import batch_sizes as measure_batch_sizes
from validation.compare import comparisons
from validation.curvature import measure_curvature
from validation.protocol import Protocol, load_protocol, protocol_names
from validation.records import load_records, record_runs, unfinished
from validation.run import cliff, plan, plan_table, run_protocol, summary_table
from validation.tables import (
    batch_table,
    comparison_json,
    comparison_tables,
    curvature_tables,
    markdown,
    measured_markdown,
    parts_table,
    settings,
    verdict_table,
)
from validation.verdicts import verdicts

app = typer.Typer(
    help="Rerun the paper's experiment.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


@app.callback()
def _root() -> None:
    """Rerun the paper's experiment with the masking code of fedmask."""


Name = Annotated[str, typer.Argument(help=f"One of {', '.join(protocol_names())}, or a TOML file of your own.")]
Out = Annotated[Path | None, typer.Option(help="Default: runs/PROTOCOL.")]
Data = Annotated[str | None, typer.Option(help="Another data set than the protocol's: see fedmask simulate.")]
Device = Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to compute; auto: cuda where there is one.")]
Cells = Annotated[str | None, typer.Option(help="Only these cells, by id and separated by commas; plan lists them.")]
Seeds = Annotated[str | None, typer.Option(help="Seeds separated by commas; default: the protocol's.")]
Processes = Annotated[int | None, typer.Option(help="Processes on the CPU; default: one a core.")]


@app.command()
def run(
    protocol: Name,
    out: Out = None,
    data: Data = None,
    device: Device = "auto",
    cells: Cells = None,
    seeds: Seeds = None,
    workers: Processes = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start the chosen cells again, whatever their directories hold of them.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the table.")] = False,
) -> None:
    """Run the cells of a protocol and print them side by side; the same command goes on after an interruption.

    Every cell has a directory of its own below --out, so cells can be run on several machines and their
    directories put together.
    """
    chosen = _chosen(protocol, device, cells, seeds)
    directory = out or Path("runs") / chosen.name
    summaries = run_protocol(chosen, directory, data=data, workers=workers, overwrite=overwrite, quiet=quiet)
    console = _console()
    console.print(summary_table(chosen, summaries))
    console.print(cliff(summaries), highlight=False)
    console.print(f"Rounds, checkpoints and provenance are in {directory}.", highlight=False)


@app.command(name="plan")
def plan_command(
    protocol: Name,
    out: Out = None,
    data: Data = None,
    device: Device = "auto",
    cells: Cells = None,
    seeds: Seeds = None,
    workers: Processes = None,
) -> None:
    """Print what the cells cost, from a measured training step, before anything runs; what is done counts as done."""
    chosen = _chosen(protocol, device, cells, seeds)
    costs = plan(chosen, out or Path("runs") / chosen.name, data=data, workers=workers)
    _console().print(plan_table(chosen, costs))


Directories = Annotated[list[Path], typer.Argument(help="Directories of runs or of records; several are put together.")]


@app.command()
def record(
    directory: Annotated[Path, typer.Argument(help="A directory of runs.")],
    to: Annotated[Path, typer.Option(help="Where the records go.")],
) -> None:
    """Write a small JSON file of every finished run: configuration, seed, data, versions, device, every round."""
    files = record_runs(directory, to)
    for file in files:
        typer.echo(f"{file} ({file.stat().st_size / 1024:.0f} KiB)")
    for line in unfinished([directory]):
        typer.echo(f"not finished: {line}")


@app.command()
def compare(
    directories: Directories,
    as_json: Annotated[bool, typer.Option("--json", help="Strict JSON instead of tables.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Markdown instead of tables.")] = False,
) -> None:
    """Lay finished runs beside the paper's tables, each figure with its interval, and judge the paper's claims.

    Intervals are within one run, by a block bootstrap over rounds, nominally 95 %; they say nothing of other seeds
    and are too narrow where rounds are few and correlated: simulated, 10 rounds with a lag-one correlation of 0,
    0.5 and 0.7 are covered in 88, 73 and 62 % of cases, 50 rounds in 92, 91 and 86 %.
    """
    found = comparisons(load_records(directories))
    if as_json:
        typer.echo(to_json([comparison_json(kind) for kind in found], indent=2))
    elif as_markdown:
        typer.echo("\n".join(markdown(kind) for kind in found))
        measured = (load_measurements(directories, kind) for kind in ("attribution", "batch sizes", "curvature"))
        typer.echo(measured_markdown(*measured), nl=False)
    else:
        console = Console(width=None if sys.stdout.isatty() else 150)
        for kind in found:
            for table in comparison_tables(kind):
                console.print(table)
            if any(row.paper for row in kind.rows):
                console.print(verdict_table(verdicts(kind.rows)))
            for line in settings(kind):
                console.print(f"Runs: {line}.", highlight=False)
    for line in unfinished(directories):
        typer.echo(f"not finished: {line}", err=True)


@app.command()
def attribute(
    run: Annotated[Path, typer.Argument(help="The directory of one run, with checkpoints.")],
    rounds: Annotated[str, typer.Option(help="After which rounds, separated by commas; 0: the initial weights.")] = "0",
    sizes: Annotated[
        str | None,
        typer.Option("--batch-sizes", help="Instead, for one local step, the noise at these sizes: 8,32,128."),
    ] = None,
    data: Data = None,
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Where to compute.")] = "the run's",
    to: Annotated[
        Path | None, typer.Option(help="Where the JSON files go; default: attribution beside the run.")
    ] = None,
) -> None:
    """Measure what the noise of a round is made of: minibatches, finite shards, heterogeneity.

    Or with --batch-sizes, what per-sample gradients predict for one local step, beside what it is.
    """
    after, wanted = _numbers("--rounds", rounds), None if sizes is None else _numbers("--batch-sizes", sizes)
    for state in _states(run, after, data, device):
        with Progress(console=Console(stderr=True), transient=True) as progress:
            if wanted is None:
                found = measure_parts(state, progress=progress)
            else:
                found = measure_batch_sizes(state, wanted, progress=progress)
        path = write_measurement(found, to or run.parent / "attribution")
        _console().print((parts_table if wanted is None else batch_table)([found]))
        typer.echo(path)


@app.command()
def curvature(
    run: Annotated[Path, typer.Argument(help="The directory of one run, with checkpoints.")],
    rounds: Annotated[str, typer.Option(help="After which rounds, separated by commas; 0: the initial weights.")] = "0",
    images: Annotated[int, typer.Option(help="Training images that stand for the global loss.")] = 1000,
    draws: Annotated[int, typer.Option(help="Random block signs a curvature; each costs a product per client.")] = 4,
    pairs: Annotated[int, typer.Option(help="Pairs of complementary masks for the excess loss.")] = 16,
    data: Data = None,
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Where to compute.")] = "the run's",
    to: Annotated[
        Path | None, typer.Option(help="Where the JSON files go; default: attribution beside the run.")
    ] = None,
) -> None:
    """Measure 1/Δ_S in the Hessian's and the Gauss-Newton matrix's norm, and where the expansion holds.

    On the real network: the exact R_shr/R_ind beside the Euclidean factor, the blocks that carry the penalty, and
    the loss that masks really cost beside R_ind and R_shr, for the updates and for smaller multiples of them.
    """
    after = _numbers("--rounds", rounds)
    for state in _states(run, after, data, device):
        with Progress(console=Console(stderr=True), transient=True) as progress:
            found = measure_curvature(state, images=images, draws=draws, pairs=pairs, progress=progress)
        path = write_measurement(found, to or run.parent / "attribution")
        for table in curvature_tables([found]):
            _console().print(table)
        typer.echo(path)


@app.command()
def report(
    directories: Directories,
    out: Annotated[Path, typer.Option(help="Where report.html and its figures go.")] = Path("runs/report"),
) -> None:
    """Write one self-contained HTML file about finished runs, with figures, and the figures as PNG files."""
    records = load_records(directories)
    try:
        from validation.report import write_report
    except ModuleNotFoundError as error:
        raise FedmaskError(f"the report needs {error.name}: pip install 'fedmask[report]'") from None
    measured = {kind: load_measurements(directories, kind) for kind in ("attribution", "batch sizes", "curvature")}
    for file in write_report(records, out, waiting=unfinished(directories), measured=measured):
        typer.echo(file)


def _states(run: Path, rounds: list[int], data: str | None, device: str) -> Iterator[State]:
    images = load_data(data or data_of(run))
    for round_ in rounds:
        yield open_state(run, round_, images, device=None if device == "the run's" else device)


def _chosen(protocol: str, device: str, cells: str | None, seeds: str | None) -> Protocol:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    numbers = None if seeds is None else _numbers("--seeds", seeds)
    names = None if cells is None else [cell.strip() for cell in cells.split(",")]
    return load_protocol(protocol, device=device, seeds=numbers, cells=names)


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise FedmaskError(f"{option} is {text!r}; give whole numbers separated by commas, such as 0,1,2") from None


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120)


if __name__ == "__main__":
    run_app(app, "validation")
