import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmask import FedmaskError
from fedmask.federated import dirichlet_partition

LABELS = np.random.default_rng(0).integers(0, 10, 5000)
alphas = st.sampled_from([1e-4, 0.01, 0.1, 1.0, 100.0, 1e6, math.inf])


@given(alpha=alphas, clients=st.integers(1, 60), seed=st.integers(0, 2**64 - 1), least=st.integers(0, 20))
def test_every_sample_is_held_once_and_every_client_has_the_minimum(alpha, clients, seed, least):
    partition = dirichlet_partition(LABELS[:1500], clients, alpha, seed, min_samples=least)
    assert np.array_equal(np.sort(partition.order), np.arange(1500))
    assert partition.clients == clients
    assert partition.counts.min() >= least
    assert np.array_equal(partition.counts, [len(partition.shard(k)) for k in range(clients)])


@given(alpha=alphas, seed=st.integers(0, 2**32))
def test_a_partition_is_a_function_of_its_seed(alpha, seed):
    one, other, another = (dirichlet_partition(LABELS, 20, alpha, s) for s in (seed, seed, seed + 1))
    assert np.array_equal(one.order, other.order)
    assert not np.array_equal(one.order, another.order)


@pytest.mark.parametrize("alpha", [1e-4, 0.1, 100.0, math.inf])
def test_a_hundred_thousand_clients_take_seconds(alpha):
    labels = np.random.default_rng(1).integers(0, 10, 200_000)
    started = time.perf_counter()
    partition = dirichlet_partition(labels, 100_000, alpha, seed=3)
    seconds = time.perf_counter() - started
    print(f"alpha {alpha}: {seconds:.1f} s, {partition.tries} tries, {partition.moved} moved")
    assert partition.counts.min() >= 1
    assert partition.counts.sum() == 200_000


def test_an_infinite_alpha_cuts_every_class_evenly():
    partition = dirichlet_partition(np.repeat(np.arange(10), 500), 100, math.inf, 0)
    for client in range(100):
        assert (
            np.bincount(partition.order[partition.offsets[client] : partition.offsets[client + 1]] // 500).tolist()
            == [5] * 10
        )


def test_alpha_is_the_concentration_of_the_shares(rng):
    """Var(share) = (1/N)(1 − 1/N)/(Nα + 1) for Dirichlet(α, …, α); within 5.5 standard errors of it."""
    clients, alpha, seed = 20, 2.0, int(rng.integers(2**62))
    labels = np.repeat(np.arange(400), 2000)
    partition = dirichlet_partition(labels, clients, alpha, seed, min_samples=0)
    shares = np.array([np.bincount(labels[partition.shard(k)], minlength=400) for k in range(clients)]) / 2000
    squares = ((shares - 1 / clients) ** 2).mean(axis=0)
    expected = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert abs(squares.mean() - expected) < 5.5 * squares.std() / np.sqrt(400) + 1e-6


def test_a_tiny_alpha_is_repaired_and_says_how_many_were_moved():
    partition = dirichlet_partition(LABELS, 100, 1e-4, 0)
    assert partition.tries == 10
    assert partition.moved >= 50
    assert partition.counts.min() == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clients": 5001}, "5000 samples cannot give each of 5001 clients 1"),
        ({"clients": 100, "min_samples": 51}, "cannot give each of 100 clients 51"),
        ({"clients": 0}, "0 clients were asked for"),
        ({"alpha": 0.0}, "alpha is 0.0"),
        ({"alpha": -1.0}, "alpha is -1.0"),
        ({"alpha": math.nan}, "alpha is nan"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_an_impossible_partition_is_refused(arguments, message):
    with pytest.raises(FedmaskError, match=message):
        dirichlet_partition(LABELS, **{"clients": 10, "alpha": 1.0, "seed": 0, **arguments})


def test_more_clients_than_samples_are_possible_when_some_may_be_empty():
    partition = dirichlet_partition(LABELS, 10_000, 1.0, 0, min_samples=0)
    assert partition.counts.min() == 0
    assert partition.counts.sum() == 5000
