"""The round loop: cohort → local training → one pass over the updates → statistics → step.

A run is a pure function of its configuration, its data and its model: not of the number of workers, nor of
where it was interrupted. Updates are aggregated in the order of client ids. Rounds count from 1, in the log
and in the masks.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmask.aggregate import Aggregate, masked_mean
from fedmask.blocks import Blocks, average_buffers
from fedmask.errors import FedmaskError
from fedmask.federated.config import RunConfig
from fedmask.federated.data import ImageData, load_data
from fedmask.federated.directory import Checkpoint, RunDirectory
from fedmask.federated.partition import Partition, dirichlet_partition
from fedmask.federated.provenance import provenance
from fedmask.federated.training import ClientReport, ModelFactory, Trainer, one_thread
from fedmask.federated.workers import InProcess, Processes, Workers, default_workers
from fedmask.masks import cohort_masks
from fedmask.randomness import Purpose, permutation
from fedmask.statistics import (
    Statistic,
    fedexp_step,
    noise,
    recovery_factor,
    signal,
)

__all__ = ["Progress", "RoundRecord", "RunResult", "check_device", "draw_cohort", "simulate", "summarize"]


@dataclass(frozen=True)
class RoundRecord:
    """One line of rounds.jsonl. Statistics are of the unmasked updates; a null one has its reason.

    Attributes:
        round: from 1.
        recovery_factor, recovery_factor_weighted, signal, noise, fedexp_step: see
            :mod:`fedmask.statistics`.
        effective_cohort_size: 1/Σa_k².
        accuracy, loss: on the whole test set after the round's step, where evaluated.
        train_loss: n_k-weighted mean over clients of the loss seen while training.
        clients: the ids whose updates were averaged, ascending; counts: their n_k; steps: their gradient
            steps.
        skipped: clients of the cohort that were not, each with the reason.
        mean_squared_norm: A per block, (1/K_c)Σ‖Δ_k^(b)‖²; squared_norm_of_mean: B per block, ‖Δ̄^(b)‖²
            of the unweighted mean.
        reasons: for each null among the statistics, why.
    """

    round: int
    recovery_factor: float | None
    recovery_factor_weighted: float | None
    signal: float | None
    noise: float | None
    fedexp_step: float | None
    effective_cohort_size: float
    accuracy: float | None
    loss: float | None
    train_loss: float
    clients: list[int]
    counts: list[int]
    steps: list[int]
    skipped: list[dict[str, Any]]
    mean_squared_norm: list[float]
    squared_norm_of_mean: list[float]
    reasons: dict[str, str]


@dataclass(frozen=True)
class Progress:
    """What a display may be told: a client is done (``record`` None), or the whole round is."""

    round: int
    clients_done: int
    record: RoundRecord | None


@dataclass(frozen=True)
class RunResult:
    """A finished run: its records (as in rounds.jsonl), its summary, and the final weights by name.

    There are no weights where a finished run's directory was given whose last checkpoint is gone.
    """

    records: list[dict[str, Any]]
    summary: dict[str, Any]
    weights: Mapping[str, Tensor]
    diverged: tuple[int, ...] = ()


@dataclass
class _State:
    round: int
    weights: Tensor
    buffers: dict[str, Tensor]


def simulate(
    config: RunConfig,
    *,
    data: ImageData | str | Path,
    model: ModelFactory | None = None,
    out: Path | str | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    keep_every: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> RunResult:
    """Run FedAvg, or go on with it.

    Args:
        config: all that the result depends on, beside data and model.
        data: a loaded data set, or what :func:`fedmask.federated.data.load_data` takes.
        model: makes a model of your own (picklable, if there are several workers); None: ``config.model``.
        out: the run directory; None keeps the run in memory.
        workers: processes on the CPU; None is one a core.
        overwrite: start again where ``out`` holds another run.
        keep_every: keep the checkpoints of the rounds that it divides, beside the newest two.
        on_progress: told of every client and every round.

    Raises:
        FedmaskError: on anything wrong with configuration, data or directory, or a non-finite update.
    """
    images = data if isinstance(data, ImageData) else load_data(data)
    workers = default_workers(config) if workers is None else workers
    check_device(config.device, workers)
    partition = dirichlet_partition(
        images.train_labels, config.clients, config.alpha, config.seed, min_samples=config.min_samples
    )
    trainer = Trainer(config, images, partition, model)
    if out is None:
        return _simulated(config, images, partition, trainer, model, workers, None, on_progress)
    identity = _identity(config, images, partition, trainer.blocks)
    with RunDirectory(Path(out), identity, overwrite=overwrite, keep_every=keep_every) as directory:
        if (summary := directory.finished(config.rounds)) is not None and not directory.has_checkpoint(config.rounds):
            return RunResult(directory.records(), summary, {})
        return _simulated(config, images, partition, trainer, model, workers, directory, on_progress)


def _simulated(
    config: RunConfig,
    data: ImageData,
    partition: Partition,
    trainer: Trainer,
    model: ModelFactory | None,
    workers: int,
    directory: RunDirectory | None,
    on_progress: Callable[[Progress], None] | None,
) -> RunResult:
    state = _State(0, trainer.weights.clone(), trainer.buffers())
    records: list[dict[str, Any]] = []
    if directory is not None:
        if (checkpoint := directory.resume()) is not None:
            state = _restored(checkpoint, trainer)
        directory.describe({**provenance(config.device), "workers": workers, "resumed_after": state.round})
        records = directory.records()
    if state.round < config.rounds:
        with _workers(workers, trainer, config, data, partition, model) as pool:
            for record, seconds in _rounds(config, partition, trainer.blocks, pool, state, on_progress):
                started = time.perf_counter()
                plain = dict(vars(record))
                if directory is not None:
                    directory.append(plain, seconds)
                    if state.round % config.checkpoint_every == 0 or state.round == config.rounds:
                        directory.save(_checkpoint(state, trainer.blocks))
                records.append(plain)
                seconds["write"] = time.perf_counter() - started
                if on_progress is not None:
                    on_progress(Progress(record.round, len(record.clients), record))
    summary = summarize(records)
    if directory is not None:
        directory.finish(summary)
    weights = _checkpoint(state, trainer.blocks).parameters
    return RunResult(records, summary, weights, tuple(directory.diverged) if directory else ())


def draw_cohort(config: RunConfig, round_: int) -> list[int]:
    """The K_c clients of a round, uniformly without replacement, ascending."""
    order = permutation(config.seed, Purpose.COHORT, config.clients, round_=round_)
    return sorted(order[: config.cohort].tolist())


def summarize(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A run in a few numbers: medians over its last quarter, as the paper takes them (50 of 200 rounds)."""
    last = records[-max(1, len(records) // 4) :]
    factors = [record["recovery_factor"] for record in records if record["recovery_factor"] is not None]
    evaluated = [record for record in records if record["accuracy"] is not None]
    names = ("recovery_factor", "recovery_factor_weighted", "signal", "noise")
    return {
        "rounds": len(records),
        "median_over_last": len(last),
        **{name: _median([record[name] for record in last]) for name in names},
        "share_below_one": sum(factor < 1 for factor in factors) / len(factors) if factors else None,
        "accuracy": evaluated[-1]["accuracy"] if evaluated else None,
        "loss": evaluated[-1]["loss"] if evaluated else None,
        "skipped_updates": sum(len(record["skipped"]) for record in records),
    }


def _rounds(
    config: RunConfig,
    partition: Partition,
    blocks: Blocks,
    pool: Workers,
    state: _State,
    on_progress: Callable[[Progress], None] | None,
) -> Iterator[tuple[RoundRecord, dict[str, float]]]:
    """Advance ``state`` round by round; yield each round's record and where its seconds went."""
    while state.round < config.rounds:
        round_ = state.round + 1
        started = time.perf_counter()
        cohort = draw_cohort(config, round_)
        clients, empty = _with_samples(cohort, partition, config)
        reports: dict[int, ClientReport] = {}
        for row, report in pool.train(round_, clients, state.weights, state.buffers):
            reports[row] = report
            if on_progress is not None:
                on_progress(Progress(round_, len(reports), None))
        trained = time.perf_counter()
        with one_thread():
            outcome = _aggregate(config, blocks, round_, clients, reports, pool.updates)
            state.weights -= outcome.mean
        kept = [row for row, client in enumerate(clients) if client not in outcome.skipped]
        state.buffers = _merged_buffers([reports[row] for row in kept])
        state.round = round_
        aggregated = time.perf_counter()
        evaluated = round_ % config.evaluate_every == 0 or round_ == config.rounds
        loss, accuracy = pool.evaluate(state.weights, state.buffers) if evaluated else (None, None)
        skipped = [{"client": client, "reason": "no samples"} for client in empty]
        skipped += [{"client": client, "reason": "non-finite update"} for client in outcome.skipped]
        record = _record(
            round_,
            outcome,
            [clients[row] for row in kept],
            [reports[row] for row in kept],
            skipped,
            accuracy,
            loss,
        )
        ended = time.perf_counter()
        yield (
            record,
            {"train": trained - started, "aggregate": aggregated - trained, "evaluate": ended - aggregated},
        )


def _aggregate(
    config: RunConfig,
    blocks: Blocks,
    round_: int,
    clients: Sequence[int],
    reports: Mapping[int, ClientReport],
    updates: Tensor,
) -> Aggregate:
    """The server's mean for a round, dense or masked, with the statistics of the unmasked updates."""
    masks, mask_blocks = None, blocks
    if config.mask != "none":
        mask_blocks = blocks.at(config.granularity)
        masks = cohort_masks(
            seed=config.seed,
            round_=round_,
            clients=clients,
            blocks=mask_blocks.count,
            p=config.p,
            sharing=config.sharing,
        )
    return masked_mean(
        updates[: len(clients)],
        mask_blocks,
        counts=[reports[row].samples for row in range(len(clients))],
        clients=clients,
        masks=masks,
        p=1.0 if masks is None else config.p,
        statistics_blocks=blocks,
        on_nonfinite=config.on_nonfinite,
    )


def _record(
    round_: int,
    outcome: Aggregate,
    clients: list[int],
    reports: Sequence[ClientReport],
    skipped: list[dict[str, Any]],
    accuracy: float | None,
    loss: float | None,
) -> RoundRecord:
    assert outcome.sums is not None
    sums = outcome.sums
    statistics: dict[str, Statistic] = {
        "recovery_factor": recovery_factor(sums),
        "recovery_factor_weighted": recovery_factor(sums, weighted=True),
        "signal": signal(sums),
        "noise": noise(sums),
        "fedexp_step": fedexp_step(sums),
    }
    samples = [report.samples for report in reports]
    return RoundRecord(
        round=round_,
        **{name: statistic.value for name, statistic in statistics.items()},
        effective_cohort_size=sums.effective_clients,
        accuracy=accuracy,
        loss=loss,
        train_loss=float(np.average([report.loss for report in reports], weights=samples)),
        clients=clients,
        counts=samples,
        steps=[report.steps for report in reports],
        skipped=skipped,
        mean_squared_norm=(sums.squared_norms / sums.clients).tolist(),
        squared_norm_of_mean=(sums.squared_norm_of_sum / sums.clients**2).tolist(),
        reasons={name: statistic.reason for name, statistic in statistics.items() if statistic.reason},
    )


def _with_samples(cohort: Sequence[int], partition: Partition, config: RunConfig) -> tuple[list[int], list[int]]:
    if config.control == "identical-clients":
        return list(cohort), []
    counts = partition.counts
    clients = [client for client in cohort if counts[client] > 0]
    if not clients:
        raise FedmaskError(f"no client of the cohort {list(cohort)} has samples; use fewer clients or min_samples=1")
    return clients, [client for client in cohort if counts[client] == 0]


def _merged_buffers(reports: Sequence[ClientReport]) -> dict[str, Tensor]:
    total = sum(report.samples for report in reports)
    return average_buffers([report.buffers for report in reports], [report.samples / total for report in reports])


def _identity(config: RunConfig, data: ImageData, partition: Partition, blocks: Blocks) -> dict[str, Any]:
    """What makes a run the run it is: the content of config.json."""
    return {
        "config": config.to_json(),
        "data": {
            "name": data.name,
            "fingerprint": data.fingerprint,
            "train_samples": len(data.train_labels),
            "test_samples": len(data.test_labels),
            "image_shape": list(data.train_images.shape[1:]),
            "classes": list(data.classes),
        },
        "partition": {
            "smallest": int(partition.counts.min()),
            "largest": int(partition.counts.max()),
            "tries": partition.tries,
            "moved": partition.moved,
        },
        "model": {
            "parameters": blocks.parameters,
            "blocks": [
                {"name": name, "size": int(size)} for name, size in zip(blocks.block_names, blocks.sizes, strict=True)
            ],
        },
    }


def _checkpoint(state: _State, blocks: Blocks) -> Checkpoint:
    parameters = {name: view.cpu().clone() for name, view in blocks.views(state.weights).items()}
    return Checkpoint(state.round, parameters, {name: buffer.cpu() for name, buffer in state.buffers.items()})


def _restored(checkpoint: Checkpoint, trainer: Trainer) -> _State:
    weights = torch.empty_like(trainer.weights)
    trainer.blocks.flatten(checkpoint.parameters, out=weights)
    buffers = {name: buffer.to(weights.device) for name, buffer in checkpoint.buffers.items()}
    return _State(checkpoint.round, weights, buffers)


def _workers(
    workers: int,
    trainer: Trainer,
    config: RunConfig,
    data: ImageData,
    partition: Partition,
    model: ModelFactory | None,
) -> AbstractContextManager[Workers]:
    if workers == 1:
        return nullcontext(InProcess(trainer, config))
    return Processes(workers, trainer, config, data, partition, model)


def check_device(device: str, workers: int) -> None:
    """Check that a device is there and can have so many workers.

    Raises:
        FedmaskError: if not.
    """
    if workers < 1:
        raise FedmaskError(f"{workers} workers were asked for; there must be at least one")
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise FedmaskError(f"device {device!r} is not supported; use cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise FedmaskError("device cuda was asked for, but PyTorch finds no CUDA device; use --device cpu")
    if kind == "cuda" and workers > 1:
        raise FedmaskError(f"{workers} workers were asked for on {device}; a CUDA device is driven by one")


def _median(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return float(np.median(numbers)) if numbers else None
