"""A confidence sequence by betting, which may be looked at after every sample.

Waudby-Smith and Ramdas (2024): for observations in [0, 1] with mean m, the capital ∏(1 ± λ_i (X_i − m)) with
predictable bets is a nonnegative martingale, so it reaches 1/α with probability at most α, ever (Ville). The
interval holds at every stopping time and adapts to the variance.

A check stops two-sided: it *fails* once the claimed value is excluded, and *passes* once both ends of the
declared tolerance around it are. Both errors are bounded.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

__all__ = ["Betting", "sampled_mean_equals"]

_CAP = 0.5  # bets are cut where the capital would come within half of zero


class Betting:
    """Capital against a few hypothetical means at once, from observations in [0, 1]."""

    def __init__(self, means: Float64[np.ndarray, " means"], alpha: float) -> None:
        """Test each of ``means`` two-sided at level alpha."""
        self._means, self._alpha = means, alpha
        self._log_capital = np.zeros((2, len(means)))
        self.excluded = np.zeros(len(means), dtype=bool)
        self._count, self._sum, self._squares = 0, 0.5, 0.25

    def add(self, observations: Float64[np.ndarray, " samples"]) -> None:
        """Bet on each observation in turn, with what was known before it."""
        x = np.asarray(observations)
        if x.min() < 0 or x.max() > 1:
            raise ValueError(f"an observation of {x.min()} or {x.max()} lies outside [0, 1]; its bound is wrong")
        t = self._count + np.arange(1, len(x) + 1)
        sums = self._sum + np.concatenate(([0.0], np.cumsum(x)))
        averages = sums / (self._count + np.arange(1, len(x) + 2))
        squares = self._squares + np.concatenate(([0.0], np.cumsum((x - averages[1:]) ** 2)))
        variances = squares[:-1] / t
        bets = np.sqrt(2 * np.log(2 / self._alpha) / (t * np.log1p(t) * variances))
        gaps = x[:, None] - self._means
        up = 1 + np.minimum(bets[:, None], _CAP / self._means) * gaps
        down = 1 - np.minimum(bets[:, None], _CAP / (1 - self._means)) * gaps
        for side, factors in enumerate((up, down)):
            path = self._log_capital[side] + np.cumsum(np.log(factors), axis=0)
            self.excluded |= path.max(axis=0) >= np.log(2 / self._alpha)
            self._log_capital[side] = path[-1]
        self._count, self._sum, self._squares = self._count + len(x), sums[-1], squares[-1]


@dataclass(frozen=True)
class Sampled:
    """How a sampled check ended: the interval is in units of the claimed mean's tolerance scale."""

    equal: bool
    interval: tuple[float, float]
    samples: int
    average: float


def sampled_mean_equals(
    draw: Callable[[int], Float64[np.ndarray, " samples"]],
    claimed: float,
    *,
    bounds: tuple[float, float],
    tolerance: float,
    alpha: float,
    batch: int = 256,
    most: int = 200_000,
) -> Sampled:
    """Is E X = ``claimed``, to within ``tolerance``?

    Args:
        draw: gives that many independent observations, all within ``bounds``.
        claimed: the mean to be tested.
        bounds: what X can take.
        tolerance: an interval narrower than this around the claimed value passes.
        alpha: probability of rejecting a right claim.
        batch: samples between looks.
        most: samples after which an undecided check counts as failed.
    """
    low, high = bounds
    width = high - low

    def scaled(value: Float64[np.ndarray, "..."] | float) -> Float64[np.ndarray, "..."]:
        return np.clip((np.asarray(value, dtype=np.float64) - low) / width, 1e-9, 1 - 1e-9)

    if not low < claimed < high:
        return Sampled(False, bounds, 0, claimed)
    # The claimed value in the middle, the ends of the tolerance, and points between to report the interval by.
    offsets = np.linspace(-4, 4, 81) * tolerance
    grid = np.unique(np.concatenate((offsets, np.linspace(low, high, 101) - claimed)))
    grid = grid[(grid + claimed > low) & (grid + claimed < high)]
    betting = Betting(scaled(grid + claimed), alpha)
    middle = int(np.argmin(np.abs(grid)))
    total, count = 0.0, 0
    while count < most:
        x = draw(batch)
        count, total = count + len(x), total + float(x.sum())
        betting.add(scaled(x))
        inside = grid[~betting.excluded]
        interval = (float(inside.min()), float(inside.max())) if inside.size else (float("nan"), float("nan"))
        if betting.excluded[middle]:
            return Sampled(False, interval, count, total / count)
        if inside.min() >= -tolerance and inside.max() <= tolerance:
            return Sampled(True, interval, count, total / count)
    return Sampled(False, interval, count, total / count)
