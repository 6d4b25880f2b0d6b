"""What the benchmarks found, kept as JSON a part, and RESULTS.md made of it: ``python -m benchmarks.results``."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmask.federated.provenance import provenance
from fedmask.files import to_json, write_atomic

HERE = Path(__file__).parent
PARTS = (
    "hot path",
    "scale in clients",
    "scale in parameters",
    "masks and partitions",
    "round",
    "precision",
    "cuda",
    "peers",
)
INTRODUCTION = """# Benchmarks

Written by `make bench` and `make bench-peers`; nothing in it is typed by hand, and no test passes or fails by a time.
Absolute times drift with a machine's neighbours: trust the ratios, each taken within one run, repeat by repeat, as
median [smallest, largest].
"""


@dataclass(frozen=True)
class Ratio:
    """Times of one piece of work, each beside a time of what it is compared with, taken just before."""

    seconds: tuple[float, ...]
    reference: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median time."""
        return statistics.median(self.seconds)

    def text(self) -> str:
        """Median [smallest, largest] ratio."""
        ratios = sorted(a / b for a, b in zip(self.seconds, self.reference, strict=True))
        return f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]"


def seconds(work: Callable[[], Any]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def save(part: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> None:
    """Keep one part and write RESULTS.md anew."""
    if part not in PARTS:
        raise ValueError(f"part {part!r} is unknown; use one of {', '.join(PARTS)}")
    content = {
        "part": part,
        "columns": list(columns),
        "rows": [list(row) for row in rows],
        "notes": list(notes),
        "machine": machine(),
        "provenance": provenance("cpu"),
    }
    (HERE / "results").mkdir(exist_ok=True)
    write_atomic(HERE / "results" / f"{part.replace(' ', '-')}.json", to_json(content, indent=1).encode())
    render()


def render() -> None:
    """Write RESULTS.md from the parts that there are."""
    found = {}
    for part in PARTS:
        path = HERE / "results" / f"{part.replace(' ', '-')}.json"
        if path.exists():
            found[part] = json.loads(path.read_text())
    text = INTRODUCTION + "".join(_section(content) for content in found.values())
    write_atomic(HERE / "RESULTS.md", text.encode())


def _section(content: Mapping[str, Any]) -> str:
    made = content["provenance"]
    lines = [
        f"\n## {content['part'][0].upper()}{content['part'][1:]}\n",
        f"{content['machine']}. PyTorch {made['versions']['torch']}, fedmask at commit {str(made['commit'])[:9]}.\n",
        _line(content["columns"]),
        _line(["---", *["---:"] * (len(content["columns"]) - 1)]),
        *[_line(row) for row in content["rows"]],
    ]
    return "\n".join(lines) + "\n" + "".join(f"\n{note}\n" for note in content["notes"])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def machine() -> str:
    """The processor's name, as many cores as may be used, and memory."""
    name = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        fields = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
        fields = {key.strip(): value.strip() for key, value in fields.items()}
        name = f"{fields.get('model name', name)} (family {fields.get('cpu family')}, model {fields.get('model')})"
        vectors = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in fields.get("flags", "")]
        name += f", {' '.join(vectors)}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{name}, {cores} cores, {memory:.0f} GiB"


if __name__ == "__main__":
    render()
