"""This project's round, as `simulate` does it: masks off, statistics on."""

import os
import time

import numpy as np
import torch
import work

import fedmask
from fedmask.federated import ImageData, RunConfig, simulate


def main() -> None:
    """Rounds, then the aggregation alone."""
    pixels, labels = work.images()
    names = tuple(str(i) for i in range(10))
    data = ImageData.from_arrays(
        "random", pixels.numpy(), labels.numpy(), pixels[:10].numpy(), labels[:10].numpy(), names
    )
    config = RunConfig(
        clients=work.CLIENTS,
        cohort=work.CLIENTS,
        rounds=work.WARM_UP + work.ROUNDS,
        alpha=float("inf"),
        batch_size=work.BATCH,
        learning_rate=work.LEARNING_RATE,
        stem="torchvision",
        evaluate_every=10**6,
        checkpoint_every=10**6,
    )
    work.tell(event="ready")

    def on_progress(progress):
        if progress.record is not None:
            work.tell(event="round")

    simulate(config, data=data, workers=min(work.CLIENTS, os.cpu_count() or 1), on_progress=on_progress)
    blocks = fedmask.Blocks.of(work.network())
    updates, out = torch.randn(work.CLIENTS, blocks.parameters), torch.zeros(blocks.parameters)
    for statistics in ("none", "sums", "gram"):
        times = []
        for _ in range(6):
            start = time.perf_counter()
            fedmask.masked_mean(updates, blocks, counts=[500] * work.CLIENTS, statistics=statistics, out=out)
            times.append(time.perf_counter() - start)
        work.tell(event="aggregation", what=f"mean, statistics: {statistics}", seconds=float(np.median(times[1:])))


if __name__ == "__main__":
    main()
