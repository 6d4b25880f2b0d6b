"""The round loop: what a run is a function of, and of what it is not."""

import dataclasses
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from fedmask import Blocks, FedmaskError, NonFiniteUpdateError, cohort_masks, masked_mean
from fedmask.federated import (
    ImageData,
    RunConfig,
    dirichlet_partition,
    draw_cohort,
    load_data,
    simulate,
    summarize,
)
from fedmask.federated.training import Trainer

from .test_training import WithBatchNorm

CONFIG = RunConfig(clients=6, cohort=3, rounds=3, model="cnn", groups=8, seed=1, checkpoint_every=2)


@pytest.fixture(scope="module")
def digits() -> ImageData:
    data = load_data("digits")
    return ImageData.from_arrays(
        "few digits", data.train_images[:240], data.train_labels[:240], data.test_images[:60], data.test_labels[:60]
    )


def run(config: RunConfig, data: ImageData, **arguments):
    return simulate(config, data=data, workers=arguments.pop("workers", 1), **arguments)


def same(one, other) -> bool:
    return one.records == other.records and all(
        one.weights[name].numpy().tobytes() == other.weights[name].numpy().tobytes() for name in one.weights
    )


def test_a_run_is_a_pure_function_of_its_configuration(digits):
    assert same(run(CONFIG, digits), run(CONFIG, digits))
    assert not same(run(CONFIG, digits), run(dataclasses.replace(CONFIG, seed=2), digits))


def test_the_number_of_workers_does_not_change_a_byte(digits, tmp_path):
    config = dataclasses.replace(CONFIG, mask="independent", rounds=2)
    assert same(run(config, digits), run(config, digits, workers=2, out=tmp_path))


