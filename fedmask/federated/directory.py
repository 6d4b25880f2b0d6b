"""The run directory: what a run leaves on the disk, and how it goes on after any interruption.

======================  ==================================================================================
config.json             the configuration, the data's fingerprint and the model's blocks
rounds.jsonl            one JSON object a round, flushed; see :class:`fedmask.federated.rounds.RoundRecord`
checkpoints/            the two newest checkpoints, each with the SHA-256 that it must have to be loaded
summary.json            medians and final accuracy, once the run is done
times.jsonl             wall-clock seconds of each round
provenance.json         versions, commit, device, times of start and resumption
======================  ==================================================================================

All but the last two are functions of the configuration: interrupted anywhere or not, they end as the same
bytes. A checkpoint of round r is written after the log's line r, so after an interruption the log is at
least as long; its lines beyond the checkpoint are computed again and compared. Lines from the first damaged one
on count as not written. One process at a time has the directory: it holds a lock on it, which ends with it.
"""

import hashlib
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fedmask.errors import RunDirectoryError
from fedmask.files import to_json, write_atomic, write_json

__all__ = ["Checkpoint", "RunDirectory", "read_checkpoint"]

_OWN = ("config.json", "rounds.jsonl", "checkpoints", "summary.json", "times.jsonl", "provenance.json")


@dataclass(frozen=True)
class Checkpoint:
    """The server's state after a round: parameters and buffers by canonical name, on the CPU."""

    round: int
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


