"""``python -m benchmarks.peers``: this project, Flower's simulation and pfl at the same work, in one run.

Each runs with the Python of its own environment. Start-up is what comes before the first round; the first round
warms up and isn't counted. Memory is the largest sum over a peer's processes, pages that several share counted
once (proportional set size).
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import threading
import time
from pathlib import Path

from benchmarks.peers import work
from benchmarks.results import save

HERE = Path(__file__).parent
MARK = "FEDMASK_PEER"
WHY = (
    "A round is 10 clients with 500 images each, ResNet-18-GroupNorm (torchvision stem), batch 32, one epoch, after "
    f"{work.WARM_UP} round that isn't counted. Ours and Flower's simulation train as many clients at a time as there "
    "are cores, with one thread each; pfl trains one after another with all threads.",
    "Ours keeps the ten updates until the round ends (447 MB), because statistics of pairs of clients need them all; "
    "pfl adds each to a sum.",
)


def main() -> None:
    """Run all peers in turn and write RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    for peer in ("fedmask", "flower", "pfl"):
        parser.add_argument(f"--{peer}", help=f"Python of {peer}'s environment; left out, it isn't run")
    chosen = {peer: python for peer, python in vars(parser.parse_args()).items() if python}
    rows, aggregations, notes = [], [], list(WHY)
    reference = None
    for peer, python in chosen.items():
        found = run(peer, python)
        rounds = found["rounds"]
        median = statistics.median(rounds)
        reference = reference or median
        spread = f"{median:.2f} [{min(rounds):.2f}, {max(rounds):.2f}]"
        rows.append(
            [found["name"], f"{found['start']:.1f}", spread, f"{median / reference:.2f}", f"{found['memory']:.0f}"]
        )
        aggregations += [(found["name"], what, seconds) for what, seconds in found["aggregations"]]
    for name, what, seconds in aggregations:
        notes.append(f"Aggregation alone, {name} ({what}): {1e3 * seconds:.1f} ms.")
    for row in rows:
        print("  ".join(row))
    print("\n".join(notes))
    columns = ["peer", "start-up, s", "s a round", "× ours", "peak memory, MB"]
    save("peers", columns, rows, notes)


def run(peer: str, python: str) -> dict:
    """One peer's start-up, rounds, memory and aggregation."""
    environment = {**os.environ, MARK: peer}
    environment |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    start = time.time()
    process = subprocess.Popen(
        [str(Path(python).absolute()), f"{peer}_peer.py"],
        cwd=HERE,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    memory = [0.0]
    done = threading.Event()
    watcher = threading.Thread(target=watch, args=(peer, memory, done), daemon=True)
    watcher.start()
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr), daemon=True)
    reader.start()
    events, ends = [], []
    for line in process.stdout:
        if line.startswith("PEER "):
            events.append(json.loads(line[5:]))
            ends += [events[-1]["at"]] if events[-1]["event"] == "round" else []
        if len(ends) == work.WARM_UP + work.ROUNDS:
            done.set()  # what comes after the rounds isn't their memory
    code = process.wait()
    done.set()
    watcher.join()
    if code or len(ends) != work.WARM_UP + work.ROUNDS:
        raise SystemExit(f"{peer} ended with exit code {code} after {len(ends)} rounds:\n{''.join(errors[-20:])}")
    ready = next(event["at"] for event in events if event["event"] == "ready")
    return {
        "name": f"{peer} {version(peer, python)}",
        "start": ready - start,
        "rounds": [b - a for a, b in itertools.pairwise(ends)],
        "memory": memory[0],
        "aggregations": [(e["what"], e["seconds"]) for e in events if e["event"] == "aggregation"],
    }


def version(peer: str, python: str) -> str:
    """The installed version."""
    package = {"flower": "flwr"}.get(peer, peer)
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def watch(peer: str, memory: list[float], done: threading.Event) -> None:
    """Keep the largest memory of all processes of a peer, in MB."""
    while not done.wait(0.25):
        memory[0] = max(
            memory[0], sum(proportional(pid) for pid in os.listdir("/proc") if pid.isdigit() and of(pid, peer))
        )


def of(pid: str, peer: str) -> bool:
    """Whether a process was started by a peer."""
    try:
        return f"{MARK}={peer}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def proportional(pid: str) -> float:
    """Proportional set size, MB."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1e3


if __name__ == "__main__":
    main()
