"""Run a protocol's cells, each resumable on its own, and say beforehand what that costs."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from fedmask.display import RunDisplay, number, percent
from fedmask.federated import ImageData, RunConfig, dirichlet_partition, load_data, simulate
from fedmask.federated.rounds import check_device
from fedmask.federated.training import Trainer
from fedmask.federated.workers import default_workers
from validation.protocol import Cell, Protocol

__all__ = ["Cost", "cliff", "duration", "image_passes", "plan", "plan_table", "run_protocol", "summary_table"]


def run_protocol(
    protocol: Protocol,
    out: Path,
    *,
    data: str | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> list[tuple[Cell, dict[str, Any]]]:
    """Run every cell, or go on with it, in a directory of its own below ``out``; return the summaries.

    Cells of one protocol share their data; with ``overwrite`` they start again.
    """
    images = load_data(data or protocol.data, progress=not quiet)
    left = _TimeLeft(protocol, out, len(images.train_labels))
    summaries = []
    for place, cell in enumerate(protocol.cells, 1):
        label = f"{place}/{len(protocol.cells)} {cell.name}"
        suffix = left.of(cell)
        with RunDisplay(cell.config.rounds, cell.config.cohort, quiet=quiet, label=label, suffix=suffix) as display:
            result = simulate(
                cell.config,
                data=images,
                out=out / cell.slug,
                workers=workers,
                overwrite=overwrite,
                keep_every=max(1, cell.config.rounds // 2),  # for the attribution of the noise
                on_progress=display.update,
            )
        if result.diverged and not quiet:
            print(
                f"{cell.slug}: rounds {list(result.diverged)} came out with other bytes than before the interruption: "
                "device, versions or thread settings differ (see provenance.json)",
                file=sys.stderr,
            )
        summaries.append((cell, {**result.summary, "local_steps": _median_steps(result.records)}))
    return summaries


def image_passes(config: RunConfig, train_samples: int, test_samples: int) -> tuple[int, int]:
    """(images trained on, images evaluated) in one round: a client's shard is taken to be an even share."""
    shard = train_samples // config.clients
    seen = shard * config.local_epochs
    if config.local_steps is not None:
        seen = config.local_steps * (shard if config.batch_size == "full" else min(config.batch_size, shard))
    return config.cohort * seen, test_samples // config.evaluate_every


class _TimeLeft:
    """The time left for all cells, from the image passes done since the start."""

    def __init__(self, protocol: Protocol, out: Path, samples: int) -> None:
        self._start, self._done = time.monotonic(), 0
        self._passes = {cell.slug: image_passes(cell.config, samples, 0)[0] for cell in protocol.cells}
        self._rounds = {cell.slug: cell.config.rounds - rounds_done(out / cell.slug) for cell in protocol.cells}

    def of(self, cell: Cell) -> Callable[[int], str]:
        def line(round_: int) -> str:
            self._done += self._passes[cell.slug]
            self._rounds[cell.slug] = cell.config.rounds - round_
            left = sum(self._passes[slug] * rounds for slug, rounds in self._rounds.items())
            return f"  all cells: {duration((time.monotonic() - self._start) * left / self._done)} left"

        return line


def rounds_done(directory: Path) -> int:
    """Rounds logged in a run's directory; 0 where there is none."""
    log = directory / "rounds.jsonl"
    return len(log.read_bytes().splitlines()) if log.exists() else 0