def test_two_rounds_are_fedavg_written_out(digits):
    config = dataclasses.replace(CONFIG, rounds=2, mask="independent", p=0.5)
    result = run(config, digits)
    partition = dirichlet_partition(digits.train_labels, config.clients, config.alpha, config.seed)
    trainer = Trainer(config, digits, partition, None)
    weights, blocks = trainer.weights.clone(), trainer.blocks
    for round_ in (1, 2):
        cohort = draw_cohort(config, round_)
        updates = torch.stack([torch.empty_like(weights) for _ in cohort])
        for row, client in enumerate(cohort):
            trainer.train(round_, client, weights, {}, updates[row])
        masks = cohort_masks(seed=1, round_=round_, clients=cohort, blocks=blocks.count, p=0.5)
        counts = partition.counts[cohort]
        step = torch.zeros_like(weights, dtype=torch.float64)
        owner = torch.from_numpy(np.repeat(np.arange(blocks.count), blocks.sizes))
        for row in range(len(cohort)):
            kept = torch.from_numpy(masks[row])[owner]
            step[kept] += counts[row] / counts.sum() * updates[row, kept].double() / 0.5
        weights = (weights.double() - step).float()
        record = result.records[round_ - 1]
        assert record["clients"] == cohort
        assert record["counts"] == counts.tolist()
        u = updates.double().numpy()
        assert record["recovery_factor"] == pytest.approx(np.sum(u.sum(0) ** 2) / np.sum(u**2), rel=1e-5)
    final = blocks.flatten(result.weights)
    assert final.numpy() == pytest.approx(weights.numpy(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("size", [7, 60, 500])
def test_the_logged_accuracy_is_that_of_the_whole_test_set(digits, size):
    config = dataclasses.replace(CONFIG, rounds=1, evaluation_batch=size)
    result = run(config, digits)
    trainer = Trainer(
        dataclasses.replace(config, evaluation_batch=60),
        digits,
        dirichlet_partition(digits.train_labels, config.clients, config.alpha, config.seed),
        None,
    )
    loss, correct = trainer.evaluate(trainer.blocks.flatten(result.weights), {}, 0)
    assert correct > 0
    assert result.records[0]["accuracy"] == correct / 60
    assert result.records[0]["loss"] == pytest.approx(loss / 60, rel=1e-6)


def test_p_1_masked_is_the_dense_run_to_the_byte(digits):
    masked = dataclasses.replace(CONFIG, mask="independent", p=1.0)
    assert same(run(CONFIG, digits), run(masked, digits))


def test_cohorts_are_distinct_sorted_and_fair(rng):
    config = RunConfig(clients=20, cohort=5, seed=int(rng.integers(2**62)))
    cohorts = [draw_cohort(config, round_) for round_ in range(1, 2001)]
    assert all(len(set(cohort)) == 5 and cohort == sorted(cohort) for cohort in cohorts)
    shares = np.bincount(np.concatenate(cohorts), minlength=20) / 2000
    assert np.all(np.abs(shares - 0.25) < 5.5 * math.sqrt(0.25 * 0.75 / 2000))


def test_identical_clients_recover_the_whole_cohort_size(digits):
    result = run(dataclasses.replace(CONFIG, control="identical-clients"), digits)
    for record in result.records:
        assert record["recovery_factor"] == pytest.approx(3, rel=1e-12)
        assert record["recovery_factor_weighted"] == pytest.approx(3, rel=1e-12)
        assert abs(record["noise"]) <= 1e-12 * record["signal"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_identical_clients_recover_the_whole_cohort_size_on_the_real_network(workers):
    data = load_data("digits")
    images = [
        np.repeat(np.repeat(np.repeat(x, 3, axis=1), 4, axis=2), 4, axis=3)
        for x in (data.train_images[:60], data.test_images[:20])
    ]
    big = ImageData.from_arrays("large digits", images[0], data.train_labels[:60], images[1], data.test_labels[:20])
    config = RunConfig(
        clients=10, cohort=10, rounds=2, batch_size=4, stem="torchvision", control="identical-clients", min_samples=2
    )
    for record in run(config, big, workers=workers).records:
        assert record["recovery_factor"] == pytest.approx(10, rel=1e-12)


def exploding() -> nn.Module:
    """A network whose loss is NaN for an image that starts with white."""

    class Exploding(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(64, 10)

        def forward(self, images):
            poison = torch.where(images[:, 0, 0, 0] > 1, torch.nan, 1.0)
            return self.head(images.flatten(1)) * poison[:, None]

    return Exploding()


def poisoned(digits: ImageData, config: RunConfig) -> tuple[ImageData, int]:
    """The data with one image of one client of the first cohort made poisonous."""
    client = draw_cohort(config, 1)[1]
    images = digits.train_images.copy()
    images[:, 0, 0, 0] = 0
    images[
        dirichlet_partition(digits.train_labels, config.clients, config.alpha, config.seed).shard(client)[0], 0, 0, 0
    ] = 255
    return ImageData.from_arrays(
        "poisoned", images, digits.train_labels, digits.test_images, digits.test_labels
    ), client


def test_a_nonfinite_client_is_named_or_skipped_and_the_rest_reweighted(digits):
    config = dataclasses.replace(CONFIG, model="mine", rounds=1)
    data, client = poisoned(digits, config)
    with pytest.raises(NonFiniteUpdateError, match=f"client {client} sent NaN or infinity in block 'head.weight'"):
        run(config, data, model=exploding)
    record = run(dataclasses.replace(config, on_nonfinite="skip"), data, model=exploding).records[0]
    assert record["skipped"] == [{"client": client, "reason": "non-finite update"}]
    assert client not in record["clients"]
    assert len(record["clients"]) == 2


def test_an_empty_client_is_skipped_and_logged(digits):
    config = dataclasses.replace(CONFIG, clients=400, cohort=20, alpha=0.5, min_samples=0, rounds=1)
    empty = {
        k for k, n in enumerate(dirichlet_partition(digits.train_labels, 400, 0.5, 1, min_samples=0).counts) if n == 0
    }
    record = run(config, digits).records[0]
    expected = [client for client in draw_cohort(config, 1) if client in empty]
    assert expected
    assert record["skipped"] == [{"client": client, "reason": "no samples"} for client in expected]
    assert not empty & set(record["clients"])


def test_one_client_a_round_has_no_noise_estimate_and_says_why(digits, tmp_path):
    run(dataclasses.replace(CONFIG, cohort=1, rounds=1), digits, out=tmp_path)
    line = json.loads((tmp_path / "rounds.jsonl").read_text())
    assert line["recovery_factor"] == 1
    assert line["signal"] is line["noise"] is None
    assert line["reasons"]["noise"] == "undefined for one client (n < 2)"


def test_batch_norm_buffers_follow_the_policy(digits):
    result = run(dataclasses.replace(CONFIG, model="mine", mask="independent"), digits, model=WithBatchNorm)
    assert "net.2.weight" in result.weights
    assert not any("running" in name for name in result.weights)


def test_a_users_model_and_tensors_go_in_in_a_few_lines():
    images, labels = torch.randint(0, 256, (40, 1, 8, 8), dtype=torch.uint8), torch.arange(40) % 4
    data = ImageData.from_arrays("mine", images, labels, images, labels)
    result = simulate(RunConfig(clients=4, cohort=2, rounds=1, model="mine"), data=data, model=WithBatchNorm, workers=1)
    assert result.summary["rounds"] == 1


def test_a_summary_takes_medians_over_the_last_quarter():
    records = [
        {
            "recovery_factor": float(r),
            "recovery_factor_weighted": None,
            "signal": 1.0,
            "noise": 2.0,
            "accuracy": r / 10 if r % 2 else None,
            "loss": 1.0,
            "skipped": [],
        }
        for r in range(8)
    ]
    summary = summarize(records)
    assert (summary["median_over_last"], summary["recovery_factor"], summary["accuracy"]) == (2, 6.5, 0.7)
    assert summary["share_below_one"] == 1 / 8
    assert summary["recovery_factor_weighted"] is None


@pytest.mark.parametrize(
    ("arguments", "fields", "message"),
    [
        ({"workers": 0}, {}, "0 workers were asked for"),
        ({}, {"device": "tpu"}, "device 'tpu' is not supported"),
        ({}, {"clients": 1000}, "240 samples cannot give each of 1000 clients 1"),
    ],
)
def test_impossible_runs_are_refused(digits, arguments, fields, message):
    with pytest.raises(FedmaskError, match=message):
        run(dataclasses.replace(CONFIG, **fields), digits, **arguments)


@pytest.mark.cuda
def test_cuda_gives_the_masks_and_nearly_the_statistics_of_the_cpu(digits):
    cpu = run(dataclasses.replace(CONFIG, mask="independent"), digits)
    cuda = run(dataclasses.replace(CONFIG, mask="independent", device="cuda"), digits)
    for one, other in zip(cpu.records, cuda.records, strict=True):
        assert one["clients"] == other["clients"]
        assert other["recovery_factor"] == pytest.approx(one["recovery_factor"], rel=1e-2)


@pytest.mark.cuda
def test_the_masked_mean_on_cuda_equals_that_on_the_cpu():
    blocks = Blocks.of({"a": torch.zeros(1000, 300), "b": torch.zeros(77)})
    updates = torch.randn(10, blocks.parameters)
    masks = cohort_masks(seed=1, round_=1, clients=range(10), blocks=2, p=0.5)
    one, other = (masked_mean(u, blocks, masks=masks, p=0.5) for u in (updates, updates.cuda()))
    assert torch.allclose(one.mean, other.mean.cpu(), rtol=1e-6)
    assert other.gram.values == pytest.approx(one.gram.values, rel=1e-10)


def test_batch_norm_counters_stay_integers_through_masked_rounds_and_checkpoints(digits, tmp_path):
    config = dataclasses.replace(CONFIG, model="mine", mask="independent", p=0.3, batch_size="full")
    run(config, digits, model=WithBatchNorm, out=tmp_path)
    buffers = torch.load(tmp_path / "checkpoints" / "round-000003.pt", weights_only=True)["buffers"]
    assert buffers["net.2.num_batches_tracked"].dtype == torch.int64
    assert buffers["net.2.num_batches_tracked"].item() == 3  # one full batch a round, and masks do not touch it
    assert buffers["net.2.running_var"].dtype == torch.float32


MEASURED = """
import os, resource
from fedmask.federated import RunConfig, load_data, simulate
config = RunConfig(clients={clients}, cohort=10, rounds=5, model="cnn", groups=8, local_steps=1, batch_size=1)
files = []
count = lambda _: files.append(len(os.listdir("/proc/self/fd")))
simulate(config, data=load_data("digits"), workers=1, on_progress=count)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, files[0], files[-1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="open files are counted through /proc")
def test_memory_and_open_files_do_not_grow_with_clients():
    measured = []
    for clients in (10, 1000):
        done = subprocess.run(
            [sys.executable, "-c", MEASURED.format(clients=clients)], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        measured.append([int(word) for word in done.stdout.split()])
    (few, first, last), (many, first_of_many, last_of_many) = measured
    print(
        f"peak memory {few / 1024:.0f} MB with 10 clients, {many / 1024:.0f} MB with 1,000; open files {last_of_many}"
    )
    assert first == last == first_of_many == last_of_many
    assert many < 1.05 * few