class RunDirectory:
    """A directory of one configuration; opening it again goes on where it stopped."""

    def __init__(
        self, path: Path, identity: Mapping[str, Any], *, overwrite: bool = False, keep_every: int | None = None
    ) -> None:
        """Open or make the directory of the run with this identity (the content of config.json).

        Checkpoints of rounds that ``keep_every`` divides are never forgotten.

        Raises:
            RunDirectoryError: if it holds a run of another identity, or files that are no run, or another process
                has it.
        """
        self.path = path
        self._keep_every = keep_every
        self._lost: dict[int, str] = {}
        self.diverged: list[int] = []
        path.mkdir(parents=True, exist_ok=True)
        self._unlock = _locked(path)
        try:
            self._open(identity, overwrite)
        except BaseException:
            self._unlock()
            raise

    def _open(self, identity: Mapping[str, Any], overwrite: bool) -> None:
        path = self.path
        if overwrite:
            self._clear()
        config = path / "config.json"
        if config.exists():
            _check_identity(config, identity)
        elif any(child.name in _OWN or not child.name.startswith(".") for child in path.iterdir()):
            raise RunDirectoryError(f"{path} is not empty and holds no config.json of a run; choose another directory")
        else:
            write_json(config, identity)
        (path / "checkpoints").mkdir(exist_ok=True)
        for left_over in [*path.glob(".*.tmp"), *path.glob("checkpoints/.*.tmp")]:
            left_over.unlink()

    def resume(self) -> Checkpoint | None:
        """The newest whole checkpoint that the log reaches, or None; the log is cut to it.

        Raises:
            RunDirectoryError: if there are checkpoints, but the log reaches none of them.
        """
        log = self.path / "rounds.jsonl"
        whole = _rounds(_whole_lines(log))
        checkpoint = self._newest(len(whole))
        if checkpoint is None and (there := self._newest()) is not None:
            raise RunDirectoryError(
                f"{log} has {len(whole)} whole rounds but the checkpoint is of round {there.round}; "
                f"restore the log, or remove {self.path} to start again"
            )
        done = checkpoint.round if checkpoint else 0
        for path in self._checkpoints():  # later ones, which the log does not reach
            if _round_of(path) > done:
                _remove(path)
        self._lost = {done + i + 1: line.decode() for i, line in enumerate(whole[done:])}
        if len(whole) > done or not whole:
            (self.path / "summary.json").unlink(missing_ok=True)
        _cut(log, whole[:done])
        times = self.path / "times.jsonl"
        _cut(times, _whole_lines(times))
        return checkpoint

    def append(self, record: Mapping[str, Any], seconds: Mapping[str, float]) -> None:
        """Append a round's line to the log, and its times to theirs."""
        line = to_json(record) + "\n"
        round_ = int(record["round"])
        if self._lost.pop(round_, line) != line:
            self.diverged.append(round_)
        _append(self.path / "rounds.jsonl", line)
        _append(self.path / "times.jsonl", to_json({"round": round_, **seconds}) + "\n")

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint whole, and forget all but it, the one before and those to keep."""
        stream = io.BytesIO()
        torch.save(
            {
                "round": checkpoint.round,
                "parameters": dict(checkpoint.parameters),
                "buffers": dict(checkpoint.buffers),
            },
            stream,
        )
        content = stream.getvalue()
        path = self.path / "checkpoints" / f"round-{checkpoint.round:06d}.pt"
        write_atomic(path, content)
        write_atomic(path.with_suffix(".sha256"), (hashlib.sha256(content).hexdigest() + "\n").encode())
        for old in self._checkpoints()[2:]:
            if self._keep_every is None or _round_of(old) % self._keep_every:
                _remove(old)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json."""
        write_json(self.path / "summary.json", summary)

    def describe(self, provenance: Mapping[str, Any]) -> None:
        """Write provenance.json; a resumption is added to what is there."""
        path = self.path / "provenance.json"
        starts = []
        if path.exists():
            try:
                starts = list(json.loads(path.read_text(encoding="utf-8"))["starts"])
            except (ValueError, KeyError, TypeError):
                starts = []
        write_json(path, {"starts": [*starts, provenance]})

    def finished(self, rounds: int) -> dict[str, Any] | None:
        """The summary, if the run was done and all its rounds are in the log; its checkpoints may be gone."""
        path = self.path / "summary.json"
        if not path.exists() or len(_rounds(_whole_lines(self.path / "rounds.jsonl"))) != rounds:
            return None
        try:
            return cast(dict[str, Any], json.loads(path.read_text(encoding="utf-8")))
        except ValueError:
            return None

    def has_checkpoint(self, round_: int) -> bool:
        """Whether there is a checkpoint of this round."""
        return any(_round_of(path) == round_ for path in self._checkpoints())

    def __enter__(self) -> "RunDirectory":
        """Itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Let another process have the directory."""
        self._unlock()

    def records(self) -> list[dict[str, Any]]:
        """The rounds logged so far."""
        return [json.loads(line) for line in _whole_lines(self.path / "rounds.jsonl")]

    def _newest(self, most: int | None = None) -> Checkpoint | None:
        for path in self._checkpoints():
            if (most is None or _round_of(path) <= most) and (found := _loaded(path)) is not None:
                return found
        return None

    def _checkpoints(self) -> list[Path]:
        """Newest first."""
        return sorted((self.path / "checkpoints").glob("round-*.pt"), reverse=True)

    def _clear(self) -> None:
        if not self.path.is_dir():
            return
        strange = [
            child.name for child in self.path.iterdir() if child.name not in _OWN and not child.name.startswith(".")
        ]
        if strange or (any(self.path.iterdir()) and not (self.path / "config.json").exists()):
            raise RunDirectoryError(
                f"{self.path} holds {strange[0] if strange else 'files but no config.json'}, which no run wrote; "
                "it is not overwritten: choose another directory"
            )
        for name in reversed(_OWN):  # config.json last, so that a clearing cut short can be repeated
            child = self.path / name
            shutil.rmtree(child) if child.is_dir() else child.unlink(missing_ok=True)


