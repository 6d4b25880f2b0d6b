"""Gram matrices against plain float64 products, and statistics against the paper's formulas written out."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fedmask import (
    Blocks,
    FedmaskError,
    correlation_for_recovery,
    cosines,
    effective_cohort_size,
    fedexp_step,
    gradient_diversity,
    gram_matrices,
    noise,
    noise_interval,
    noise_scale,
    recovery_factor,
    recovery_factor_interval,
    recovery_factor_per_block,
    signal,
    signal_interval,
)
from fedmask.gram import GramMatrices
from fedmask.statistics import Statistic

from .strategies import cohorts

coarse = cohorts(granularities=("row", "tensor", "layer", "model"))


def columns(blocks: Blocks) -> np.ndarray:
    """The block of each column, from sizes alone: blocks are contiguous in flat order."""
    return np.repeat(np.arange(blocks.count), blocks.sizes)


def slow_gram(cohort) -> np.ndarray:
    updates, owner = cohort.updates.double().numpy(), columns(cohort.blocks)
    return np.array([updates[:, owner == b] @ updates[:, owner == b].T for b in range(cohort.blocks.count)])


def gram_of(cohort) -> GramMatrices:
    return gram_matrices(cohort.updates, cohort.blocks, counts=cohort.counts)


@given(coarse)
def test_gram_matrices_equal_plain_products(cohort):
    assert gram_of(cohort).values == pytest.approx(slow_gram(cohort), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("granularity", ["row", "tensor", "layer", "model"])
def test_gram_matrices_of_tensors_longer_than_a_chunk(dtype, granularity):
    blocks = Blocks.of({"a.weight": torch.empty(300, 1000), "a.bias": torch.empty(7), "b": torch.empty(0)}, granularity)
    updates = torch.randn(3, blocks.parameters, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact, owner = updates.double().numpy(), columns(blocks)
    expected = [exact[:, owner == b] @ exact[:, owner == b].T for b in range(blocks.count)]
    gram = gram_matrices(updates, blocks)
    assert gram.values == pytest.approx(np.array(expected), rel=1e-12, abs=1e-12)


@given(coarse)
def test_statistics_equal_the_papers_formulas(cohort):
    u = cohort.updates.double().numpy()
    k, n = len(u), np.array(cohort.counts) / sum(cohort.counts)
    sum_of_norms, norm_of_sum = np.sum(u**2), np.sum(u.sum(axis=0) ** 2)
    assume(sum_of_norms > 0)
    close = {"rel": 1e-9, "abs": 1e-9 * sum_of_norms}
    gram = gram_of(cohort)
    assert recovery_factor(gram).value == pytest.approx(norm_of_sum / sum_of_norms, rel=1e-9, abs=1e-12)
    weighted_norms = np.sum(n**2 * np.sum(u**2, axis=1))
    if weighted_norms > 0:
        expected = np.sum((n @ u) ** 2) / weighted_norms
        assert recovery_factor(gram, weighted=True).value == pytest.approx(expected, rel=1e-9, abs=1e-12)
    if k > 1:
        a, b = sum_of_norms / k, norm_of_sum / k**2
        sigma = (a - b) / (1 - 1 / k)
        assert noise(gram).value == pytest.approx(sigma, **close)
        assert signal(gram).value == pytest.approx(a - sigma, **close)
    if norm_of_sum > 1e-9 * sum_of_norms:
        assert gradient_diversity(gram).value == pytest.approx(sum_of_norms / norm_of_sum, rel=1e-6)
        step = max(1, sum_of_norms / (2 * k * (norm_of_sum / k**2)))
        assert fedexp_step(gram).value == pytest.approx(step, rel=1e-6)


@given(coarse)
def test_the_recovery_factor_lies_between_0_and_its_bound(cohort):
    gram = gram_of(cohort)
    for weighted, bound in ((False, len(cohort.updates)), (True, np.count_nonzero(cohort.counts))):
        value = recovery_factor(gram, weighted=weighted).value
        assert value is None or 0 <= value <= bound * (1 + 1e-12)


def test_the_weighted_factor_can_exceed_the_effective_cohort_size_and_reaches_the_number_of_clients():
    """The smallest example: weights 1 and 2, updates 2 and 1, so that a_kΔ_k are equal."""
    gram = gram_matrices(torch.tensor([[2.0], [1.0]]), Blocks.of({"w": torch.zeros(1)}), counts=[1, 2])
    assert recovery_factor(gram, weighted=True).value == pytest.approx(2)
    assert effective_cohort_size([1, 2]) == pytest.approx(1.8)


@given(coarse)
def test_a_round_is_below_one_exactly_when_the_signal_is_negative(cohort):
    assume(len(cohort.updates) > 1)
    factor, mu = recovery_factor(gram_of(cohort)).value, signal(gram_of(cohort)).value
    assume(factor is not None)
    assert (factor < 1) == (mu < 0)


@given(coarse)
def test_signal_to_noise_form_is_an_identity(cohort):
    gram, k = gram_of(cohort), len(cohort.updates)
    scale, factor = noise_scale(gram), recovery_factor(gram)
    assume(scale.value is not None and factor.value is not None)
    assume(abs(1 + scale.value) > 1e-6)
    assert (k + scale.value) / (1 + scale.value) == pytest.approx(factor.value, rel=1e-5, abs=1e-6)


@given(coarse)
def test_per_block_parts_add_up_to_the_whole(cohort):
    sums = gram_of(cohort).sums()
    per_block = recovery_factor_per_block(sums)
    zero = sums.squared_norms == 0
    assert np.array_equal(np.isnan(per_block), zero)
    whole = np.sum(np.where(zero, 0, per_block) * sums.squared_norms)
    assert whole == pytest.approx(sums.squared_norm_of_sum.sum(), rel=1e-12, abs=1e-300)


@given(coarse, st.data())
def test_a_subcohort_is_the_cohort_of_its_clients(cohort, data):
    clients = data.draw(st.lists(st.sampled_from(range(len(cohort.updates))), min_size=1, unique=True))
    counts = [cohort.counts[k] for k in clients]
    assume(any(counts))
    part = gram_of(cohort).subcohort(clients)
    alone = gram_matrices(cohort.updates[clients], cohort.blocks, counts=counts)
    assert part.clients == tuple(clients)
    assert part.values == pytest.approx(alone.values, rel=1e-12, abs=1e-12)
    assert part.counts.tolist() == alone.counts.tolist()


@given(coarse)
def test_cosines_are_those_of_the_updates(cohort):
    u = cohort.updates.double().numpy()
    c = cosines(gram_of(cohort))
    for i in range(len(u)):
        for j in range(len(u)):
            norms = np.linalg.norm(u[i]) * np.linalg.norm(u[j])
            assert math.isnan(c[i, j]) if norms == 0 else c[i, j] == pytest.approx(u[i] @ u[j] / norms, abs=1e-9)


def test_equal_updates_reach_the_cohort_size_and_weighted_the_effective_one():
    blocks = Blocks.of({"w": torch.zeros(1000)})
    updates = torch.randn(1000).expand(10, -1)
    counts = [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]
    gram = gram_matrices(updates, blocks, counts=counts)
    assert recovery_factor(gram).value == pytest.approx(10, rel=1e-14)
    assert recovery_factor(gram, weighted=True).value == pytest.approx(effective_cohort_size(counts), rel=1e-14)
    assert effective_cohort_size(counts) == pytest.approx(550**2 / 38500)
    assert noise(gram).value == pytest.approx(0, abs=1e-10)


def test_orthogonal_updates_recover_one_and_opposite_ones_nothing():
    blocks = Blocks.of({"w": torch.zeros(4)})
    assert recovery_factor(gram_matrices(torch.eye(4), blocks)).value == 1
    opposite = gram_matrices(torch.tensor([[1.0, 2, 3, 4], [-1, -2, -3, -4]]), blocks)
    assert recovery_factor(opposite).value == 0
    assert gradient_diversity(opposite) == Statistic(None, "the updates cancel: their sum is zero")
    assert fedexp_step(opposite).value is None
    assert fedexp_step(opposite, epsilon=1.0).value == max(1.0, 60 / 4)


def test_undefined_statistics_have_no_value_and_a_reason():
    blocks = Blocks.of({"w": torch.zeros(4)})
    zero = gram_matrices(torch.zeros(3, 4), blocks)
    for statistic in (recovery_factor(zero), gradient_diversity(zero), fedexp_step(zero)):
        assert statistic == Statistic(None, "every update is zero")
    assert noise_scale(zero).reason == "the signal estimate is zero"
    one = gram_matrices(torch.ones(1, 4), blocks)
    assert recovery_factor(one).value == 1
    for statistic in (signal(one), noise(one), noise_scale(one)):
        assert statistic == Statistic(None, "undefined for one client (n < 2)")
    with pytest.raises(FedmaskError, match="n < 2"):
        float(noise(one))
    two = gram_matrices(torch.ones(2, 4), blocks)
    for interval in (recovery_factor_interval(two), signal_interval(two), noise_interval(two)):
        assert interval.low is None
        assert "n < 3" in interval.reason


def test_an_element_is_too_fine_for_a_statistic():
    with pytest.raises(FedmaskError, match="never finer than rows"):
        gram_matrices(torch.ones(2, 4), Blocks.of({"w": torch.zeros(4)}, "element"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_twenty_million_ones_are_summed_to_a_millionth(dtype):
    n = 20_000_000
    gram = gram_matrices(torch.ones(1, dtype=dtype).expand(2, n), Blocks.of({"w": torch.empty(n, device="meta")}))
    assert gram.values == pytest.approx(np.full((1, 2, 2), n), rel=1e-12)


@given(coarse)
def test_jackknife_leaves_clients_out_as_a_plain_loop_does(cohort):
    k = len(cohort.updates)
    assume(k >= 3 and all(cohort.counts))
    gram = gram_of(cohort)
    for weighted in (False, True):
        interval = recovery_factor_interval(gram, weighted=weighted)
        parts = [gram.subcohort([j for j in range(k) if j != out]) for out in range(k)]
        factors = [recovery_factor(part, weighted=weighted).value for part in parts]
        if any(factor is None for factor in factors):
            assert interval.low is None
            continue
        sizes = [effective_cohort_size(part.counts) if weighted else k - 1 for part in parts]
        q = np.array([(f - 1) / (size - 1) for f, size in zip(factors, sizes, strict=True)])
        size = effective_cohort_size(gram.counts) if weighted else k
        centre = (recovery_factor(gram, weighted=weighted).value - 1) / (size - 1)
        error = np.sqrt((k - 1) / k * np.sum((q - q.mean()) ** 2))
        reach = {2: 4.302652729911275, 3: 3.182446305284263, 4: 2.7764451051977987}[k - 1] * error
        tolerance = {"rel": 1e-5, "abs": 1e-5}
        assert interval.low == pytest.approx(max(0, 1 + (size - 1) * (centre - reach)), **tolerance)
        assert interval.high == pytest.approx(min(k, 1 + (size - 1) * (centre + reach)), **tolerance)


def test_the_correlation_for_a_wanted_recovery_is_a_dial_between_independent_and_shared(rng):
    updates = torch.from_numpy(rng.standard_normal(20) + 0.5 * rng.standard_normal((4, 20)))
    gram = gram_matrices(updates, Blocks.of({"w": torch.zeros(20)}), counts=[1, 2, 3, 4])
    for weighted in (False, True):
        full = float(recovery_factor(gram, weighted=weighted))
        assert correlation_for_recovery(gram, 1.0, weighted=weighted) == 0
        assert correlation_for_recovery(gram, full, weighted=weighted) == 1
        assert correlation_for_recovery(gram, (1 + full) / 2, weighted=weighted) == pytest.approx(0.5)
        for wanted in (0.9, full + 0.1):
            with pytest.raises(FedmaskError, match=f"a recovery of {wanted:g} was asked for"):
                correlation_for_recovery(gram, wanted, weighted=weighted)
