"""The masked mean against a slow twin in float64, in batch and streaming, and what it must refuse."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fedmask import (
    BlockError,
    Blocks,
    FedmaskError,
    NonFiniteUpdateError,
    StreamingAggregator,
    cohort_masks,
    masked_mean,
    noise,
    recovery_factor,
    signal,
)

from .strategies import cohorts

EPSILON = float(np.finfo(np.float32).eps)


def slow_mean(cohort, masks, p) -> np.ndarray:
    """Σ_k a_k m_k^(b)/p Δ_k^(b), one block of one client at a time, in float64."""
    owner = np.repeat(np.arange(cohort.blocks.count), cohort.blocks.sizes)
    mean = np.zeros(cohort.blocks.parameters)
    for k, count in enumerate(cohort.counts):
        for b in range(cohort.blocks.count):
            if masks[k, b]:
                mean[owner == b] += count / sum(cohort.counts) / p * cohort.updates[k, owner == b].double().numpy()
    return mean


def streamed(cohort, masks=None, p=1.0, order=None):
    stream = StreamingAggregator(cohort.blocks, p=p)
    for k in order if order is not None else range(len(cohort.updates)):
        mask = None if masks is None else masks[k]
        assert stream.add(cohort.updates[k], count=cohort.counts[k], client=k, mask=mask)
    return stream.result()


@given(cohorts())
def test_the_masked_mean_equals_its_slow_twin(cohort):
    expected = slow_mean(cohort, cohort.masks, cohort.p)
    for statistics in ("gram", "sums", "none"):
        outcome = masked_mean(
            cohort.updates, cohort.blocks, counts=cohort.counts, masks=cohort.masks, p=cohort.p, statistics=statistics
        )
        assert outcome.mean.dtype == torch.float32
        assert outcome.mean.numpy() == pytest.approx(expected, rel=2 * EPSILON, abs=1e-9)
        assert (outcome.gram is None) == (statistics != "gram")
        assert (outcome.sums is None) == (statistics == "none")


@given(cohorts())
def test_streaming_equals_batch_in_any_order(cohort):
    order = list(reversed(range(len(cohort.updates))))
    batch = masked_mean(cohort.updates, cohort.blocks, counts=cohort.counts, masks=cohort.masks, p=cohort.p)
    assert batch.sums is not None
    for result in (streamed(cohort, cohort.masks, cohort.p), streamed(cohort, cohort.masks, cohort.p, order)):
        a = np.array(cohort.counts) / sum(cohort.counts)
        bound = len(a) * 2**-52 * (a @ np.abs(cohort.updates.double().numpy())) / cohort.p
        difference = np.abs(result.mean.double().numpy() - batch.mean.double().numpy())
        assert np.all(difference <= EPSILON * np.abs(batch.mean.numpy()) + bound)
        assert result.sums is not None
        for name, value in vars(batch.sums).items():
            scale = np.sum(batch.sums.squared_norms)
            assert vars(result.sums)[name] == pytest.approx(value, rel=1e-9, abs=1e-12 * scale)


@given(cohorts())
def test_the_same_order_gives_the_same_bytes(cohort):
    one, other = (streamed(cohort, cohort.masks, cohort.p).mean for _ in range(2))
    assert one.numpy().tobytes() == other.numpy().tobytes()


@given(cohorts())
def test_p_1_is_fedavg_bit_for_bit(cohort):
    everything = np.ones_like(cohort.masks)
    dense = masked_mean(cohort.updates, cohort.blocks, counts=cohort.counts)
    masked = masked_mean(cohort.updates, cohort.blocks, counts=cohort.counts, masks=everything, p=1.0)
    assert masked.mean.numpy().tobytes() == dense.mean.numpy().tobytes()
    assert streamed(cohort, everything).mean.numpy().tobytes() == streamed(cohort).mean.numpy().tobytes()
    assert dense.mean.numpy() == pytest.approx(slow_mean(cohort, everything, 1.0), rel=2 * EPSILON, abs=1e-9)


@given(cohorts())
def test_statistics_are_of_the_unmasked_updates(cohort):
    masked = masked_mean(cohort.updates, cohort.blocks, counts=cohort.counts, masks=cohort.masks, p=cohort.p)
    dense = masked_mean(cohort.updates, cohort.blocks, counts=cohort.counts)
    assert masked.gram is not None
    assert dense.gram is not None
    assert masked.gram.values.tobytes() == dense.gram.values.tobytes()


@given(cohorts(), st.data())
def test_a_block_dropped_by_all_is_exactly_zero_and_its_nan_cannot_reach_the_mean(cohort, data):
    dropped = data.draw(st.integers(0, cohort.blocks.count - 1))
    owner = np.repeat(np.arange(cohort.blocks.count), cohort.blocks.sizes)
    assume(np.any(owner == dropped))
    cohort.masks[:, dropped] = False
    cohort.updates[:, owner == dropped] = math.nan
    outcome = masked_mean(
        cohort.updates, cohort.blocks, counts=cohort.counts, masks=cohort.masks, p=cohort.p, statistics="none"
    )
    assert torch.all(outcome.mean[owner == dropped] == 0)
    assert bool(outcome.mean.isfinite().all())


def test_expectation_over_all_masks_is_the_dense_mean_exactly():
    """Σ over all 2^(B·K) masks of probability × mean, in exact rationals of exactly representable numbers."""
    blocks = Blocks.of({"a": torch.zeros(2), "b": torch.zeros(1), "c": torch.zeros(1)})
    updates = torch.tensor([[1.0, 2.0, -3.0, 4.0], [5.0, -6.0, 7.0, 8.0]])
    p, counts = Fraction(1, 4), [1, 3]
    total = [Fraction(0)] * 4
    for bits in itertools.product((False, True), repeat=6):
        mask = np.array(bits).reshape(2, 3)
        probability = p ** int(mask.sum()) * (1 - p) ** int((~mask).sum())
        mean = masked_mean(updates, blocks, counts=counts, masks=mask, p=float(p)).mean
        total = [t + probability * Fraction(x) for t, x in zip(total, mean.tolist(), strict=True)]
    assert total == [Fraction(4), Fraction(-4), Fraction(18, 4), Fraction(7)]


@given(cohorts())
def test_inputs_are_unchanged_and_a_second_pass_is_the_same(cohort):
    before, masks, counts = cohort.updates.clone(), cohort.masks.copy(), list(cohort.counts)
    one, other = (
        masked_mean(cohort.updates, cohort.blocks, counts=cohort.counts, masks=cohort.masks, p=cohort.p)
        for _ in range(2)
    )
    streamed(cohort, cohort.masks, cohort.p)
    assert torch.equal(cohort.updates, before)
    assert np.array_equal(cohort.masks, masks)
    assert cohort.counts == counts
    assert one.mean.numpy().tobytes() == other.mean.numpy().tobytes()


@given(cohorts(granularities=("element", "row")), st.data())
def test_p_may_differ_per_block(cohort, data):
    p = np.array(
        data.draw(
            st.lists(st.sampled_from([1.0, 0.5, 0.25]), min_size=cohort.blocks.count, max_size=cohort.blocks.count)
        )
    )
    owner = np.repeat(np.arange(cohort.blocks.count), cohort.blocks.sizes)
    expected = slow_mean(cohort, cohort.masks, 1.0) / p[owner]
    batch = masked_mean(cohort.updates, cohort.blocks, counts=cohort.counts, masks=cohort.masks, p=p)
    assert batch.mean.numpy() == pytest.approx(expected, rel=2 * EPSILON, abs=1e-9)
    assert streamed(cohort, cohort.masks, p).mean.numpy() == pytest.approx(expected, rel=2 * EPSILON, abs=1e-9)


@pytest.mark.parametrize("granularity", ["element", "row", "tensor", "layer", "model"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_updates_longer_than_a_chunk_of_every_type(granularity, dtype):
    blocks = Blocks.of({"a.weight": torch.empty(300, 1000), "a.bias": torch.empty(7), "b": torch.empty(5)}, granularity)
    updates = torch.randn(4, blocks.parameters, generator=torch.Generator().manual_seed(0)).to(dtype)
    masks = cohort_masks(seed=1, round_=1, clients=range(4), blocks=blocks.count, p=0.5)
    kept = np.repeat(masks, blocks.sizes, axis=1)
    expected = (np.where(kept, updates.double().numpy(), 0) / 0.5).mean(axis=0)
    outcome = masked_mean(updates, blocks, masks=masks, p=0.5)
    assert outcome.mean.dtype == torch.promote_types(dtype, torch.float32)
    np.testing.assert_allclose(outcome.mean.numpy(), expected, rtol=2 * EPSILON, atol=1e-7)
    assert outcome.gram is not None
    assert outcome.gram.total == pytest.approx(updates.double().numpy() @ updates.double().numpy().T, rel=1e-10)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("statistics", ["gram", "sums", "none"])
def test_a_nonfinite_update_is_an_error_that_names_client_and_block(value, statistics):
    blocks = Blocks.of({"conv.weight": torch.zeros(3), "conv.bias": torch.zeros(2)})
    updates = torch.arange(50.0).view(10, 5)
    updates[6, 4] = value
    ids = list(range(100, 110))
    with pytest.raises(NonFiniteUpdateError, match=r"client 106 .* block 'conv.bias'") as caught:
        masked_mean(updates, blocks, clients=ids, statistics=statistics)
    assert (caught.value.client, caught.value.block) == (106, "conv.bias")
    skipped = masked_mean(updates, blocks, clients=ids, counts=range(1, 11), statistics=statistics, on_nonfinite="skip")
    rest = [k for k in range(10) if k != 6]
    alone = masked_mean(updates[rest], blocks, counts=[k + 1 for k in rest], clients=[ids[k] for k in rest])
    assert skipped.skipped == (106,)
    assert torch.equal(skipped.mean, alone.mean)
    if statistics == "gram":
        assert skipped.gram is not None
        assert skipped.gram.clients == tuple(ids[k] for k in rest)


def test_streaming_refuses_or_skips_a_nonfinite_update_and_keeps_what_it_had():
    blocks = Blocks.of({"w": torch.zeros(2)})
    stream = StreamingAggregator(blocks)
    stream.add(torch.tensor([1.0, 2.0]), client=4)
    with pytest.raises(NonFiniteUpdateError, match=r"client 9 .* block 'w'"):
        stream.add(torch.tensor([math.nan, 0.0]), client=9)
    assert stream.result().mean.tolist() == [1.0, 2.0]
    skipping = StreamingAggregator(blocks, on_nonfinite="skip")
    assert skipping.add(torch.tensor([1.0, 2.0]), client=4)
    assert not skipping.add(torch.tensor([math.nan, 0.0]), client=9)
    assert skipping.result().skipped == (9,)
    assert skipping.result().mean.tolist() == [1.0, 2.0]


def test_when_all_clients_are_nonfinite_skipping_is_an_error():
    with pytest.raises(NonFiniteUpdateError, match="all other clients"):
        masked_mean(torch.full((2, 1), math.nan), Blocks.of({"w": torch.zeros(1)}), on_nonfinite="skip")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"counts": [0, 0, 0]}, "weights of all 3 clients are zero"),
        ({"counts": [1, -1, 2]}, "client 1 has weight -1"),
        ({"counts": [1, math.nan, 2]}, "client 1 has weight nan"),
        ({"counts": [1, 2]}, "2 weights were given for 3 clients"),
        ({"p": 0.0}, r"p is 0, .* p must lie in \(0, 1\]"),
        ({"p": [0.5, 0.0]}, "p is 0 for block 1"),
        ({"p": 1.5}, r"p is 1.5; a probability lies in \[0, 1\]"),
        ({"p": math.nan}, "p is nan"),
    ],
)
def test_bad_arguments_are_refused_with_what_was_given(arguments, message):
    blocks = Blocks.of({"a": torch.zeros(1), "b": torch.zeros(1)})
    with pytest.raises(ValueError, match=message):
        masked_mean(torch.ones(3, 2), blocks, **arguments)


def test_an_empty_cohort_and_updates_of_another_shape_are_refused():
    blocks = Blocks.of({"a": torch.zeros(2)})
    with pytest.raises(FedmaskError, match="cohort is empty"):
        masked_mean(torch.ones(0, 2), blocks)
    with pytest.raises(FedmaskError, match="cohort is empty"):
        StreamingAggregator(blocks).result()
    with pytest.raises(BlockError, match=r"shape \(3, 5\)"):
        masked_mean(torch.ones(3, 5), blocks)
    with pytest.raises(BlockError, match=r"shape \(1, 5\)"):
        StreamingAggregator(blocks).add(torch.ones(5))
    zero = StreamingAggregator(blocks)
    zero.add(torch.ones(2), count=0)
    with pytest.raises(ValueError, match="weights of all 1 clients are zero"):
        zero.result()


def test_streaming_takes_named_tensors_and_half_precision():
    stream = StreamingAggregator(Blocks.of({"a": torch.zeros(2), "b": torch.zeros(1)}))
    stream.add({"b": torch.ones(1), "a": torch.zeros(2)}, count=3)
    stream.add({"_orig_mod.a": torch.ones(2).half(), "b": torch.ones(1).half()}, count=1)
    assert stream.result().mean.tolist() == [0.25, 0.25, 1.0]


def test_streaming_statistics_of_a_thousand_clients_equal_the_batch_ones():
    blocks = Blocks.of({"a": torch.zeros(20), "b": torch.zeros(3)})
    updates = torch.randn(1000, 23, generator=torch.Generator().manual_seed(3)) + 0.1
    stream = StreamingAggregator(blocks)
    for k, update in enumerate(updates):
        stream.add(update, count=k + 1)
    streamed_sums, gram = stream.result().sums, masked_mean(updates, blocks, counts=range(1, 1001)).gram
    for statistic in (recovery_factor, lambda s: recovery_factor(s, weighted=True), signal, noise):
        assert statistic(streamed_sums).value == pytest.approx(statistic(gram).value, rel=1e-10)


def test_the_mean_can_be_written_into_a_vector_that_is_kept():
    blocks = Blocks.of({"w": torch.zeros(6)})
    out = torch.full((6,), math.nan)
    updates = torch.arange(12.0).view(2, 6)
    outcome = masked_mean(updates, blocks, out=out)
    assert outcome.mean is out
    assert torch.equal(out, updates.mean(dim=0))
    for wrong in (torch.zeros(5), torch.zeros(6, dtype=torch.float64), torch.zeros(12)[::2]):
        with pytest.raises(FedmaskError, match=r"out has shape .* the mean is contiguous with shape \(6,\)"):
            masked_mean(updates, blocks, out=wrong)
