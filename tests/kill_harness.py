"""Start a run as a process, SIGKILL it at random moments, resume, and compare what it leaves on the disk."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Wall-clock times, and who ran it when: all else is a function of the configuration.
NOT_RESULTS = {"times.jsonl", "provenance.json"}


@dataclass(frozen=True)
class Outcome:
    kills: int
    rounds_at_kills: list[int]


def command(out: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "fedmask", "simulate", "--out", str(out), "--quiet", *options]


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, timeout=300)


def results(out: Path) -> dict[str, bytes]:
    """Every result file below a run directory, by relative name; leftovers of a broken write would show."""
    files = (path for path in sorted(out.rglob("*")) if path.is_file() and path.name not in NOT_RESULTS)
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in files}


def kill_and_resume(
    arguments: list[str], out: Path, kills: int, window: tuple[float, float], rng: np.random.Generator
) -> Outcome:
    """SIGKILL the command ``kills`` times, each a random time in ``window`` (seconds), then finish it."""
    rounds: list[int] = []
    for _ in range(kills):
        process = subprocess.Popen(
            arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        delay = float(rng.uniform(*window))
        try:
            process.wait(timeout=delay)
            raise AssertionError(f"the run ended within {delay:.1f} s, before it could be killed: give it more rounds")
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert group_is_gone(process.pid, seconds=20), "workers outlived the killed run"
        log = out / "rounds.jsonl"
        rounds.append(len(log.read_bytes().splitlines()) if log.exists() else 0)
    finished = run(arguments)
    assert finished.returncode == 0, finished.stderr
    return Outcome(kills, rounds)


def group_is_gone(group: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False
