"""Recorded results: what is kept of a finished run, small enough for the repository, in a file of its own.

A record holds the run's configuration, data, provenance and the statistics of every round; of the per-block
norms, those of at most 40 rounds. It is a function of the run's directory, and never a checkpoint.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from fedmask.errors import FedmaskError
from fedmask.federated import RunConfig
from fedmask.files import to_json, write_atomic
from validation.protocol import Cell

__all__ = ["Record", "load_records", "record_runs", "unfinished"]

FORMAT = 1
COLUMNS = (
    "recovery_factor",
    "recovery_factor_weighted",
    "signal",
    "noise",
    "effective_cohort_size",
    "accuracy",
    "loss",
    "train_loss",
)
_BLOCK_ROUNDS = 40
_KEPT_PROVENANCE = ("started", "commit", "python", "versions", "platform", "machine", "cores", "device", "workers")


@dataclass(frozen=True)
class Record:
    """A finished run as it is recorded.

    Attributes:
        config: of the run.
        content: everything, as JSON values; see :func:`record_runs`.
    """

    config: RunConfig
    content: Mapping[str, Any]

    @property
    def id(self) -> str:
        """The cell's id."""
        return Cell("", self.config).id

    @property
    def slug(self) -> str:
        """The cell's id with its seed."""
        return Cell("", self.config).slug

    @property
    def kind(self) -> str:
        """What runs must share to stand in one table: data, network, clients, rounds and the rest of local SGD."""
        c, data = self.config, self.content["data"]
        mask = "" if c.mask == "none" else f", {c.mask} masks p = {c.p:g}"
        rest = f", momentum {c.momentum:g}" if c.momentum else ""
        rest += f", weight decay {c.weight_decay:g}" if c.weight_decay else ""
        rest += f", {c.precision}" if c.precision != "float32" else ""
        rest += f", control {c.control}" if c.control != "none" else ""
        stem = f", {c.stem} stem" if c.model == "resnet18" else ""
        return (
            f"{_data_name(data)}, {c.model}{stem}, GroupNorm {c.groups}, {c.clients} clients, "
            f"{c.cohort} a round, {c.rounds} rounds, learning rate {c.learning_rate:g}{rest}{mask}"
        )

    @property
    def is_papers_experiment(self) -> bool:
        """Whether the paper's figures may stand beside it: CIFAR-10's images, its network, its clients."""
        c, data = self.config, self.content["data"]
        images = (data["train_samples"], data["image_shape"], len(data["classes"])) == (50_000, [3, 32, 32], 10)
        usual = (c.model, c.clients, c.cohort, c.control) == ("resnet18", 100, 10, "none")
        return images and usual and c.learning_rate == 0.01

    @property
    def commits(self) -> str:
        """The commits that the run was started and resumed from, short; a tree that differs from one is marked."""
        whole = (str(commit).partition(" ") for commit in self.content["provenance"]["commits"])
        return ", ".join(f"{commit[:7]}{space}{mark}" for commit, space, mark in whole)

    @property
    def last(self) -> int:
        """How many rounds at the end medians are over: a quarter, as the paper takes 50 of 200."""
        return max(1, self.config.rounds // 4)

    @property
    def local_steps(self) -> int:
        """Median number of gradient steps of a client in a round."""
        return int(self.content["median_local_steps"])

    def column(self, name: str) -> Float64[np.ndarray, " rounds"]:
        """A statistic of every round; NaN where it is undefined or was not measured."""
        return np.array([np.nan if value is None else value for value in self.content["rounds"][name]], dtype=float)

    def accuracy(self) -> float:
        """Final test accuracy."""
        return float(self.column("accuracy")[-1])

    def block_factors(self) -> tuple[list[int], Float64[np.ndarray, "rounds blocks"]]:
        """Rounds and the recovery factor of each block in them: K_c·B/A."""
        blocks = self.content["blocks"]
        a, b = (np.array(blocks[name], dtype=float) for name in ("mean_squared_norm", "squared_norm_of_mean"))
        clients = np.array(blocks["clients"], dtype=float)[:, None]
        return blocks["rounds"], np.divide(clients * b, a, out=np.full_like(a, np.nan), where=a > 0)


def record_runs(directory: Path, folder: Path) -> list[Path]:
    """Write the record of every finished run below ``directory`` into ``folder``; return the files.

    Raises:
        FedmaskError: if ``directory`` holds no run, or one whose files do not fit each other.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for run in _run_directories(directory):
        if (run / "summary.json").exists():
            record = _read_run(run)
            path = folder / f"{record.slug}.json"
            write_atomic(path, (to_json(record.content) + "\n").encode("utf-8"))
            written.append(path)
    return written


def load_records(directories: Sequence[Path]) -> list[Record]:
    """All finished runs in directories of runs, of records, or both, each once.

    Raises:
        FedmaskError: if a directory holds neither, a file is damaged, or two differ on the same run.
    """
    found: dict[tuple[str, str], Record] = {}
    for directory in directories:
        for path in _results(directory):
            if path.is_dir() and not (path / "summary.json").exists():
                continue
            record = _read_run(path) if path.is_dir() else _read_file(path)
            there = found.setdefault((record.kind, record.slug), record)
            if there.content["rounds"] != record.content["rounds"]:
                raise FedmaskError(f"{path} and another of these directories hold different runs of {record.slug}")
    if not found:
        raise FedmaskError(f"{', '.join(map(str, directories))}: no run is finished there; see `run`, or wait for it")
    return list(found.values())


def unfinished(directories: Sequence[Path]) -> list[str]:
    """The runs in these directories that are not finished, with their rounds so far."""
    lines = []
    for directory in directories:
        for run in _results(directory):
            if run.is_dir() and not (run / "summary.json").exists():
                log = run / "rounds.jsonl"
                done = len(log.read_bytes().splitlines()) if log.exists() else 0
                lines.append(f"{run.name} ({done} rounds so far)")
    return lines


def _results(directory: Path) -> list[Path]:
    """Directories of runs and files of records: the directory itself, or what is in it."""
    if (directory / "config.json").exists():
        return [directory]
    files = sorted(directory.glob("*.json"))
    return [*files, *sorted(path.parent for path in directory.glob("*/config.json"))] or _run_directories(directory)


def _run_directories(directory: Path) -> list[Path]:
    if (directory / "config.json").exists():
        return [directory]
    runs = sorted(path.parent for path in directory.glob("*/config.json"))
    if not runs:
        raise FedmaskError(f"{directory} holds neither runs nor records; give a directory that `run` or `record` wrote")
    return runs


def _read_run(run: Path) -> Record:
    try:
        identity = json.loads((run / "config.json").read_text(encoding="utf-8"))
        lines = (run / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
        rounds = [json.loads(line) for line in lines]
        starts = json.loads((run / "provenance.json").read_text(encoding="utf-8"))["starts"]
        config = RunConfig.from_json(identity["config"])
        content = _content(config, identity, rounds, starts)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise FedmaskError(f"{run} is damaged ({error!r}); run its cell again with the same command") from None
    return Record(config, content)


def _content(
    config: RunConfig, identity: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]], starts: Sequence[Any]
) -> dict[str, Any]:
    if [record["round"] for record in rounds] != list(range(1, config.rounds + 1)):
        raise ValueError(f"its log has {len(rounds)} rounds of {config.rounds}")
    chosen = sorted({round(r) for r in np.linspace(1, config.rounds, min(_BLOCK_ROUNDS, config.rounds))})
    steps = sorted(step for record in rounds for step in record["steps"])
    provenance = [{name: start.get(name) for name in _KEPT_PROVENANCE} for start in starts]
    return {
        "format": FORMAT,
        "config": config.to_json(),
        "data": identity["data"],
        "partition": identity["partition"],
        "model": {"parameters": identity["model"]["parameters"]},
        "provenance": {
            **provenance[0],
            "starts": len(provenance),
            "commits": sorted({p["commit"] or "unknown" for p in provenance}),
        },
        "median_local_steps": steps[len(steps) // 2],
        "rounds": {name: [_short(record[name]) for record in rounds] for name in COLUMNS},
        "blocks": {
            "names": [block["name"] for block in identity["model"]["blocks"]],
            "rounds": chosen,
            "clients": [len(rounds[r - 1]["clients"]) for r in chosen],
            "mean_squared_norm": [[_short(x, 4) for x in rounds[r - 1]["mean_squared_norm"]] for r in chosen],
            "squared_norm_of_mean": [[_short(x, 4) for x in rounds[r - 1]["squared_norm_of_mean"]] for r in chosen],
        },
    }


def _data_name(data: Mapping[str, Any]) -> str:
    """What the data are, whatever their file is called: their shape, numbers and fingerprint."""
    shape = "×".join(str(n) for n in data["image_shape"])
    numbers = f"{data['train_samples']:,} + {data['test_samples']:,} images {shape} in {len(data['classes'])} classes"
    return f"{numbers} ({data['fingerprint'][:8]})"


def _short(value: float | None, digits: int = 7) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")


def _read_file(path: Path) -> Record:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}")
        record = Record(RunConfig.from_json(content["config"]), content)
        lengths = {len(record.column(name)) for name in COLUMNS}
        if lengths != {record.config.rounds}:
            raise ValueError(f"columns of {lengths} rounds")
        str((record.kind, record.commits, record.local_steps, record.is_papers_experiment, record.block_factors()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedmaskError(f"{path} is no record of a run ({error!r})") from None
    return record
