"""The command line: ``fedmask simulate``."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console

import fedmask
from fedmask.aggregate import OnNonfinite
from fedmask.blocks import Granularity
from fedmask.display import RunDisplay, number, percent, rounds_table, run_app
from fedmask.errors import FedmaskError
from fedmask.federated import RunConfig, load_data, simulate
from fedmask.federated.config import Control, Mask, Precision
from fedmask.federated.workers import default_workers
from fedmask.randomness import fresh_seed

app = typer.Typer(
    help="How much of an update-masking regularizer survives federated averaging.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _print_version(wanted: bool | None) -> None:
    if wanted:
        typer.echo(f"fedmask {fedmask.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool | None,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = None,
) -> None:
    pass


_data = partial(typer.Option, rich_help_panel="Data and model")
_training = partial(typer.Option, rich_help_panel="Federated training")
_masking = partial(typer.Option, rich_help_panel="Masking")
_run = partial(typer.Option, rich_help_panel="Running")


@app.command("simulate")
def simulate_command(
    data: Annotated[
        str,
        _data(
            metavar="PATH|cifar10|digits",
            help="A folder or archive of images (`<split>/<class>/<image>`), CIFAR-10 through torchvision, or the embedded 8×8 digits.",
        ),
    ] = "digits",
    data_dir: Annotated[
        Path | None,
        _data(help="Where the official CIFAR-10 archive is or goes; default: the cache."),
    ] = None,
    alpha: Annotated[
        float,
        _data(
            help="Dirichlet concentration of the partition: 100 is nearly uniform, 0.1 gives each client few classes, inf cuts evenly."
        ),
    ] = 100.0,
    clients: Annotated[int, _data(help="N, all clients.")] = 100,
    min_samples: Annotated[
        int,
        _data(help="The least that a client holds; 0 allows empty clients."),
    ] = 1,
    model: Annotated[
        Literal["resnet18", "cnn"] | None,
        _data(help="Default: cnn for digits, else resnet18 (with GroupNorm)."),
    ] = None,
    stem: Annotated[
        Literal["cifar", "torchvision"],
        _data(help="ResNet-18's first layers: 3×3 for small images, or torchvision's 7×7, about ten times faster."),
    ] = "cifar",
    groups: Annotated[int, _data(help="Groups of each GroupNorm.")] = 32,
    cohort: Annotated[int, _training(help="K_c, clients drawn each round.")] = 10,
    rounds: Annotated[int, _training(help="Rounds.")] = 200,
    batch_size: Annotated[
        str,
        _training(
            metavar="N|full",
            help="Minibatch size, or full: one gradient step over the whole shard per epoch.",
        ),
    ] = "32",
    local_epochs: Annotated[int, _training(help="τ, epochs over the shard per round.")] = 1,
    local_steps: Annotated[
        int | None,
        _training(help="Gradient steps per round, instead of epochs."),
    ] = None,
    learning_rate: Annotated[float, _training(help="Of local SGD.")] = 0.01,
    momentum: Annotated[float, _training(help="Of local SGD.")] = 0.0,
    weight_decay: Annotated[float, _training(help="Of local SGD.")] = 0.0,
    precision: Annotated[
        Precision,
        _training(
            help="bfloat16 multiplies under autocast; weights and updates stay float32. Faster or slower: benchmarks/RESULTS.md."
        ),
    ] = "float32",
    chunk_size: Annotated[
        int,
        _training(help="Samples at a time in a full-batch gradient; bounds memory."),
    ] = 250,
    on_nonfinite: Annotated[
        OnNonfinite,
        _training(help="A client that sends NaN ends the run, or is skipped and the rest reweighted."),
    ] = "error",
    control: Annotated[
        Control,
        _training(help="identical-clients: one shard and one seed for all, so that 1/Δ_S = K_c to machine precision."),
    ] = "none",
    mask: Annotated[
        Mask,
        _masking(help="Average whole updates (the paper's measurement), or masked ones."),
    ] = "none",
    p: Annotated[float, _masking("--p", help="Probability with which a block is kept.")] = 0.5,
    rho: Annotated[
        float,
        _masking(help="Correlation of masks between clients, with --mask correlated."),
    ] = 0.5,
    granularity: Annotated[Granularity, _masking(help="What one mask bit covers.")] = "tensor",
    seed: Annotated[
        int | None,
        _run(help="Of everything random. Default: a fresh one, which is printed; or that of the run in --out."),
    ] = None,
    device: Annotated[str, _run(metavar="auto|cpu|cuda", help="Where to compute.")] = "auto",
    workers: Annotated[
        int | None,
        _run(help="Processes on the CPU; default: one a core. The result does not depend on it."),
    ] = None,
    eval_every: Annotated[int, _run(help="Rounds between evaluations on the test set.")] = 1,
    checkpoint_every: Annotated[int, _run(help="Rounds between checkpoints.")] = 5,
    out: Annotated[
        Path | None,
        _run(
            help="The run directory; an existing one goes on where it stopped. Default: below runs/, named after the settings."
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        _run("--overwrite", help="Start again where --out holds another run."),
    ] = False,
    quiet: Annotated[bool, _run("--quiet", help="Print only the summary.")] = False,
) -> None:
    """Run federated averaging and measure, every round, the recovery factor 1/Δ_S with its signal and noise.

    The run goes to a directory as it proceeds. Interrupt it as you like: **the same command goes on**, to the
    same bytes. On a fresh machine, `fedmask simulate --rounds 20` runs on the embedded digits in seconds.

    The paper's experiment, one cell:

    `fedmask simulate --data cifar10 --alpha 100 --batch-size full --rounds 200 --out runs/full`
    """
    named_model = model or ("cnn" if data == "digits" else "resnet18")
    chosen_seed = _seed(seed, out, overwrite)
    config = RunConfig(
        clients=clients,
        cohort=cohort,
        rounds=rounds,
        alpha=alpha,
        min_samples=min_samples,
        batch_size=_batch_size(batch_size),
        local_epochs=local_epochs,
        local_steps=local_steps,
        learning_rate=learning_rate,
        momentum=momentum,
        weight_decay=weight_decay,
        precision=precision,
        chunk_size=chunk_size,
        model=named_model,
        stem=stem,
        groups=groups,
        mask=mask,
        p=p,
        rho=rho,
        granularity=granularity,
        seed=chosen_seed,
        device=_device(device),
        evaluate_every=eval_every,
        checkpoint_every=checkpoint_every,
        on_nonfinite=on_nonfinite,
        control=control,
    )
    directory = out or Path("runs") / _name(data, config)
    console = Console(stderr=True, quiet=quiet)
    if seed is None:
        console.print(f"seed {chosen_seed}", highlight=False)
    images = load_data(data, data_dir=data_dir, progress=not quiet)
    try:
        with RunDisplay(config.rounds, config.cohort, quiet=quiet) as display:
            result = simulate(
                config,
                data=images,
                out=directory,
                workers=default_workers(config) if workers is None else workers,
                overwrite=overwrite,
                on_progress=display.update,
            )
    except KeyboardInterrupt:
        typer.echo(f"stopped; the same command goes on from the last checkpoint in {directory}", err=True)
        raise typer.Exit(130) from None
    if result.diverged:
        console.print(
            f"rounds {list(result.diverged)} came out with other bytes than before the interruption: "
            "device, versions or thread settings differ (see provenance.json)"
        )
    if not quiet:
        Console().print(rounds_table(result.records, f"{images.name}, last rounds"))
    typer.echo(_closing_line(result.summary, directory))


def main() -> None:
    """Run the command line."""
    run_app(app, "fedmask")


def _batch_size(text: str) -> Any:
    if text == "full":
        return text
    try:
        return int(text)
    except ValueError:
        raise FedmaskError(f"--batch-size is {text!r}; use a whole number, or full") from None


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def _seed(seed: int | None, out: Path | None, overwrite: bool) -> int:
    """The seed given, or that of the run to go on with, or a fresh one."""
    if seed is not None:
        return seed
    if out is not None and not overwrite and (out / "config.json").exists():
        try:
            return int(json.loads((out / "config.json").read_text(encoding="utf-8"))["config"]["seed"])
        except (ValueError, KeyError, TypeError):
            pass  # opening the directory will say what is wrong with it
    return fresh_seed()


def _name(data: str, config: RunConfig) -> str:
    steps = f"t{config.local_epochs}" if config.local_steps is None else f"steps{config.local_steps}"
    alpha = "inf" if math.isinf(config.alpha) else f"{config.alpha:g}"
    mask = "" if config.mask == "none" else f"-{config.mask}-p{config.p:g}"
    stem = Path(data).name.split(".")[0]
    return f"{stem}-{config.model}-b{config.batch_size}-{steps}-alpha{alpha}{mask}-seed{config.seed}"


def _closing_line(summary: dict[str, Any], directory: Path) -> str:
    return (
        f"{summary['rounds']} rounds in {directory}: accuracy {percent(summary['accuracy'])}, "
        f"median over the last {summary['median_over_last']}: 1/Δ_S {number(summary['recovery_factor'])} "
        f"(weighted {number(summary['recovery_factor_weighted'])}), signal {number(summary['signal'])}, "
        f"noise {number(summary['noise'])}"
    )