def read_checkpoint(run: Path, round_: int) -> Checkpoint:
    """The checkpoint of a round of a run, which may be going on; nothing is changed.

    Raises:
        RunDirectoryError: if it is not there, or not whole.
    """
    path = run / "checkpoints" / f"round-{round_:06d}.pt"
    found = _loaded(path) if path.exists() else None
    if found is None:
        there = sorted(_round_of(known) for known in path.parent.glob("round-*.pt"))
        raise RunDirectoryError(f"{path} is missing or not whole; there are checkpoints of rounds {there}")
    return found


def _locked(path: Path) -> Callable[[], object]:
    """Hold an exclusive lock on a directory, where the system has such locks; return what lets it go."""
    try:
        import fcntl
    except ModuleNotFoundError:
        return lambda: None
    folder = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(folder)
        if isinstance(error, BlockingIOError):
            raise RunDirectoryError(
                f"{path} is in use by another process; wait for it to end, or choose another directory"
            ) from None
        return lambda: None  # a file system without locks
    closing = [folder]

    def close() -> None:
        while closing:
            os.close(closing.pop())

    return close


def _round_of(checkpoint: Path) -> int:
    return int(checkpoint.stem.removeprefix("round-"))


def _remove(checkpoint: Path) -> None:
    checkpoint.with_suffix(".sha256").unlink(missing_ok=True)
    checkpoint.unlink()


def _rounds(lines: Sequence[bytes]) -> list[bytes]:
    """The lines from the first on that are the rounds 1, 2, …."""
    for place, line in enumerate(lines):
        try:
            if json.loads(line)["round"] != place + 1:
                return list(lines[:place])
        except (ValueError, KeyError, TypeError):
            return list(lines[:place])
    return list(lines)


def _loaded(path: Path) -> Checkpoint | None:
    """The checkpoint in a file, or None if the file is not whole."""
    content = path.read_bytes()
    digest = path.with_suffix(".sha256")
    # Nothing is unpickled that does not have its checksum, and then by PyTorch's restricted loader.
    if not digest.exists() or digest.read_bytes().strip() != hashlib.sha256(content).hexdigest().encode():
        return None
    try:
        state = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
        return Checkpoint(state["round"], state["parameters"], state["buffers"])
    except (pickle.UnpicklingError, RuntimeError, KeyError, TypeError):
        raise RunDirectoryError(
            f"{path} has its checksum but is not a checkpoint of fedmask, and nothing of it was executed; "
            "remove it to go on from the one before"
        ) from None


def _check_identity(config: Path, identity: Mapping[str, Any]) -> None:
    try:
        there = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunDirectoryError(f"{config} is damaged ({error}); remove {config.parent} to start again") from None
    wanted = json.loads(to_json(identity))
    # Data are what their fingerprint says, whatever the file is called.
    ours, theirs = (one.get("data") if isinstance(one.get("data"), dict) else {} for one in (wanted, there))
    if ours.get("fingerprint") == theirs.get("fingerprint") and "name" in ours:
        theirs["name"] = ours["name"]
    differences = [
        f"{name} is {_short(old)} there and {_short(new)} here" for name, old, new in _differences(there, wanted)
    ]
    if differences:
        raise RunDirectoryError(
            f"{config.parent} holds a run of another configuration: {'; '.join(differences[:5])}. "
            "Choose another directory, or remove this one to start again"
        )


def _differences(there: Any, here: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(there, dict) and isinstance(here, dict):
        keys = [*there, *(key for key in here if key not in there)]
        return [
            difference
            for key in keys
            for difference in _differences(there.get(key), here.get(key), f"{name}.{key}" if name else str(key))
        ]
    return [] if there == here else [(name.removeprefix("config."), there, here)]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _whole_lines(path: Path) -> list[bytes]:
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith(b"\n")]


def _cut(path: Path, lines: list[bytes]) -> None:
    if path.exists():
        os.truncate(path, sum(map(len, lines)))


def _append(path: Path, line: str) -> None:
    with path.open("ab") as file:
        file.write(line.encode("utf-8"))
        file.flush()
        os.fsync(file.fileno())
