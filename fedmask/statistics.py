"""Statistics of a cohort as small functions of its Gram matrices.

They are of the **unmasked** updates. Give them Gram matrices in the Euclidean inner product and they are the
paper's; give them ⟨·, H_bb ·⟩ and the same functions are the exact, Hessian-weighted statements. What is
undefined (0/0, one client) comes back without a value and with the reason.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from jaxtyping import Float64
from scipy import special

from fedmask.errors import FedmaskError
from fedmask.gram import CohortSums, GramMatrices

__all__ = [
    "Interval",
    "Statistic",
    "correlation_for_recovery",
    "cosines",
    "effective_cohort_size",
    "fedexp_step",
    "gradient_diversity",
    "noise",
    "noise_interval",
    "noise_scale",
    "recovery_factor",
    "recovery_factor_interval",
    "recovery_factor_per_block",
    "signal",
    "signal_interval",
]

Cohort: TypeAlias = GramMatrices | CohortSums

_ALL_ZERO = "every update is zero"
_SIGN_CHANGES = "the sum of the clients' forms is zero or changes its sign as a client is left out"
_ONE_CLIENT = "undefined for one client (n < 2)"


@dataclass(frozen=True)
class Statistic:
    """A number, or no number and the reason why."""

    value: float | None
    reason: str | None = None

    def __float__(self) -> float:
        """The value.

        Raises:
            FedmaskError: if there is none.
        """
        if self.value is None:
            raise FedmaskError(f"this statistic has no value: {self.reason}")
        return self.value


@dataclass(frozen=True)
class Interval:
    """A confidence interval over clients at ``level``, or none and the reason why."""

    low: float | None
    high: float | None
    level: float
    reason: str | None = None


def recovery_factor(cohort: Cohort, *, weighted: bool = False) -> Statistic:
    """1/Δ_S = ‖ΣΔ_k‖² / Σ‖Δ_k‖² (paper, eqs. 3, 8): what one shared mask brings back.

    Weighted, ‖Σa_kΔ_k‖² / Σa_k²‖Δ_k‖² with a_k = n_k/Σn. Both are at most K_c: unweighted with equality for
    equal Δ_k, weighted for equal a_kΔ_k; for equal Δ_k the weighted one is 1/Σa_k². For one client they are 1.
    """
    top, bottom = _ratio_parts(_sums(cohort), weighted)
    return _divide(top.sum(), bottom.sum(), _ALL_ZERO)


def recovery_factor_per_block(cohort: Cohort, *, weighted: bool = False) -> Float64[np.ndarray, " blocks"]:
    """The recovery factor of each block alone; NaN (null in JSON) where every update is zero in the block."""
    top, bottom = _ratio_parts(_sums(cohort), weighted)
    return np.asarray(np.divide(top, bottom, out=np.full_like(top, np.nan), where=bottom != 0))


def correlation_for_recovery(cohort: Cohort, wanted: float, *, weighted: bool = False) -> float:
    """The correlation ρ between clients' masks that recovers ``wanted`` times the independent masks' penalty.

    Masks of correlation ρ (:class:`fedmask.Correlated`) have the penalty (1−ρ)·R_ind + ρ·R_shr, so ρ is
    (wanted − 1)/(f − 1) with f the recovery factor. Give Gram matrices in ⟨·, H_bb ·⟩ for the exact statement.

    Raises:
        FedmaskError: if ``wanted`` does not lie between 1 (independent) and f (synchronized), or f is undefined.
    """
    full = float(recovery_factor(cohort, weighted=weighted))
    if not min(1.0, full) <= wanted <= max(1.0, full):
        raise FedmaskError(
            f"a recovery of {wanted:g} was asked for; for this cohort it lies between 1, with independent masks, "
            f"and {full:g}, with a shared one"
        )
    return 1.0 if wanted == full else (wanted - 1) / (full - 1)


def gradient_diversity(cohort: Cohort, *, weighted: bool = False) -> Statistic:
    """Δ_S = Σ‖Δ_k‖² / ‖ΣΔ_k‖² (paper, eq. 3)."""
    top, bottom = _ratio_parts(_sums(cohort), weighted)
    if bottom.sum() == 0:
        return Statistic(None, _ALL_ZERO)
    return _divide(bottom.sum(), top.sum(), "the updates cancel: their sum is zero")


def signal(cohort: Cohort) -> Statistic:
    """μ̂² = A − σ̂², the unbiased estimate of ‖μ‖² (paper, eq. 14). It is negative exactly when 1/Δ_S < 1."""
    total, norms, clients = _totals(cohort)
    if clients < 2:
        return Statistic(None, _ONE_CLIENT)
    # The same as A − (A − B)/(1 − 1/K), with the sign of 1/Δ_S − 1 to the last bit.
    return Statistic((total - norms) / (clients * (clients - 1)))


def noise(cohort: Cohort) -> Statistic:
    """σ̂² = (A − B)/(1 − 1/K_c) with A = mean ‖Δ_k‖², B = ‖mean Δ_k‖² (paper, eq. 13)."""
    total, norms, clients = _totals(cohort)
    if clients < 2:
        return Statistic(None, _ONE_CLIENT)
    return Statistic((norms - total / clients) / (clients - 1))


def noise_scale(cohort: Cohort) -> Statistic:
    """𝔅 = σ̂²/μ̂², McCandlish et al. (2018) with one client as the small batch; 1/Δ_S = (K_c + 𝔅)/(1 + 𝔅).

    Negative in a round whose signal estimate is negative.
    """
    sigma, mu = noise(cohort), signal(cohort)
    if sigma.value is None or mu.value is None:
        return Statistic(None, _ONE_CLIENT)
    return _divide(sigma.value, mu.value, "the signal estimate is zero")


def fedexp_step(cohort: Cohort, *, epsilon: float = 0.0) -> Statistic:
    """FedExP's server step max(1, Σ‖Δ_k‖² / (2K_c(‖Δ̄‖² + ε))); for ε = 0, before the max, (K_c/2)·Δ_S."""
    total, norms, clients = _totals(cohort)
    if norms == 0:
        return Statistic(None, _ALL_ZERO)
    bottom = 2 * clients * (total / clients**2 + epsilon)
    step = _divide(norms, bottom, "the updates cancel: their sum is zero")
    return step if step.value is None else Statistic(max(1.0, step.value))


