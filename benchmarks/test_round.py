"""A round beside the bare training steps that it contains, and where a round's time goes.

Ten clients with 500 images each, ResNet-18-GroupNorm with torchvision's stem, batch 32 and full batch, in one
process with one thread, as a worker does it. The bare steps are the same images through the same network in the
same batches: forward, loss, backward, step, and nothing else.
"""

import dataclasses
import statistics
import time

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from benchmarks.results import Ratio, seconds
from fedmask import masked_mean
from fedmask.federated import ImageData, RunConfig, dirichlet_partition, simulate
from fedmask.federated.models import crop_kernels
from fedmask.federated.training import Trainer, batches, initial_model, one_thread

CLIENTS, IMAGES, REPEATS = 10, 500, 4


@pytest.fixture(scope="module")
def data():
    random = np.random.default_rng(0)
    train, test = (random.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8) for n in (CLIENTS * IMAGES, 100))
    names = tuple(f"class {i}" for i in range(10))
    return ImageData.from_arrays("random", train, np.arange(len(train)) % 10, test, np.arange(100) % 10, names)


def bare_steps(config, data, partition):
    """One round's training steps and nothing else; returns how long they took."""
    model = initial_model(config, data)
    crop_kernels(model, data.train_images.shape[1:])
    images = torch.from_numpy(data.train_images)
    labels = torch.from_numpy(data.train_labels)
    work = []
    for client in range(CLIENTS):
        shard = partition.shard(client)
        for batch in batches(len(shard), config, 0, client):
            chosen = torch.from_numpy(shard[batch])
            work.append((images[chosen].float() / 128 - 1, labels[chosen]))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.learning_rate)

    def steps():
        for inputs, wanted in work:
            optimizer.zero_grad(set_to_none=True)
            for start in range(0, len(wanted), config.chunk_size):
                part = slice(start, start + config.chunk_size)
                (cross_entropy(model(inputs[part]), wanted[part], reduction="sum") / len(wanted)).backward()
            optimizer.step()

    with one_thread():
        return seconds(steps)


@pytest.mark.parametrize("batch_size", [32, "full"])
def test_round(report, data, tmp_path, batch_size):
    config = RunConfig(
        clients=CLIENTS,
        cohort=CLIENTS,
        rounds=REPEATS + 1,
        alpha=float("inf"),
        batch_size=batch_size,
        stem="torchvision",
        evaluate_every=1000,
        checkpoint_every=5,
    )
    partition = dirichlet_partition(data.train_labels, CLIENTS, config.alpha, 0)
    bare, rounds = [], []
    start = time.perf_counter()

    def between_rounds(progress):
        nonlocal start
        if progress.record is not None:
            rounds.append(time.perf_counter() - start)
            bare.append(bare_steps(config, data, partition))
            start = time.perf_counter()

    simulate(config, data=data, out=tmp_path / "run", workers=1, on_progress=between_rounds)
    # The first has the loading in it, the last an evaluation and a checkpoint.
    ratio = Ratio(tuple(rounds[1:-1]), tuple(bare[1:-1]))
    FOUND.append([f"batch {batch_size}", f"{ratio.median:.2f}", f"{statistics.median(bare):.2f}", ratio.text()])
    PARTS.append(profile(config, data, partition, statistics.median(bare)))


FOUND: list[list[str]] = []
PARTS: list[str] = []


def profile(config, data, partition, bare) -> str:
    """Where a round's time goes beside the steps, each part measured alone."""
    trainer = Trainer(config, data, partition, None)
    updates = torch.randn(CLIENTS, len(trainer.weights))
    buffers = trainer.buffers()
    with one_thread():
        load = CLIENTS * statistics.median(seconds(lambda: trainer._load(trainer.weights, buffers)) for _ in range(5))
        write = CLIENTS * statistics.median(
            seconds(lambda: trainer._write_update(trainer.weights, updates[0])) for _ in range(5)
        )
    mean = statistics.median(seconds(lambda: masked_mean(updates, trainer.blocks)) for _ in range(5))
    parts = {"loading the weights": load, "writing the updates": write, "mean and Gram matrices": mean}
    listed = ", ".join(f"{name} {100 * value / bare:.1f} %" for name, value in parts.items())
    return f"batch {config.batch_size}, of the bare steps' time: {listed}"


@pytest.mark.parametrize("stem", ["cifar", "torchvision"])
@pytest.mark.parametrize("batch_size", [32, 128])
def test_precision(data, stem, batch_size):
    """One client's epoch over 256 images with products in float32 and in bfloat16."""
    config = RunConfig(clients=1, cohort=1, batch_size=batch_size, stem=stem)
    partition = dirichlet_partition(data.train_labels, 1, 100.0, 0)
    shard = np.arange(256)
    trainers = [
        Trainer(dataclasses.replace(config, precision=precision), data, partition, None)
        for precision in ("float32", "bfloat16")
    ]
    update = torch.empty_like(trainers[0].weights)
    buffers = trainers[0].buffers()

    def epoch(trainer):
        return seconds(lambda: trainer.train(0, 0, trainer.weights, buffers, update, shard=shard))

    with one_thread():
        times = [[epoch(trainer) for trainer in trainers] for _ in range(REPEATS)][1:]
    exact, rounded = zip(*times, strict=True)
    rates = [f"{len(shard) / statistics.median(found):.0f}" for found in (exact, rounded)]
    PRECISIONS.append([f"{stem} stem, batch {batch_size}", *rates, Ratio(exact, rounded).text()])


PRECISIONS: list[list[str]] = []


@pytest.fixture(scope="module", autouse=True)
def _report(report):
    yield
    notes = [f"Where the rest of a round goes, {'; '.join(PARTS)}."]
    report(
        "round",
        ["ten clients × 500 images, one thread", "s a round", "s bare steps", "round ÷ bare steps"],
        FOUND,
        notes,
    )
    report(
        "precision",
        ["one client's epoch, one thread", "float32, images a second", "bfloat16", "times as fast"],
        PRECISIONS,
    )
