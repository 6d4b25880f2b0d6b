"""``python -m validation run PROTOCOL``."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedmask.display import run_app
from validation.protocol import load_protocol, protocol_names
from validation.run import cliff, run_protocol, summary_table

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


@app.command()
def run(
    protocol: Annotated[str, typer.Argument(help=f"One of {', '.join(protocol_names())}, or a TOML file of your own.")],
    out: Annotated[Path | None, typer.Option(help="Default: runs/PROTOCOL.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Another data set than the protocol's: see fedmask simulate.")
    ] = None,
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Where to compute.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    workers: Annotated[int | None, typer.Option(help="Processes on the CPU; default: one a core.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the table.")] = False,
) -> None:
    """Run the cells of a protocol and print them side by side; the same command goes on after an interruption."""
    chosen = load_protocol(protocol, device=device, seed=seed)
    directory = out or Path("runs") / chosen.name
    summaries = run_protocol(chosen, directory, data=data, workers=workers, quiet=quiet)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(summary_table(chosen, summaries))
    console.print(cliff(summaries), highlight=False)
    console.print(f"Rounds, checkpoints and provenance are in {directory}.", highlight=False)


if __name__ == "__main__":
    run_app(app, "validation")
