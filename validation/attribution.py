"""Where the noise of a round comes from, measured: minibatches, finite shards, or heterogeneity.

From a run's weights after some round, every client of the next round's cohort trains five times: on its own
shard with the run's batches and once more with others; on an i.i.d. shard of the same size redrawn from all
clients' data, twice too; and on other samples with its own shard's counts of each class. The noise then falls
into three parts, in two ways, each part with an unbiased estimate (see the claim ``attribution`` of
:mod:`theory`), and all are functions of one Gram matrix.

Against i.i.d. shards, heterogeneity is what i.i.d. shards would not have; it is negative where shards are more
alike than i.i.d. ones, as those of a Dirichlet partition with a large α are: they hold nearly equal shares of
every class. Against a client's own law (samples with its class counts), it is what differs between the laws.

For one local step the noise at any batch size follows from per-sample gradients, and is laid beside measured
points.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int64
from rich.progress import Progress
from scipy import special

from fedmask import gram_matrices
from fedmask.errors import FedmaskError
from fedmask.federated import ImageData, RunConfig, dirichlet_partition, draw_cohort
from fedmask.federated.directory import read_checkpoint
from fedmask.federated.provenance import provenance
from fedmask.federated.rounds import check_device
from fedmask.federated.training import Trainer, one_thread
from fedmask.files import to_json, write_atomic
from fedmask.randomness import Purpose, words
from validation.protocol import Cell

__all__ = [
    "OWN_LAW",
    "PARTS",
    "Parts",
    "State",
    "attribute",
    "batch_sizes",
    "data_of",
    "load_measurements",
    "noise_parts",
    "open_state",
    "tracked",
    "where",
    "write_measurement",
]

PARTS = ("minibatch", "finite shards", "heterogeneity")
OWN_LAW = ("finite shards, own law", "heterogeneity, own law")
TRAININGS = 5
LEVEL = 0.95


@dataclass(frozen=True)
class State:
    """A run's weights after some round, and what local training from them needs."""

    config: RunConfig
    round: int
    data: ImageData
    trainer: Trainer
    weights: torch.Tensor
    buffers: dict[str, torch.Tensor]

    @property
    def cohort(self) -> list[int]:
        """The clients of the next round that hold at least two samples."""
        return [k for k in draw_cohort(self.config, self.round + 1) if len(self.trainer.shard(k)) >= 2]

    def with_config(self, **changes: Any) -> "State":
        """The same weights, to be trained from by another configuration of local training."""
        config = dataclasses.replace(self.config, **changes)
        return dataclasses.replace(self, config=config, trainer=_trainer(config, self.data))


def data_of(run: Path) -> str:
    """The data set that comes with the kit and that a run was on: "digits" or "cifar10".

    Raises:
        FedmaskError: if there is no such run, or it was on other data.
    """
    name = str(_identity(run)["data"]["name"])
    if name not in ("digits", "cifar10"):
        raise FedmaskError(f"{run} was run on {name}; give the same data by --data")
    return name


def open_state(run: Path, round_: int, data: ImageData, *, device: str | None = None) -> State:
    """The state of a run after a round (0: its initial weights); the run may be going on.

    Args:
        run: its directory.
        round_: for which there must be a checkpoint.
        data: what it was run on.
        device: another than the run's.

    Raises:
        FedmaskError: if there is no such run or checkpoint, or the run was on other data.
    """
    identity = _identity(run)
    config, fingerprint = RunConfig.from_json(identity["config"]), identity["data"]["fingerprint"]
    if fingerprint != data.fingerprint:
        raise FedmaskError(
            f"{run} was run on data with fingerprint {fingerprint[:12]}, and {data.name} has {data.fingerprint[:12]}; "
            "give the same data by --data"
        )
    config = config if device is None else dataclasses.replace(config, device=device)
    check_device(config.device, 1)
    trainer = _trainer(config, data)
    if round_ == 0:
        return State(config, 0, data, trainer, trainer.weights.clone(), trainer.buffers())
    checkpoint = read_checkpoint(run, round_)
    weights = torch.empty_like(trainer.weights)
    trainer.blocks.flatten(checkpoint.parameters, out=weights)
    buffers = {name: buffer.to(weights.device) for name, buffer in checkpoint.buffers.items()}
    return State(config, round_, data, trainer, weights, buffers)


