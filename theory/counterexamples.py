"""The findings' smallest examples, as data: where a looser statement of the paper's claims goes wrong.

Each has the value that the loose statement gives and the true one, both computed here from the numbers shown.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction as F
from typing import Any

from theory.claims.diversity import factor, norm_of_total, total_norm

__all__ = ["COUNTEREXAMPLES", "Counterexample"]


@dataclass(frozen=True)
class Counterexample:
    """A finding, what it is about, the example, and its loose and true values (equal where it is an identity)."""

    finding: int
    claim: str
    words: str
    loose: Callable[[], Any]
    true: Callable[[], Any]
    identity: bool = False


def weighted_factor(updates: list[list[F]], counts: list[int]) -> F:
    """‖Σa_kΔ_k‖²/Σa_k²‖Δ_k‖²."""
    return factor([[F(n) * x for x in u] for n, u in zip(counts, updates, strict=True)])


def h_ratio(updates: list[list[F]], curvature: list[int]) -> F:
    """Σ_b c_b‖ΣΔ_k^(b)‖² / Σ_b c_b Σ‖Δ_k^(b)‖² with one coordinate a block."""
    total = [sum(column, F(0)) for column in zip(*updates, strict=True)]
    bottom = sum((c * x**2 for u in updates for c, x in zip(curvature, u, strict=True)), F(0))
    return sum((c * t**2 for c, t in zip(curvature, total, strict=True)), F(0)) / bottom


def estimates(updates: list[list[F]]) -> tuple[F, F]:
    """(σ̂², μ̂²) of (13) and (14)."""
    k = len(updates)
    a, b = total_norm(updates) / k, norm_of_total(updates) / k**2
    sigma = (a - b) / (1 - F(1, k))
    return sigma, a - sigma


def masked_loss(one_bit: bool) -> F:
    """E l for l = (x + y)²/2 at (1, 1) with the update (½, ½) and p = ½."""
    bits = [(0, 0), (1, 1)] if one_bit else [(0, 0), (0, 1), (1, 0), (1, 1)]
    values = [(2 - m * F(1, 2) / F(1, 2) - n * F(1, 2) / F(1, 2)) ** 2 / 2 for m, n in bits]
    return sum(values, F(0)) / len(values)


def cubic_remainder(p: F) -> F:
    """E l(θ − Δ̃) − l(θ − Δ) − R for l = θ³ at θ = 2, Δ = 1: H is taken after the step."""
    expected = p * (2 - 1 / p) ** 3 + (1 - p) * F(2) ** 3
    return expected - 1 - (1 - p) / (2 * p) * 6


EQUAL, SIGNED = [[F(1)], [F(1)]], [[F(1), F(1)], [F(1), F(-1, 2)]]
CROSS = [[F(1), F(1)], [F(1), F(-1)]]
SIMPLE = [[F(3)], [F(1)]]
POPULATION = [[F(0)], [F(0)], [F(3)]]


def mean_over_pairs(value: Callable[[list[list[F]]], F]) -> F:
    """The mean over all cohorts of two of the three clients of POPULATION."""
    pairs = [(0, 1), (0, 2), (1, 2)]
    return sum((value([POPULATION[i], POPULATION[j]]) for i, j in pairs), F(0)) / 3


COUNTEREXAMPLES = (
    Counterexample(
        1,
        "signal-to-noise",
        "updates 3 and 1: (K_c r + 1)/(r + 1) with r = μ̂²/σ̂² is 1/Δ_S",
        lambda: (
            (2 * estimates(SIMPLE)[1] / estimates(SIMPLE)[0] + 1) / (estimates(SIMPLE)[1] / estimates(SIMPLE)[0] + 1)
        ),
        lambda: factor(SIMPLE),
        identity=True,
    ),
    Counterexample(
        2,
        "bound-weighted",
        "equal updates with counts 1 and 3 recover 1/Σa_k² = 1.6, not K_c = 2",
        lambda: F(2),
        lambda: weighted_factor(EQUAL, [1, 3]),
    ),
    Counterexample(
        3,
        "recovery-per-block",
        "H = diag(3, 1), updates (1, 1) and (1, −1): the ratio is 1.5, and 1/Δ_S is 1",
        lambda: factor(CROSS),
        lambda: h_ratio(CROSS, [3, 1]),
    ),
    Counterexample(
        4,
        "recovery-exact",
        "H = diag(1, −1), updates (1, 1) and (1, −½): the ratio is 5, above K_c = 2",
        lambda: F(2),
        lambda: h_ratio(SIGNED, [1, -1]),
    ),
    Counterexample(
        5,
        "estimators",
        "clients 0, 0 and 3, two drawn: E(A − B), the spread about the cohort's own mean, is 1.5, and S² is 3",
        lambda: mean_over_pairs(lambda u: total_norm(u) / 2 - norm_of_total(u) / 4),
        lambda: mean_over_pairs(lambda u: estimates(u)[0]),
    ),
    Counterexample(
        6,
        "below-one",
        "updates 2 and −1: 1/Δ_S is 0.2, below one, and μ̂² is −2",
        lambda: F(factor([[F(2)], [F(-1)]]) < 1),
        lambda: F(estimates([[F(2)], [F(-1)]])[1] < 0),
        identity=True,
    ),
    Counterexample(
        7,
        "fedexp",
        "one client: (K_c/2)·Δ_S is ½, but the step after the max is 1",
        lambda: F(1, 2) / factor([[F(1)]]),
        lambda: max(F(1), total_norm([[F(1)]]) / 2),
    ),
    Counterexample(
        8,
        "expansion",
        "l = θ³ at 2, Δ = 1: the remainder is 0 at p = ½ and −6 at p = ¼",
        lambda: cubic_remainder(F(1, 2)),
        lambda: cubic_remainder(F(1, 4)),
    ),
    Counterexample(
        9,
        "model-granularity",
        "l = (x + y)²/2 at (1, 1), Δ = (½, ½), p = ½: E l is ¾ with a bit each, 1 with one bit for both",
        lambda: masked_loss(one_bit=False),
        lambda: masked_loss(one_bit=True),
    ),
    Counterexample(
        10,
        "noise-scale",
        "updates 3 and 1: (K_c + 𝔅)/(1 + 𝔅) with 𝔅 = σ̂²/μ̂² is 1/Δ_S",
        lambda: (2 + estimates(SIMPLE)[0] / estimates(SIMPLE)[1]) / (1 + estimates(SIMPLE)[0] / estimates(SIMPLE)[1]),
        lambda: factor(SIMPLE),
        identity=True,
    ),
)
