"""What masking and statistics cost on the server, as ratios to one pure read of the updates in the same run.

Ten clients of ResNet-18 (torchvision stem): 62 tensors, 11,181,642 parameters, fp32, 447 MB. Nothing here
passes or fails by time; correctness is in tests/.
"""

import numpy as np
import pytest
import torch

from benchmarks.results import Ratio, seconds
from fedmask import Blocks, StreamingAggregator, cohort_masks, gram_matrices, masked_mean
from fedmask.federated import resnet18
from fedmask.passes import MeanOf, chunked_pass

CLIENTS = 10


class Case:
    def __init__(self) -> None:
        self.blocks = Blocks.of(resnet18(stem="torchvision"))
        self.updates = torch.randn(CLIENTS, self.blocks.parameters, generator=torch.Generator().manual_seed(0))
        self.halves = self.updates.bfloat16()
        self.masks = cohort_masks(seed=0, round_=1, clients=range(CLIENTS), blocks=self.blocks.count, p=0.5)
        self.kept = float((self.masks @ self.blocks.sizes).sum() / self.updates.numel())
        self.counts = np.arange(400.0, 600.0, 20)
        self.weights = torch.from_numpy(self.counts / self.counts.sum()).float()
        self.out = torch.zeros(self.blocks.parameters)

    def mean(self, updates, statistics, masks=True):
        return masked_mean(
            updates,
            self.blocks,
            counts=self.counts.tolist(),
            masks=self.masks if masks else None,
            p=0.5 if masks else 1.0,
            statistics=statistics,
            out=self.out,
        )

    def plain_per_tensor(self):
        for piece in self.blocks.pieces:
            columns = slice(piece.start, piece.stop)
            torch.matmul(self.weights[None], self.updates[:, columns], out=self.out[None, columns])

    def stream(self):
        aggregator = StreamingAggregator(self.blocks, p=0.5)
        for k, update in enumerate(self.updates):
            aggregator.add(update, count=self.counts[k], mask=self.masks[k])
        return aggregator.result()

    def stacked(self):
        """What a first implementation does: a masked, scaled copy of everything, then a sum."""
        sizes = torch.from_numpy(self.blocks.sizes)
        kept = torch.from_numpy(self.masks).repeat_interleave(sizes, dim=1)
        return (self.updates * kept / 0.5 * self.weights[:, None]).sum(dim=0)

    def chunked(self):
        factors = np.array([1 / (0.5 * self.counts.sum())])
        mean = MeanOf(self.blocks, self.masks, factors, self.out)
        return chunked_pass(self.updates, self.blocks, self.counts, statistics="gram", mean=mean)


@pytest.fixture(scope="module")
def case():
    return Case()


WORK = {
    "pure read": lambda c: c.updates.sum(),
    "plain weighted mean, `weights @ updates` per tensor": lambda c: c.plain_per_tensor(),
    "weighted mean": lambda c: c.mean(c.updates, "none", masks=False),
    "masked mean, skipping dropped blocks, p = ½": lambda c: c.mean(c.updates, "none"),
    "masked mean and sums for the recovery factor": lambda c: c.mean(c.updates, "sums"),
    "masked mean and Gram matrices": lambda c: c.mean(c.updates, "gram"),
    "Gram matrices": lambda c: gram_matrices(c.updates, c.blocks),
    "bf16: masked mean and sums": lambda c: c.mean(c.halves, "sums"),
    "bf16: masked mean and Gram matrices": lambda c: c.mean(c.halves, "gram"),
    "streaming: masked mean and sums": lambda c: c.stream(),
    "without Numba: masked mean and Gram matrices": lambda c: c.chunked(),
    "stacked masked copies in PyTorch, mean alone": lambda c: c.stacked(),
}
FOUND: dict[str, Ratio] = {}


@pytest.mark.parametrize("name", WORK)
def test_hot_path(benchmark, case, name):
    reads: list[float] = []
    WORK[name](case)

    def read():
        reads.append(seconds(lambda: case.updates.sum()))
        return (case,), {}

    benchmark.pedantic(WORK[name], setup=read, rounds=9)
    FOUND[name] = Ratio(tuple(benchmark.stats.stats.data), tuple(reads))


@pytest.fixture(scope="module", autouse=True)
def _report(case, report):
    yield
    plain = FOUND.get("plain weighted mean, `weights @ updates` per tensor")
    rows = [
        [name, f"{1e3 * ratio.median:.1f}", ratio.text(), f"{ratio.median / plain.median:.2f}" if plain else ""]
        for name, ratio in FOUND.items()
    ]
    read = FOUND["pure read"].median
    notes = [
        f"The read is {case.updates.nbytes / read / 1e9:.0f} GB/s with {torch.get_num_threads()} threads. "
        f"Of the values {100 * case.kept:.0f} % are kept; the mean is written into a vector that is kept too.",
    ]
    report("hot path", ["ten updates of 11.2 M", "ms", "× the pure read", "× the plain mean"], rows, notes)