def effective_cohort_size(counts: Sequence[int | float] | Float64[np.ndarray, " clients"]) -> float:
    """1/Σa_k² with a_k = n_k/Σn: the weighted recovery factor of equal updates.

    Raises:
        FedmaskError: if all counts are zero.
    """
    n = np.asarray(counts, dtype=np.float64)
    if not n.sum() > 0:
        raise FedmaskError(f"the weights of all {n.size} clients are zero: the effective cohort size is undefined")
    return float(n.sum() ** 2 / np.sum(n**2))


def cosines(gram: GramMatrices) -> Float64[np.ndarray, "clients clients"]:
    """cos(Δ_k, Δ_l) of the whole updates; NaN (null in JSON) where an update is zero."""
    total = gram.total
    norms = np.sqrt(np.diag(total))
    scale = np.outer(norms, norms)
    return np.asarray(np.divide(total, scale, out=np.full_like(total, np.nan), where=scale > 0))


def recovery_factor_interval(gram: GramMatrices, *, weighted: bool = False, level: float = 0.95) -> Interval:
    """A jackknife interval over clients for the recovery factor.

    1/Δ_S scales with the number of clients, so leaving one out estimates another quantity. What is
    jackknifed is q = (1/Δ_S − 1)/(K − 1), which does not depend on K (weighted, K is 1/Σa_k²); the interval
    for q is mapped back at the full K and, for a definite inner product, cut to the range from 0 to K_c that 1/Δ_S
    can take.
    """
    a = gram.counts if weighted else np.ones(len(gram.clients))
    if np.count_nonzero(a) < 3:
        return Interval(None, None, level, "undefined for fewer than three clients with weight (n < 3)")
    scaled = gram.total[np.ix_(a > 0, a > 0)] * np.outer(a[a > 0], a[a > 0])
    a = a[a > 0]
    total, squares = a.sum(), np.sum(a**2)
    sizes = np.append(total**2 / squares, (total - a) ** 2 / (squares - a**2))
    top, bottom = _leave_one_out(scaled)
    if not (np.all(bottom > 0) or np.all(bottom < 0)):
        return Interval(None, None, level, _ALL_ZERO if gram.definite else _SIGN_CHANGES)
    q = (top / bottom - 1) / (sizes - 1)
    low, high = _jackknife(q, level)
    size = float(sizes[0])
    if not gram.definite:
        return Interval(1 + (size - 1) * low, 1 + (size - 1) * high, level)
    return Interval(max(0.0, 1 + (size - 1) * low), min(float(len(a)), 1 + (size - 1) * high), level)


