import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmask import (
    Correlated,
    FedmaskError,
    Groups,
    Independent,
    Synchronized,
    bernoulli_mask,
    cohort_masks,
    fixed_size_mask,
    masks,
)
from fedmask.randomness import Purpose, words

seeds = st.integers(0, 2**64 - 1)
small = st.integers(0, 50)


def draw(seed=7, round_=3, client=5, blocks=62, p=0.3, sharing=Independent()):
    return bernoulli_mask(seed=seed, round_=round_, client=client, blocks=blocks, p=p, sharing=sharing)


# Printed by the code below on the day the format was fixed; it must hold on every platform, for ever.
GOLDEN = "d37904088e723a5e87f640efc72f2840d594418c7ec34488c95378fefad36d8e"


def golden_bytes(p) -> bytes:
    sharings = [Independent(), Synchronized(), Groups({c: c % 3 for c in range(10)}), Correlated(0.5)]
    masks = [
        cohort_masks(seed=seed, round_=round_, clients=range(10), blocks=62, p=p, sharing=sharing)
        for sharing in sharings
        for seed in (0, 7, 2**64 - 1)
        for round_ in (1, 2, 200)
    ]
    masks += [
        np.array([fixed_size_mask(seed=7, round_=round_, client=c, blocks=62, kept=31) for c in range(10)])
        for round_ in (1, 2)
    ]
    return np.packbits(np.concatenate(masks)).tobytes()


@pytest.mark.parametrize("p", [0.3, [0.3] * 62, np.full(62, 0.3)], ids=["scalar", "list", "array"])
def test_golden_hash_of_masks_holds_for_scalar_and_per_block_p(p):
    assert hashlib.sha256(golden_bytes(p)).hexdigest() == GOLDEN


def test_words_follow_the_layout_in_the_docstring():
    seed, round_, client, block_index = 7, 3, 5, 13
    key = np.array([seed, Purpose.MASK_OWN], dtype=np.uint64)
    counter = np.array([block_index // 4, 0, client, round_], dtype=np.uint64)
    alone = np.random.Philox(key=key, counter=counter).random_raw(4)[block_index % 4]
    assert words(seed, Purpose.MASK_OWN, 62, round_=round_, client=client)[block_index] == alone


def test_every_block_is_its_own_word_against_an_integer_threshold():
    expected = [int(word) < int(0.3 * 2**64) for word in words(7, Purpose.MASK_OWN, 62, round_=3, client=5)]
    assert draw().tolist() == expected


@given(seed=seeds, round_=small, client=small, blocks=st.integers(1, 40), more=st.integers(0, 40))
def test_a_mask_does_not_depend_on_how_many_blocks_are_drawn(seed, round_, client, blocks, more):
    few = draw(seed, round_, client, blocks)
    assert np.array_equal(few, draw(seed, round_, client, blocks + more)[:blocks])


@given(seed=seeds, round_=small, clients=st.lists(small, min_size=1, max_size=6, unique=True))
def test_a_client_has_the_same_mask_in_any_cohort(seed, round_, clients):
    cohort = cohort_masks(seed=seed, round_=round_, clients=clients, blocks=9, p=0.5)
    for row, client in enumerate(clients):
        assert np.array_equal(cohort[row], draw(seed, round_, client, 9, 0.5))


@given(seed=seeds, round_=small, a=small, b=small, p=st.floats(0, 1))
def test_synchronized_clients_and_members_of_a_group_have_one_mask(seed, round_, a, b, p):
    for sharing in (Synchronized(), Groups({a: 4, b: 4}), Correlated(1)):
        assert np.array_equal(draw(seed, round_, a, p=p, sharing=sharing), draw(seed, round_, b, p=p, sharing=sharing))


@given(seed=seeds, round_=small, client=small, p=st.floats(0, 1))
def test_correlation_0_is_independent_and_1_is_synchronized(seed, round_, client, p):
    for rho, twin in ((0, Independent()), (1.0, Synchronized())):
        mask = draw(seed, round_, client, p=p, sharing=Correlated(rho))
        assert np.array_equal(mask, draw(seed, round_, client, p=p, sharing=twin))


@given(seed=seeds, round_=small, client=small, data=st.data())
def test_a_fixed_size_mask_keeps_its_size(seed, round_, client, data):
    blocks = data.draw(st.integers(1, 70))
    kept = data.draw(st.integers(0, blocks))
    for sharing in (Independent(), Synchronized(), Groups({client: 2})):
        mask = fixed_size_mask(seed=seed, round_=round_, client=client, blocks=blocks, kept=kept, sharing=sharing)
        assert mask.sum() == kept


@given(seed=seeds, client=small, p=st.floats(0, 1), q=st.floats(0, 1))
def test_a_mask_grows_with_p(seed, client, p, q):
    low, high = sorted((p, q))
    assert not np.any(draw(seed, client=client, p=low) & ~draw(seed, client=client, p=high))


def test_p_0_and_1_are_exact_over_ten_million_draws():
    assert not draw(blocks=10**7, p=0).any()
    assert draw(blocks=10**7, p=1).all()
    assert not draw(blocks=10**5, p=0.0, sharing=Correlated(0.5)).any()
    assert draw(blocks=10**5, p=1.0, sharing=Correlated(0.5)).all()


@pytest.mark.parametrize("p", [1.2, -0.1, float("nan"), float("inf"), [0.5, 1.2], [0.5, float("nan")], [0.5]])
def test_an_invalid_p_is_refused(p):
    with pytest.raises(FedmaskError, match="p "):
        draw(blocks=2, p=p)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is"),
        ({"round_": -1}, "round is -1"),
        ({"client": -2}, "client is -2"),
        ({"sharing": Groups({1: 0})}, "client 5 has no group"),
    ],
)
def test_an_invalid_draw_is_refused(arguments, message):
    with pytest.raises(FedmaskError, match=message):
        draw(**arguments)


