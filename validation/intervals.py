"""Intervals for statistics of a run's rounds, which are correlated from round to round."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float64
from scipy import stats

__all__ = ["COVERAGE", "block_bootstrap", "wilson"]

RESAMPLES = 4000
# Of the true median by intervals for the median, over 400 simulated autoregressive series each.
COVERAGE = (
    "10 rounds with a lag-one correlation of 0, 0.5 and 0.7 are covered in 88, 73 and 62 % of simulated cases, "
    "50 rounds in 92, 91 and 86 %"
)


def block_bootstrap(
    series: Float64[np.ndarray, " rounds"],
    statistic: Callable[[Float64[np.ndarray, "resamples rounds"]], Float64[np.ndarray, " resamples"]],
    *,
    level: float = 0.95,
) -> tuple[float, float]:
    """A percentile interval by the circular block bootstrap (Politis & Romano 1992), blocks of √n rounds.

    It says how far chance within this one run goes, and nothing of other seeds. Undefined rounds are left out.
    The level is nominal: see COVERAGE.
    The resampling is a pure function of the series' length.

    Args:
        series: one value a round.
        statistic: of each row of resampled series.
        level: of the interval.

    Returns:
        Its ends; NaN for fewer than four rounds.
    """
    x = series[np.isfinite(series)]
    n = len(x)
    if n < 4:
        return float("nan"), float("nan")
    length = round(n**0.5)
    starts = np.random.default_rng(n).integers(n, size=(RESAMPLES, -(-n // length)))
    places = (starts[:, :, None] + np.arange(length)) % n
    found = statistic(x[places.reshape(RESAMPLES, -1)[:, :n]])
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def wilson(share: float, count: int, *, level: float = 0.95) -> tuple[float, float]:
    """Wilson's interval for a share of ``count`` independent trials, as test images are for an accuracy."""
    interval = stats.binomtest(round(share * count), count).proportion_ci(level, "wilson")
    return float(interval.low), float(interval.high)
