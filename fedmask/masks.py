"""Block masks as a pure function of (seed, round, client or shared, block).

A mask bit compares one raw Philox word with an integer threshold, so server, clients, devices, platforms
and resumed runs draw the same mask without sending it. Where the words come from (key and counter) is
laid out in :mod:`fedmask.randomness`; block b reads word b, with b its index in the reference model:

    ============  =============  ==========================  ==========================================
    sharing       purpose        client word of the counter  kept iff
    ============  =============  ==========================  ==========================================
    independent   MASK_OWN       the client's id             word < ⌊p·2⁶⁴⌋
    synchronized  MASK_SHARED    0                           word < ⌊p·2⁶⁴⌋
    groups        MASK_GROUP     the group's id              word < ⌊p·2⁶⁴⌋
    correlation   MASK_SELECT    the client's id             select word < ⌊√ρ·2⁶⁴⌋: the synchronized
                                                             bit, else the independent one
    ============  =============  ==========================  ==========================================

The probability of a kept block is p to within 2⁻⁶⁴; p = 0 and p = 1 are exact. A mask does not depend on
whether p is given once or per block, nor on how many blocks, clients or rounds are drawn beside it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from jaxtyping import Bool, Float64, UInt64

from fedmask.errors import FedmaskError
from fedmask.randomness import Purpose, words

__all__ = [
    "Correlated",
    "Groups",
    "Independent",
    "Probability",
    "Sharing",
    "Synchronized",
    "bernoulli_mask",
    "cohort_masks",
    "fixed_size_mask",
    "keep_probabilities",
]

Probability: TypeAlias = int | float | Sequence[int | float] | Float64[np.ndarray, " blocks"]


@dataclass(frozen=True)
class Independent:
    """Every client draws its own mask."""


@dataclass(frozen=True)
class Synchronized:
    """All clients of a round use one mask (paper, Proposition 3)."""


@dataclass(frozen=True)
class Groups:
    """Clients of one group use one mask; ``group_of`` maps every client's id to its group's id."""

    group_of: Mapping[int, int]


@dataclass(frozen=True)
class Correlated:
    """Any two clients' bits of a block have correlation ``rho`` in [0, 1]: 0 is independent, 1 synchronized.

    Per client and block, the shared bit is taken with probability √ρ, else an own one.
    """

    rho: int | float

    def __post_init__(self) -> None:
        if not 0 <= self.rho <= 1:
            raise FedmaskError(f"rho is {self.rho}; a correlation between clients lies in [0, 1]")


Sharing: TypeAlias = Independent | Synchronized | Groups | Correlated


def bernoulli_mask(
    *, seed: int, round_: int, client: int, blocks: int, p: Probability, sharing: Sharing = Independent()
) -> Bool[np.ndarray, " blocks"]:
    """Which blocks are kept, each with probability p (paper, eq. 2). True is kept.

    Args:
        seed: the run's seed, 0 included.
        round_: the round, from 0.
        client: the client's id (not its place in the cohort).
        blocks: how many blocks the reference model has.
        p: probability in [0, 1], one for all blocks or one per block.
        sharing: whose bits are equal.

    Raises:
        FedmaskError: if p is outside [0, 1] or NaN, has another length than ``blocks``, or the client has
            no group.
    """
    probabilities = keep_probabilities(p, blocks)
    if isinstance(sharing, Correlated):
        own = _below(_mask_words(Independent(), seed, round_, client, blocks), probabilities)
        shared = _below(_mask_words(Synchronized(), seed, round_, client, blocks), probabilities)
        select_words = words(seed, Purpose.MASK_SELECT, blocks, round_=round_, client=client)
        select = _below(select_words, np.array([math.sqrt(sharing.rho)]))
        return np.where(select, shared, own)
    return _below(_mask_words(sharing, seed, round_, client, blocks), probabilities)


def fixed_size_mask(
    *, seed: int, round_: int, client: int, blocks: int, kept: int, sharing: Sharing = Independent()
) -> Bool[np.ndarray, " blocks"]:
    """A mask that keeps exactly ``kept`` of ``blocks`` blocks, uniformly: those with the smallest words.

    Each block is kept with probability p = kept / blocks, which is the p to rescale with.

    Raises:
        FedmaskError: if ``kept`` is not in 0 … blocks, or sharing is a correlation (mixing two masks bit
            by bit does not keep their size).
    """
    if not 0 <= kept <= blocks:
        raise FedmaskError(f"kept is {kept}; a fixed-size mask keeps from 0 to all {blocks} blocks")
    if isinstance(sharing, Correlated):
        raise FedmaskError(
            f"a fixed-size mask was asked for with {sharing}; "
            "mixing masks bit by bit does not keep their size: use Independent, Synchronized or Groups"
        )
    order = np.argsort(_mask_words(sharing, seed, round_, client, blocks), kind="stable")
    mask = np.zeros(blocks, dtype=np.bool_)
    mask[order[:kept]] = True
    return mask


def cohort_masks(
    *,
    seed: int,
    round_: int,
    clients: Sequence[int],
    blocks: int,
    p: Probability,
    sharing: Sharing = Independent(),
) -> Bool[np.ndarray, "clients blocks"]:
    """The masks of a cohort, one row a client, each as :func:`bernoulli_mask` gives it."""
    masks = np.empty((len(clients), blocks), dtype=np.bool_)
    for row, client in enumerate(clients):
        masks[row] = bernoulli_mask(seed=seed, round_=round_, client=client, blocks=blocks, p=p, sharing=sharing)
    return masks


def keep_probabilities(p: Probability, blocks: int) -> Float64[np.ndarray, " probabilities"]:
    """p as a float64 array of length 1 (global) or ``blocks``, checked to lie in [0, 1].

    Raises:
        FedmaskError: if a probability is outside [0, 1] or NaN, or their number fits neither.
    """
    probabilities = np.atleast_1d(np.asarray(p, dtype=np.float64))
    if probabilities.ndim != 1 or (np.ndim(p) == 1 and probabilities.size != blocks):
        raise FedmaskError(f"p has shape {np.shape(p)}; give one probability or one for each of {blocks} blocks")
    wrong = np.flatnonzero(~((probabilities >= 0) & (probabilities <= 1)))
    if wrong.size:
        where = f" for block {wrong[0]}" if np.ndim(p) else ""
        raise FedmaskError(f"p is {probabilities[wrong[0]]}{where}; a probability lies in [0, 1]")
    return probabilities


def _mask_words(
    sharing: Independent | Synchronized | Groups, seed: int, round_: int, client: int, blocks: int
) -> UInt64[np.ndarray, " blocks"]:
    match sharing:
        case Independent():
            return words(seed, Purpose.MASK_OWN, blocks, round_=round_, client=client)
        case Synchronized():
            return words(seed, Purpose.MASK_SHARED, blocks, round_=round_)
        case Groups(group_of):
            if client not in group_of:
                raise FedmaskError(f"client {client} has no group; group_of must name every client of the cohort")
            return words(seed, Purpose.MASK_GROUP, blocks, round_=round_, client=group_of[client])


def _below(
    random: UInt64[np.ndarray, " blocks"], probabilities: Float64[np.ndarray, " probabilities"]
) -> Bool[np.ndarray, " blocks"]:
    # Scaling by a power of two is exact, and ⌊p·2⁶⁴⌋ < 2⁶⁴ for every float p < 1; p = 1 has no such word.
    certain = probabilities == 1
    thresholds = np.where(certain, 0.0, np.ldexp(probabilities, 64)).astype(np.uint64)
    return np.asarray((random < thresholds) | certain)