def _identity(run: Path) -> dict[str, Any]:
    try:
        identity: dict[str, Any] = json.loads((run / "config.json").read_text(encoding="utf-8"))
        RunConfig.from_json(identity["config"])
        str(identity["data"]["name"]), str(identity["data"]["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedmaskError(f"{run} is no directory of a run ({error!r})") from None
    return identity


def _trainer(config: RunConfig, data: ImageData) -> Trainer:
    partition = dirichlet_partition(
        data.train_labels, config.clients, config.alpha, config.seed, min_samples=config.min_samples
    )
    return Trainer(config, data, partition, None)


# The three parts.


@dataclass(frozen=True)
class Parts:
    """The noise σ̂² and its parts, and their shares of it, each with a 95 % jackknife interval over clients; the signal.

    A share has an interval of its own: a part and the whole go up and down together.
    """

    noise: float
    signal: float
    parts: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    share_intervals: dict[str, tuple[float, float]]


def noise_parts(gram: Float64[np.ndarray, "trainings trainings"]) -> Parts:
    """The parts from the Gram matrix of 5·K updates: own shard, again, redrawn shard, again, other samples.

    minibatch = ½ mean ‖Δ_k − Δ_k′‖² on one shard; finite shards = σ̂² of the redrawn less their minibatch part;
    heterogeneity = the rest of σ̂², which is the mean over both own trainings. By a client's own law: finite
    shards = ½ mean ‖Δ_k − Δ_k″‖² less the minibatch part, with Δ_k″ on other samples of the same classes.
    """
    clients = len(gram) // TRAININGS
    if len(gram) != TRAININGS * clients or clients < 3:
        raise FedmaskError(f"the Gram matrix has {len(gram)} rows; five trainings of at least three clients are needed")
    every = np.arange(clients)
    total, parts, signal = _split(gram, every, clients)
    without = [_split(gram, np.delete(every, k), clients)[:2] for k in every]
    intervals = {name: _jackknifed(parts[name], [split[name] for _, split in without]) for name in parts}
    shares = {name: _jackknifed(parts[name] / total, [split[name] / rest for rest, split in without]) for name in parts}
    return Parts(total, signal, parts, intervals, shares)


def _jackknifed(value: float, without: Sequence[float]) -> tuple[float, float]:
    n = len(without)
    values = np.array(without)
    error = special.stdtrit(n - 1, (1 + LEVEL) / 2) * np.sqrt((n - 1) / n * np.sum((values - values.mean()) ** 2))
    return float(value - error), float(value + error)


def _split(
    gram: Float64[np.ndarray, "trainings trainings"], chosen: np.ndarray, clients: int
) -> tuple[float, dict[str, float], float]:
    own, again, redrawn, twin, other = (chosen + clients * kind for kind in range(TRAININGS))

    def noise(rows: np.ndarray) -> float:
        part = gram[np.ix_(rows, rows)]
        return float((np.trace(part) - part.sum() / len(rows)) / (len(rows) - 1))

    def halved(one: np.ndarray, other: np.ndarray) -> float:
        """½ mean ‖Δ − Δ′‖²."""
        gaps = gram[one, one] + gram[other, other] - 2 * gram[one, other]
        return float(gaps.mean()) / 2

    total, pooled = (noise(own) + noise(again)) / 2, (noise(redrawn) + noise(twin)) / 2
    minibatch, sampled = halved(own, again), (halved(own, other) + halved(again, other)) / 2
    parts = {
        "minibatch": minibatch,
        "finite shards": pooled - halved(redrawn, twin),
        "heterogeneity": total - minibatch - pooled + halved(redrawn, twin),
        "finite shards, own law": sampled - minibatch,
        "heterogeneity, own law": total - sampled,
    }
    whole = gram[np.ix_(own, own)]
    signal = float((whole.sum() - np.trace(whole)) / (len(own) * (len(own) - 1)))
    return total, parts, signal


def attribute(state: State, *, progress: Progress | None = None) -> dict[str, Any]:
    """Measure the three parts of the next round's noise; JSON values."""
    cohort, d = state.cohort, len(state.weights)
    updates = torch.empty(TRAININGS * len(cohort), d, dtype=state.weights.dtype, device=state.weights.device)
    jobs = [(kind, row, client) for kind in range(TRAININGS) for row, client in enumerate(cohort)]
    for kind, row, client in tracked(jobs, progress, "five trainings of every client"):
        shard = None
        if kind == 4:
            shard = _same_classes(state, client)
        elif kind >= 2:
            count = len(state.trainer.shard(client))
            random = words(
                state.config.seed, Purpose.POOLED_SHARDS, count, round_=state.round + 1, client=client
            )  # with replacement, so that shards are i.i.d.
            shard = (random % np.uint64(len(state.data.train_labels))).astype(np.int64)
        with one_thread():
            state.trainer.train(
                state.round + 1,
                client,
                state.weights,
                state.buffers,
                updates[kind * len(cohort) + row],
                shard=shard,
                repeat=kind % 2,
            )
    gram = gram_matrices(updates, state.trainer.blocks).total
    found = noise_parts(gram)
    return {
        "kind": "attribution",
        **where(state),
        "clients": len(cohort),
        "noise": found.noise,
        "signal": found.signal,
        "parts": {
            name: {
                "value": found.parts[name],
                "interval": found.intervals[name],
                "share": found.parts[name] / found.noise,
                "share_interval": found.share_intervals[name],
            }
            for name in (*PARTS, *OWN_LAW)
        },
        "gram": [[float(f"{x:.9g}") for x in row] for row in gram],
    }


def _same_classes(state: State, client: int) -> Int64[np.ndarray, " samples"]:
    """Other samples with the client's counts of each class: of those it does not hold, if there are enough."""
    labels, shard = state.data.train_labels, state.trainer.shard(client)
    random = words(state.config.seed, Purpose.POOLED_SHARDS, len(labels), round_=state.round + 1, client=client, draw=1)
    order = np.argsort(random, kind="stable")
    free = order[~np.isin(order, shard)]
    chosen = []
    for label, count in zip(*np.unique(labels[shard], return_counts=True), strict=True):
        candidates = free[labels[free] == label]
        chosen.append((candidates if len(candidates) >= count else order[labels[order] == label])[:count])
    return np.concatenate(chosen)


# Batch sizes.


def batch_sizes(
    state: State, sizes: Sequence[int], *, repeats: int = 20, progress: Progress | None = None
) -> dict[str, Any]:
    """One local step: the noise and the factor at each batch size, predicted and measured; JSON values.

    Predicted from the full-batch steps and the trace of every client's per-sample gradient covariance, as
    K_c·E B/E A; measured over ``repeats`` draws of batches, with the same ratio and its jackknife interval.
    """
    cohort, rate = state.cohort, state.config.learning_rate
    shards = np.array([len(state.trainer.shard(client)) for client in cohort], dtype=float)
    full = state.with_config(batch_size="full", local_steps=1)
    a_full, b_full = _moments(full, cohort, 0)
    traces = np.array(
        [
            state.trainer.gradient_variance(client, state.weights, state.buffers)
            for client in tracked(cohort, progress, "per-sample gradients")
        ]
    )
    points = []
    for size in sizes:
        variance = float(np.mean(traces / size * np.clip(1 - size / shards, 0, None))) * rate**2
        stepping = state.with_config(batch_size=size, local_steps=1)
        moments = np.array(
            [_moments(stepping, cohort, repeat) for repeat in tracked(range(repeats), progress, f"batch {size}")]
        )
        points.append(
            {
                "batch_size": size,
                "predicted": _noise_and_factor(a_full + variance, b_full + variance / len(cohort), len(cohort)),
                "measured": _measured(moments, len(cohort)),
            }
        )
    return {
        "kind": "batch sizes",
        **where(state),
        "clients": len(cohort),
        "repeats": repeats,
        "full_batch": _noise_and_factor(a_full, b_full, len(cohort)),
        "gradient_variance": float(traces.mean()),
        "points": points,
    }


def _moments(state: State, cohort: Sequence[int], repeat: int) -> tuple[float, float]:
    """(A, B) of the cohort's updates, one local step each."""
    total = torch.zeros(len(state.weights), dtype=torch.float64, device=state.weights.device)
    norms, update = 0.0, torch.empty_like(state.weights)
    for client in cohort:
        with one_thread():
            state.trainer.train(state.round + 1, client, state.weights, state.buffers, update, repeat=repeat)
        norms += float(update.double().square().sum())
        total += update
    return norms / len(cohort), float(total.square().sum()) / len(cohort) ** 2


def _noise_and_factor(a: float, b: float, clients: int) -> dict[str, float]:
    return {"noise": (a - b) / (1 - 1 / clients), "recovery_factor": clients * b / a}


def _measured(moments: Float64[np.ndarray, "repeats 2"], clients: int) -> dict[str, Any]:
    n = len(moments)
    found = _noise_and_factor(*moments.mean(axis=0), clients)
    without = [_noise_and_factor(*np.delete(moments, i, axis=0).mean(axis=0), clients) for i in range(n)]
    result: dict[str, Any] = dict(found)
    for name, value in found.items():
        result[f"{name}_interval"] = _jackknifed(value, [one[name] for one in without])
    return result


# Files.


def where(state: State) -> dict[str, Any]:
    """Cell, configuration, data, round and provenance of a measurement."""
    start = provenance(state.config.device)
    kept = ("started", "commit", "python", "versions", "platform", "machine", "device")
    return {
        "cell": Cell("", state.config).slug,
        "config": state.config.to_json(),
        "data": {"name": state.data.name, "fingerprint": state.data.fingerprint},
        "after_round": state.round,
        "provenance": {name: start[name] for name in kept},
    }


def write_measurement(content: dict[str, Any], folder: Path) -> Path:
    """Write a measurement into ``folder``, named after its kind, cell and round."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{content['kind'].replace(' ', '-')}-{content['cell']}-round{content['after_round']}.json"
    write_atomic(folder / name, (to_json(content, indent=1) + "\n").encode("utf-8"))
    return folder / name


def load_measurements(directories: Sequence[Path], kind: str) -> list[dict[str, Any]]:
    """All measurements of a kind in the folders ``attribution`` of these directories, by cell and round.

    Raises:
        FedmaskError: if a file is damaged.
    """
    found = []
    for directory in directories:
        for path in sorted(directory.glob("attribution/*.json")):
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
                if content["kind"] == kind:
                    found.append(content)
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise FedmaskError(f"{path} is no measurement ({error!r})") from None
    return sorted(found, key=lambda one: (one["cell"], one["after_round"]))


def tracked(jobs: Sequence[Any] | range, progress: Progress | None, title: str) -> Iterator[Any]:
    """The jobs one by one, shown as they go."""
    if progress is None:
        yield from jobs
        return
    yield from progress.track(jobs, description=title)