def duration(seconds: float) -> str:
    """Hours and minutes, or minutes and seconds."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s"


@dataclass(frozen=True)
class Cost:
    """What a cell costs: image passes of all its rounds, those still to do, and the seconds they take."""

    cell: Cell
    passes: int
    left: int
    seconds: float


def plan(protocol: Protocol, out: Path, *, data: str | None = None, workers: int | None = None) -> list[Cost]:
    """Measure a training step of each kind on one client, and count what every cell takes."""
    for cell in protocol.cells:
        check_device(cell.config.device, 1 if workers is None else workers)
    images = load_data(data or protocol.data)
    rates: dict[tuple[Any, ...], tuple[float, float]] = {}
    costs = []
    for cell in protocol.cells:
        config = cell.config
        kind = (config.batch_size, config.model, config.stem, config.groups, config.device)
        if kind not in rates:
            rates[kind] = _measured_rates(config, images)
        count = default_workers(config) if workers is None else workers
        trained, tested = image_passes(config, len(images.train_labels), len(images.test_labels))
        left = config.rounds - rounds_done(out / cell.slug)
        seconds = left * (trained / rates[kind][0] + tested / rates[kind][1]) / count
        costs.append(Cost(cell, config.rounds * (trained + tested), left * (trained + tested), seconds))
    return costs


def plan_table(protocol: Protocol, costs: Sequence[Cost]) -> Table:
    """The costs, with their sum."""
    table = Table(title=f"{protocol.title}\nWhat is to do, by a training step measured now", title_justify="left")
    for column in ("cell", "id", "seed"):
        table.add_column(column)
    for column in ("image passes", "to do", "time"):
        table.add_column(column, justify="right")
    for cost in costs:
        numbers = (f"{cost.passes:,}", f"{cost.left:,}", duration(cost.seconds))
        table.add_row(cost.cell.name, cost.cell.id, str(cost.cell.config.seed), *numbers)
    table.add_section()
    totals = (sum(cost.passes for cost in costs), sum(cost.left for cost in costs))
    table.add_row("all", "", "", *(f"{n:,}" for n in totals), duration(sum(cost.seconds for cost in costs)))
    return table


def _measured_rates(config: RunConfig, images: ImageData) -> tuple[float, float]:
    """Images a second of one process, trained on and evaluated."""
    steps = 1 if config.batch_size == "full" else max(1, 256 // config.batch_size)
    trial = replace(config, local_steps=steps)
    partition = dirichlet_partition(images.train_labels, config.clients, config.alpha, config.seed)
    trainer = Trainer(trial, images, partition, None)
    weights, buffers = trainer.weights.clone(), trainer.buffers()
    update = torch.empty_like(weights)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        client = int(partition.counts.argmax())
        trainer.train(1, client, weights, buffers, update)  # the first one is slow
        start = time.perf_counter()
        trainer.train(1, client, weights, buffers, update)
        if config.device != "cpu":
            torch.cuda.synchronize()
        trained = time.perf_counter() - start
        start = time.perf_counter()
        trainer.evaluate(weights, buffers, 0)
        tested = time.perf_counter() - start
    finally:
        torch.set_num_threads(before)
    shard = int(partition.counts[client])
    seen = shard if config.batch_size == "full" else min(steps * config.batch_size, steps * shard)
    return seen / trained, min(config.evaluation_batch, len(images.test_labels)) / tested


def summary_table(protocol: Protocol, summaries: Sequence[tuple[Cell, Mapping[str, Any]]]) -> Table:
    """The cells side by side, as the paper's Table I has them."""
    rounds = summaries[0][1]["median_over_last"]
    table = Table(title=f"{protocol.title}\nMedians over the last {rounds} rounds.", title_justify="left")
    table.add_column("cell")
    for column in ("local steps", "1/Δ_S", "weighted", "of K_c", "signal", "noise", "accuracy", "rounds below one"):
        table.add_column(column, justify="right")
    several = len({cell.config.seed for cell, _ in summaries}) > 1
    for cell, summary in summaries:
        table.add_row(
            f"{cell.name}, seed {cell.config.seed}" if several else cell.name,
            str(summary["local_steps"]),
            number(summary["recovery_factor"]),
            number(summary["recovery_factor_weighted"]),
            str(cell.config.cohort),
            number(summary["signal"]),
            number(summary["noise"]),
            percent(summary["accuracy"]),
            percent(summary["share_below_one"]),
        )
    return table


def cliff(summaries: Sequence[tuple[Cell, Mapping[str, Any]]]) -> str:
    """The paper's cliff as a verdict with its numbers.

    The paper (Table I) sets five full-batch steps, 3.96, against four minibatch steps, 1.36: 2.9 times as
    much recovered with about as many steps. Here every minibatch cell is set against a full-batch cell of its
    seed and α with at least as many local steps, the fewest such; the cliff counts as seen where the smallest
    batch recovers less than half.
    """
    pairs = []
    for cell, summary in summaries:
        if cell.config.batch_size == "full" or not summary["recovery_factor"]:
            continue
        full = [
            (other["local_steps"], other["recovery_factor"])
            for one, other in summaries
            if one.config.batch_size == "full"
            and (one.config.seed, one.config.alpha) == (cell.config.seed, cell.config.alpha)
            and other["local_steps"] >= summary["local_steps"]
            and other["recovery_factor"]
        ]
        if full:
            pairs.append((cell, summary, *min(full)))
    if not pairs:
        return "The cliff cannot be judged: no full-batch cell makes at least as many local steps as a minibatch cell."
    cell, summary, steps, factor = min(pairs, key=lambda pair: (int(pair[0].config.batch_size), pair[0].config.seed))
    verdict = "seen" if factor > 2 * summary["recovery_factor"] else "not seen"
    same = [pair for pair in pairs if pair[0].config.seed == cell.config.seed and pair[2:] == (steps, factor)]
    ratios = ", ".join(
        f"{factor / s['recovery_factor']:.1f} times that of batch {c.config.batch_size} at {s['local_steps']}"
        for c, s, _, _ in same
    )
    return (
        f"The cliff is {verdict}: at {steps} local steps the full batch recovers {number(factor)}, "
        f"{ratios} (paper, CIFAR-10: 3.96 at five full-batch steps, 2.9 times that at four steps of batch 128)."
    )


def _median_steps(records: Sequence[Mapping[str, Any]]) -> int:
    steps = sorted(step for record in records for step in record["steps"])
    return int(steps[len(steps) // 2])
