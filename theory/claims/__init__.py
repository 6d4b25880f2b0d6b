"""All claims, in the order of the paper and then beyond it."""

from theory.claims import (
    dilution,
    diversity,
    expansion,
    granularity,
    masking,
    measuring,
    rounds,
    signal_noise,
    synchrony,
)
from theory.registry import Claim

__all__ = ["CLAIMS"]

CLAIMS: tuple[Claim, ...] = (
    *masking.CLAIMS,
    *synchrony.CLAIMS,
    *diversity.CLAIMS,
    *signal_noise.CLAIMS,
    *dilution.CLAIMS,
    *granularity.CLAIMS,
    *rounds.CLAIMS,
    *expansion.CLAIMS,
    *measuring.CLAIMS,
)
