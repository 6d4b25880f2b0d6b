"""Random words as a pure function of (seed, purpose, round, client, draw), from no stream's position.

Every random choice in fedmask (masks, cohorts, batches, partitions, initial weights) reads raw 64-bit
words of the counter-based generator Philox4x64-10 (Salmon et al. 2011) as NumPy implements it. Raw words,
unlike NumPy's distributions, are the same on every platform and in every NumPy version.

Layout, all words unsigned 64-bit:

    key     = (seed, purpose)
    counter = (position, draw, client, round)

Word w of the sequence is output w mod 4 of the block at position 1 + w // 4 (NumPy advances the counter
before it generates). Purposes are fixed numbers, so no two uses ever share a word. A draw numbers the
repeated choices of one client in one round, such as its epochs.
"""

import secrets
from enum import IntEnum

import numpy as np
from jaxtyping import Int64, UInt64

from fedmask.errors import FedmaskError

__all__ = ["Purpose", "fresh_seed", "generator", "permutation", "words"]

_WORD_LIMIT = 2**64


class Purpose(IntEnum):
    """What the words are for. The numbers are part of the format: never change or reuse one."""

    MASK_OWN = 1
    MASK_SHARED = 2
    MASK_GROUP = 3
    MASK_SELECT = 4
    COHORT = 16
    BATCHES = 17
    PARTITION = 18
    INITIAL_WEIGHTS = 19
    TRAINING = 20
    POOLED_SHARDS = 21
    CURVATURE_SIGNS = 32


def words(
    seed: int, purpose: Purpose, count: int, *, round_: int = 0, client: int = 0, draw: int = 0
) -> UInt64[np.ndarray, " count"]:
    """The first ``count`` words for (seed, purpose, round, client, draw), laid out as the module says.

    Raises:
        FedmaskError: if seed, round, client or draw is not an integer in [0, 2⁶⁴).
    """
    return np.asarray(_philox(seed, purpose, round_, client, draw).random_raw(count))


def permutation(
    seed: int, purpose: Purpose, size: int, *, round_: int = 0, client: int = 0, draw: int = 0
) -> Int64[np.ndarray, " size"]:
    """A uniform permutation of 0 … size−1: the order of ``size`` random words (ties by index)."""
    random = words(seed, purpose, size, round_=round_, client=client, draw=draw)
    return np.argsort(random, kind="stable")


def generator(seed: int, purpose: Purpose, *, round_: int = 0, client: int = 0, draw: int = 0) -> np.random.Generator:
    """A NumPy generator over the same words, for distributions; its draws may change with NumPy's version."""
    return np.random.Generator(_philox(seed, purpose, round_, client, draw))


def fresh_seed() -> int:
    """A seed from the operating system, short enough to read aloud and type again."""
    return secrets.randbelow(2**32)


def _philox(seed: int, purpose: Purpose, round_: int, client: int, draw: int) -> np.random.Philox:
    named = {"seed": seed, "round": round_, "client": client, "draw": draw}
    for name, value in named.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < _WORD_LIMIT:
            raise FedmaskError(f"{name} is {value!r}; it must be an integer from 0 to 2^64 - 1")
    key = np.array([seed, purpose], dtype=np.uint64)
    counter = np.array([0, draw, client, round_], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter)