def signal_interval(gram: GramMatrices, *, level: float = 0.95) -> Interval:
    """A jackknife interval over clients for the signal ‖μ‖²."""
    top, bottom = _leave_one_out(gram.total)
    return _moment_interval(lambda k: (top - bottom) / (k * (k - 1)), len(gram.clients), level)


def noise_interval(gram: GramMatrices, *, level: float = 0.95) -> Interval:
    """A jackknife interval over clients for the noise σ², cut at zero."""
    top, bottom = _leave_one_out(gram.total)
    interval = _moment_interval(lambda k: (bottom - top / k) / (k - 1), len(gram.clients), level)
    if interval.low is None or not gram.definite:
        return interval
    return Interval(max(0.0, interval.low), interval.high, level)


def _sums(cohort: Cohort) -> CohortSums:
    return cohort.sums() if isinstance(cohort, GramMatrices) else cohort


def _ratio_parts(
    sums: CohortSums, weighted: bool
) -> tuple[Float64[np.ndarray, " blocks"], Float64[np.ndarray, " blocks"]]:
    if weighted:
        return sums.squared_norm_of_weighted_sum, sums.weighted_squared_norms
    return sums.squared_norm_of_sum, sums.squared_norms


def _totals(cohort: Cohort) -> tuple[float, float, int]:
    """‖ΣΔ_k‖², Σ‖Δ_k‖² and K_c of the whole updates."""
    sums = _sums(cohort)
    return float(sums.squared_norm_of_sum.sum()), float(sums.squared_norms.sum()), sums.clients


def _divide(top: float, bottom: float, reason: str) -> Statistic:
    return Statistic(None, reason) if bottom == 0 else Statistic(float(top / bottom))


def _leave_one_out(
    total: Float64[np.ndarray, "clients clients"],
) -> tuple[Float64[np.ndarray, " cohorts"], Float64[np.ndarray, " cohorts"]]:
    """‖ΣΔ‖² and Σ‖Δ‖² of the full cohort and then of each cohort without one client."""
    rows, norms = total.sum(axis=1), np.diag(total)
    full, trace = rows.sum(), norms.sum()
    return np.append(full, full - 2 * rows + norms), np.append(trace, trace - norms)


def _moment_interval(
    estimate: Callable[[Float64[np.ndarray, " cohorts"]], Float64[np.ndarray, " cohorts"]],
    clients: int,
    level: float,
) -> Interval:
    if clients < 3:
        return Interval(None, None, level, "undefined for fewer than three clients (n < 3)")
    sizes = np.full(clients + 1, clients - 1.0)
    sizes[0] = clients
    low, high = _jackknife(estimate(sizes), level)
    return Interval(low, high, level)


def _jackknife(estimates: Float64[np.ndarray, " cohorts"], level: float) -> tuple[float, float]:
    """Estimate ± t·standard error, from the full estimate followed by those without one client."""
    if not 0 < level < 1:
        raise FedmaskError(f"level is {level}; a confidence level lies between 0 and 1")
    full, without = estimates[0], estimates[1:]
    n = len(without)
    error = np.sqrt((n - 1) / n * np.sum((without - without.mean()) ** 2))
    reach = special.stdtrit(n - 1, (1 + level) / 2) * error
    return float(full - reach), float(full + reach)
