"""How cost grows: with clients, with parameters, with mask bits, with the size of a partition.

Exponents are the slopes of straight lines through logarithms. Memory is what the process holds beside the
updates, before and after.
"""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.results import HERE, seconds
from fedmask import Blocks, StreamingAggregator, cohort_masks, gram_matrices, masked_mean
from fedmask.federated import dirichlet_partition, resnet18
from fedmask.files import write_atomic

COHORTS = (10, 30, 100, 300, 1000)
GRAM_COHORTS = (5, 10, 30, 100)
PARAMETERS = (10**5, 10**6, 10**7, 10**8)
GRAM_PARAMETERS = 10**6
FEW_CLIENTS = 4
CURVES: dict[str, tuple[tuple[int, ...], list[float]]] = {}


def resident() -> float:
    """MB of memory that this process holds."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("memory is read from /proc, which is not here")
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def exponent(sizes, times) -> float:
    return float(np.polyfit(np.log(sizes), np.log(times), 1)[0])


def best(work, repeats=3) -> float:
    work()
    return min(seconds(work) for _ in range(repeats))


def flat(size: int) -> Blocks:
    return Blocks.of({"w": torch.empty(size, device="meta")})


def test_clients(report):
    blocks = Blocks.of(resnet18(stem="torchvision"))
    update = torch.randn(blocks.parameters, generator=torch.Generator().manual_seed(0))
    rows, times = [], []
    for clients in COHORTS:
        stream = StreamingAggregator(blocks, p=0.5)
        masks = cohort_masks(seed=0, round_=1, clients=range(clients), blocks=blocks.count, p=0.5)
        stream.add(update, count=500, mask=masks[0])
        held = [resident()]

        def rest(stream=stream, clients=clients, masks=masks, held=held):
            for k in range(1, clients):
                stream.add(update, count=500 + k % 7, mask=masks[k])
                held.append(resident())
            stream.result()

        times.append(seconds(rest))
        rows.append([f"streaming, {clients} clients of 11.2 M", f"{times[-1]:.2f}", f"{max(held) - held[0]:.0f}"])
    CURVES["streaming, against clients"] = COHORTS, times
    notes = [f"Streaming's time grows as clients^{exponent(COHORTS, times):.2f}; its memory not at all (third column)."]
    gram_times = []
    for clients in GRAM_COHORTS:
        updates = torch.randn(clients, GRAM_PARAMETERS)
        gram_times.append(best(lambda updates=updates: gram_matrices(updates, flat(GRAM_PARAMETERS))))
        rows.append([f"Gram matrices, {clients} clients of 1 M", f"{gram_times[-1]:.4f}", ""])
    CURVES["Gram matrices, against clients"] = GRAM_COHORTS, gram_times
    notes.append(f"Gram matrices' time grows as clients^{exponent(GRAM_COHORTS, gram_times):.2f} (products: 2).")
    report("scale in clients", ["work", "s", "MB more at the end than after the first client"], rows, notes)


def test_parameters(report):
    rows, times = [], []
    for size in PARAMETERS:
        updates = torch.from_numpy(np.resize(np.arange(-8, 9, dtype=np.float32), (FEW_CLIENTS, size)))
        out = torch.zeros(size)
        work = lambda updates=updates, size=size, out=out: masked_mean(updates, flat(size), out=out)  # noqa: E731
        times.append(best(work))
        read = best(lambda updates=updates: updates.sum())
        rows.append([f"{FEW_CLIENTS} clients of {size:.0e}", f"{1e3 * times[-1]:.2f}", f"{times[-1] / read:.1f}"])
    CURVES["mean and Gram matrices, against parameters"] = PARAMETERS, times
    notes = [
        f"From 10⁶ on time grows as parameters^{exponent(PARAMETERS[1:], times[1:]):.2f}; "
        "below, the fixed cost of a call shows."
    ]
    report("scale in parameters", ["masked mean and Gram matrices", "ms", "× the pure read"], rows, notes)


def test_masks_and_partitions(report):
    blocks = Blocks.of(resnet18(stem="torchvision"), "element")
    drawn = []
    draw = seconds(lambda: drawn.append(cohort_masks(seed=0, round_=1, clients=range(10), blocks=blocks.count, p=0.5)))
    updates = torch.randn(10, blocks.parameters)
    out = torch.zeros(blocks.parameters)
    mean = best(lambda: masked_mean(updates, blocks, masks=drawn[0], p=0.5, out=out))
    rows = [
        ["element-wise masks, 10 clients × 11.2 M bits", f"{draw:.2f}"],
        ["masked mean with them, and Gram matrices", f"{mean:.2f}"],
    ]
    for clients, samples in ((100, 50_000), (100_000, 1_000_000), (1_000_000, 1_000_000)):
        labels = np.arange(samples) % 10
        for alpha in (100.0, 0.1):
            made = seconds(lambda: dirichlet_partition(labels, clients, alpha, 0))  # noqa: B023
            rows.append([f"partition: {clients:,} clients, {samples:,} samples, α = {alpha:g}", f"{made:.2f}"])
    report("masks and partitions", ["work", "s"], rows)


@pytest.fixture(scope="module", autouse=True)
def _figure(request):
    yield
    if not request.config.getoption("--write") or not CURVES:
        return
    import io

    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(CURVES), figsize=(4 * len(CURVES), 3.2), layout="constrained")
    for axis, (name, (sizes, times)) in zip(np.atleast_1d(axes), CURVES.items(), strict=True):
        axis.loglog(sizes, times, "o-", color="#0072B2")
        axis.set(title=f"{name}\nslope {exponent(sizes, times):.2f}", ylabel="seconds")
        axis.spines[["top", "right"]].set_visible(False)
    stream = io.BytesIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    (HERE / "results").mkdir(exist_ok=True)
    write_atomic(HERE / "results" / "scale.svg", stream.getvalue())