@pytest.mark.parametrize("rho", [-0.1, 1.1, float("nan")])
def test_an_invalid_correlation_is_refused(rho):
    with pytest.raises(FedmaskError, match="rho is"):
        Correlated(rho)


def test_a_fixed_size_mask_refuses_a_correlation_and_an_impossible_size():
    with pytest.raises(FedmaskError, match="does not keep their size"):
        fixed_size_mask(seed=0, round_=0, client=0, blocks=4, kept=2, sharing=Correlated(0.5))
    with pytest.raises(FedmaskError, match="kept is 5"):
        fixed_size_mask(seed=0, round_=0, client=0, blocks=4, kept=5)


def test_the_smallest_word_is_kept_by_no_p_of_0_and_the_largest_by_p_of_1():
    extreme = np.array([0, 2**64 - 1], dtype=np.uint64)
    assert not masks._below(extreme, np.array([0.0])).any()
    assert masks._below(extreme, np.array([1.0])).all()


def test_seed_0_is_a_seed():
    assert np.array_equal(draw(seed=0), draw(seed=0))
    assert not np.array_equal(draw(seed=0, blocks=256), draw(seed=1, blocks=256))


# Statistical checks: a sum of n independent ±1 products leaves ±5.5·√n with probability below 4·10⁻⁸.
BLOCKS = 200_000


def agreement(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sum(np.where(a == b, 1, -1)) / np.sqrt(len(a)))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"round_": 1, "client": 2}, {"round_": 2, "client": 1}),
        ({"round_": 1, "client": 2}, {"round_": 1, "client": 3}),
        ({"round_": 1, "client": 2}, {"round_": 2, "client": 2}),
        ({"seed": 1, "client": 0}, {"seed": 0, "client": 1}),
        ({"seed": 1, "round_": 0}, {"seed": 0, "round_": 1}),
        ({"client": 0, "sharing": Synchronized()}, {"client": 0}),
        ({"client": 0, "sharing": Groups({0: 0})}, {"client": 0}),
        ({"client": 0, "sharing": Groups({0: 0})}, {"client": 0, "sharing": Synchronized()}),
    ],
)
def test_streams_are_uncorrelated(rng, a, b):
    offset = int(rng.integers(2**40))
    shifted = [{"seed": 0, "round_": 0, "client": 0, **arguments} for arguments in (a, b)]
    for arguments in shifted:
        arguments["seed"] += offset
    one, other = (draw(blocks=BLOCKS, p=0.5, **arguments) for arguments in shifted)
    assert abs(agreement(one, other)) < 5.5
    assert abs(agreement(one[1:], other[:-1])) < 5.5


@pytest.mark.parametrize("rho", [0.0, 0.25, 0.5, 1.0])
def test_masks_have_the_promised_mean_and_correlation(rng, rho):
    seed, p = int(rng.integers(2**62)), 0.3
    one, other = (draw(seed, client=c, blocks=BLOCKS, p=p, sharing=Correlated(rho)).astype(float) for c in (1, 2))
    products = (one - p) * (other - p) / (p * (1 - p))
    assert abs(one.mean() - p) < 5.5 * np.sqrt(p * (1 - p) / BLOCKS)
    assert abs(products.mean() - rho) < 5.5 * products.std() / np.sqrt(BLOCKS)


def test_fixed_size_masks_keep_every_block_equally_often(rng):
    seed = int(rng.integers(2**62))
    masks = np.array([fixed_size_mask(seed=seed, round_=r, client=1, blocks=5, kept=2) for r in range(4000)])
    assert np.all(np.abs(masks.mean(axis=0) - 0.4) < 5.5 * np.sqrt(0.24 / 4000))
