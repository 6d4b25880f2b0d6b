"""The recovery factor as a signal-to-noise ratio, and the server's estimators of signal and noise."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from random import Random
from typing import Any

import numpy as np
import sympy as sp
import torch

from fedmask import Blocks, gram_matrices, noise, signal
from theory.checking import for_all, identical, sampled_outcome
from theory.claims.diversity import Updates, as_gram, draw_updates, factor, norm_of_total, total_norm
from theory.quadratics import dot
from theory.registry import Claim, Context, Outcome, Step
from theory.sequences import sampled_mean_equals

__all__ = ["CLAIMS"]

A, B = sp.symbols("A B", positive=True)
K = sp.Symbol("K_c", positive=True)


@dataclass(frozen=True)
class SignalNoise:
    """The factor as a function of K_c and r, with the estimators of ‖μ‖² and σ² from A and B."""

    factor: Callable[[Any, Any], Any]
    noise: Callable[[Any, Any, Any], Any]
    signal: Callable[[Any, Any, Any], Any]


def identity_symbolic(formula: SignalNoise, context: Context) -> Outcome:
    """With r the ratio of the two estimates it is K_c·B/A in every round; and its limits are 1 and K_c."""
    r = sp.Symbol("r", nonnegative=True)
    limits = [sp.limit(formula.factor(K, r), r, 0) - 1, sp.limit(formula.factor(K, r), r, sp.oo) - K]
    estimate = formula.signal(A, B, K) / formula.noise(A, B, K)
    return identical([formula.factor(K, estimate) - K * B / A, *limits], "identity, limits 1 and K_c")


def identity_exhaustive(formula: SignalNoise, context: Context) -> Outcome:
    """On exact updates; production's estimates are those of the formula."""

    def holds(updates: Updates) -> bool:
        k = len(updates)
        a, b = total_norm(updates) / k, norm_of_total(updates) / k**2
        sigma, mu = formula.noise(a, b, k), formula.signal(a, b, k)
        gram = as_gram(updates)
        close = abs(float(noise(gram)) - float(sigma)) + abs(float(signal(gram)) - float(mu)) <= 1e-9 * float(a)
        if sigma == 0 or sigma + mu == 0:
            return bool(close)
        return bool(formula.factor(k, mu / sigma) == factor(updates) and close)

    return for_all(draw_updates, holds, context, "signal-noise", count=60)


# Expectations of the estimators.


@dataclass(frozen=True)
class Unbiased:
    """Estimators from A, B and K_c, and what they are claimed to estimate when K_c of N clients are drawn.

    ``expected`` takes ‖μ_N‖², S² (with N − 1), the clients' mean variance v of their own noise, and N, and gives
    (E σ̂², E μ̂²).
    """

    noise: Callable[[Any, Any, Any], Any]
    signal: Callable[[Any, Any, Any], Any]
    expected: Callable[[Any, Any, Any, int], tuple[Any, Any]]


def sampling_exhaustive(formula: Unbiased, context: Context) -> Outcome:
    """The mean over every cohort of K_c of N clients, without replacement, and over ± each client's own noise."""

    def holds(case: tuple[Updates, Updates]) -> bool:
        updates, noises = case
        size = len(updates)
        center = [sum(column, Fraction(0)) / size for column in zip(*updates, strict=True)]
        spread = [[x - c for x, c in zip(u, center, strict=True)] for u in updates]
        s2, mu2 = total_norm(spread) / (size - 1), dot(center, center)
        for k in range(2, size + 1):
            cohorts = [
                [[x + sign * e for x, e in zip(updates[i], noises[i], strict=True)] for i, sign in signed]
                for chosen in itertools.combinations(range(size), k)
                for signs in itertools.product((-1, 1), repeat=k)
                if (signed := list(zip(chosen, signs, strict=True)))
            ]
            moments = [(total_norm(c) / k, norm_of_total(c) / k**2) for c in cohorts]
            found = tuple(
                sum((f(a, b, k) for a, b in moments), Fraction(0)) / len(cohorts)
                for f in (formula.noise, formula.signal)
            )
            if found != formula.expected(mu2, s2, total_norm(noises) / size, size):
                return False
        return True

    def draw(random: Random) -> tuple[Updates, Updates]:
        updates = draw_updates(random, least=3)
        return updates, [[Fraction(random.randint(1, 3)) for _ in u] for u in updates]

    return for_all(draw, holds, context, "sampling", count=12)


def independent_monte_carlo(formula: Unbiased, context: Context) -> Outcome:
    """Production's Gram matrices of Δ_k = μ + ε_k, ε_k independent signs in 1,000 dimensions: E σ̂² = σ²."""
    random = context.numpy("independent")
    clients, d = 6, 1000
    blocks = Blocks.of({"w": torch.zeros(d)})
    mu, scale = random.standard_normal(d) / np.sqrt(d), 1.5 / np.sqrt(d)
    sigma2 = 1.5**2

    def draw(count: int) -> Any:
        values = np.empty(count)
        for i in range(count):
            updates = torch.from_numpy(mu + scale * random.choice((-1.0, 1.0), (clients, d)))
            sums = gram_matrices(updates, blocks).sums()
            a, b = float(sums.squared_norms.sum()) / clients, float(sums.squared_norm_of_sum.sum()) / clients**2
            values[i] = formula.noise(a, b, clients)
        return values

    most = clients / (clients - 1) * (np.linalg.norm(mu) + 1.5) ** 2  # σ̂² ≤ A·K_c/(K_c − 1)
    return sampled_outcome(
        sampled_mean_equals(draw, sigma2, bounds=(0.0, most), tolerance=0.1 * sigma2, alpha=context.alpha), sigma2
    )


# One local step of SGD on b of n samples.


def minibatch_exhaustive(formula: Callable[[Any, int, int], Any], context: Context) -> Outcome:
    """The variance of the mean of every batch of b of n per-sample gradients, without replacement."""

    def holds(gradients: Updates) -> bool:
        n = len(gradients)
        center = [sum(column, Fraction(0)) / n for column in zip(*gradients, strict=True)]
        covariance = total_norm([[x - c for x, c in zip(g, center, strict=True)] for g in gradients]) / (n - 1)
        for b in range(1, n + 1):
            means = [
                [sum(column, Fraction(0)) / b for column in zip(*batch, strict=True)]
                for batch in itertools.combinations(gradients, b)
            ]
            variance = total_norm([[x - c for x, c in zip(m, center, strict=True)] for m in means]) / len(means)
            if variance != formula(covariance, b, n):
                return False
        return True

    return for_all(lambda random: draw_updates(random, least=3), holds, context, "minibatch")


def minibatch_symbolic(formula: Callable[[Any, Any, Any], Any], context: Context) -> Outcome:
    """From E[z_i] = b/n and E[z_i z_j] = b(b−1)/(n(n−1)) of the indicators of a batch, for any b and n."""
    b, n, s2 = sp.symbols("b n S2", positive=True)
    # Centred gradients: Σ_i ‖g_i‖² = (n−1)S² and Σ_{i≠j}⟨g_i, g_j⟩ = −(n−1)S².
    same, other = b / n, b * (b - 1) / (n * (n - 1))
    variance = (same * (n - 1) * s2 - other * (n - 1) * s2) / b**2
    return identical(variance - formula(s2, b, n), "identity in b, n and tr C")


# The noise scale.


@dataclass(frozen=True)
class NoiseScale:
    """What (K_c + 𝔅)/(1 + 𝔅) with the population's 𝔅 = σ²/‖μ‖² is, from cohorts' (A, B)."""

    value: Callable[[list[tuple[Fraction, Fraction]], int], Fraction]


def scale_exhaustive(formula: NoiseScale, context: Context) -> Outcome:
    """Cohorts of two and three drawn with replacement from a small population: independent clients, enumerated."""

    def holds(population: Updates) -> bool:
        size = len(population)
        center = [sum(column, Fraction(0)) / size for column in zip(*population, strict=True)]
        mu2 = dot(center, center)
        sigma2 = total_norm([[x - c for x, c in zip(u, center, strict=True)] for u in population]) / size
        for k in (2, 3):
            cohorts = [list(c) for c in itertools.product(population, repeat=k)]
            moments = [(total_norm(c) / k, norm_of_total(c) / k**2) for c in cohorts]
            if any(a == 0 for a, _ in moments) or mu2 == 0:
                continue
            scale = sigma2 / mu2
            if (k + scale) / (1 + scale) != formula.value(moments, k):
                return False
        return True

    def draw(random: Random) -> Updates:
        return [[x + 11 if i == 0 else x for i, x in enumerate(u)] for u in draw_updates(random)]

    return for_all(draw, holds, context, "scale")


def _ratio_of_means(moments: list[tuple[Fraction, Fraction]], k: int) -> Fraction:
    return k * sum((b for _, b in moments), Fraction(0)) / sum((a for a, _ in moments), Fraction(0))


def _mean_of_ratios(moments: list[tuple[Fraction, Fraction]], k: int) -> Fraction:
    return k * sum((b / a for a, b in moments), Fraction(0)) / len(moments)


Gap = Callable[[Any, Any, Any], Any]  # K_c·E[B]/E[A], Cov(1/Δ_S, A), E[A] → E[1/Δ_S]


def gap_exhaustive(formula: Gap, context: Context) -> Outcome:
    """Over all cohorts of two and three independent clients: the expected factor, in rationals."""

    def holds(population: Updates) -> bool:
        for k in (2, 3):
            cohorts = [list(c) for c in itertools.product(population, repeat=k)]
            sizes = [total_norm(c) / k for c in cohorts]
            factors = [factor(c) for c in cohorts]
            average = sum(factors, Fraction(0)) / len(cohorts)
            size = sum(sizes, Fraction(0)) / len(cohorts)
            products = sum((f * a for f, a in zip(factors, sizes, strict=True)), Fraction(0)) / len(cohorts)
            covariance = products - average * size
            scale = k * sum((norm_of_total(c) for c in cohorts), Fraction(0)) / k**2 / len(cohorts) / size
            if average != formula(scale, covariance, size):
                return False
        return True

    def draw(random: Random) -> Updates:
        return [[x + 11 if i == 0 else x for i, x in enumerate(u)] for u in draw_updates(random)]

    return for_all(draw, holds, context, "gap")


def gap_symbolic(formula: Gap, context: Context) -> Outcome:
    """With f = 1/Δ_S = K_c·B/A and moments E f, E A, E[fA] = K_c·E B as symbols."""
    f, size, product = sp.symbols("f A fA", positive=True)  # E f, E A, E[fA]
    return identical(formula(product / size, product - f * size, size) - f, "identity in the moments")


def gap_steps() -> list[Step]:
    """The covariance of a ratio with its denominator."""
    f, size, product = sp.symbols("f A fA", positive=True)
    return [
        Step("In every round (1/Δ_S)·A = K_c·B; so K_c·E B/E A is, with f = E 1/Δ_S", product / size),
        Step("Cov(1/Δ_S, A)", product - f * size),
        Step("E 1/Δ_S − K_c·E B/E A", sp.simplify(f - product / size)),
        Step("which is −Cov(1/Δ_S, A)/E A: none where rounds with long updates recover as much as others"),
    ]


# Three parts of the noise.


@dataclass(frozen=True)
class Attribution:
    """Estimates of (minibatch, finite shard, heterogeneity) from four mean squares, which see below."""

    parts: Callable[[Any, Any, Any], tuple[Any, Any, Any]]


def attribution_exhaustive(formula: Attribution, context: Context) -> Outcome:
    """Two clients with distributions of their own, shards of two samples: all shards and orders counted.

    A client's update is two nonlinear local steps on single samples, or one on both (then there is no minibatch
    noise). Measured are half the mean squared difference of two trainings
    on the same shard (repeat), the noise estimate of the cohort, and the noise estimate of a cohort whose
    shards are drawn from the pooled data (pooled). True are the mean within-shard variance, the variance of
    shard means about their client's mean, and the variance (K_c − 1) of the clients' means.
    """

    def holds(case: tuple[list[list[Fraction]], int]) -> bool:
        clients, batch = case
        n = 2

        def train(samples: list[Fraction]) -> Fraction:
            """θ − θ_k after steps on batches, from 0, of the loss (θ − x)²/2 + θ³/24 by a learning rate of ½."""
            theta = Fraction(0)
            for start in range(0, n, batch):
                center = sum(samples[start : start + batch], Fraction(0)) / batch
                theta -= (theta - center + theta**2 / 8) / 2
            return -theta

        pooled = [x for values in clients for x in values]

        def outcomes(values: list[Fraction]) -> list[tuple[list[Fraction], list[Fraction]]]:
            """(shard, updates over all batches) for every i.i.d. shard."""
            shards = [list(shard) for shard in itertools.product(values, repeat=n)]
            return [(s, [train(list(order)) for order in itertools.permutations(s)]) for s in shards]

        def average(values: list[Fraction]) -> Fraction:
            return sum(values, Fraction(0)) / len(values)

        def variance(values: list[Fraction]) -> Fraction:
            return average([x**2 for x in values]) - average(values) ** 2

        def within(values: list[Fraction]) -> Fraction:
            return average([variance(updates) for _, updates in outcomes(values)])

        def between(values: list[Fraction]) -> Fraction:
            return variance([average(updates) for _, updates in outcomes(values)])

        def center(values: list[Fraction]) -> Fraction:
            return average([average(updates) for _, updates in outcomes(values)])

        def cohort_noise(sources: list[list[Fraction]]) -> Fraction:
            """E σ̂² for independent clients: mean variance of an update, plus the variance of their means."""
            updates = [[u for _, us in outcomes(values) for u in us] for values in sources]
            total = Fraction(0)
            for pair in itertools.product(*updates):
                total += (pair[0] - pair[1]) ** 2 / 2  # σ̂² of two clients is half their squared difference
            return total / (len(updates[0]) * len(updates[1]))

        repeat = average([within(values) for values in clients])
        repeat_pooled = within(pooled)
        measured = (repeat, repeat_pooled, cohort_noise([pooled, pooled]), cohort_noise(clients))
        heterogeneity = variance([center(values) for values in clients]) * 2
        true = (
            repeat,
            between(pooled),
            heterogeneity + average([within(v) + between(v) for v in clients]) - within(pooled) - between(pooled),
        )
        return bool(formula.parts(measured[0:2], measured[2], measured[3]) == true)

    def draw(random: Random) -> tuple[list[list[Fraction]], int]:
        clients = [[Fraction(random.randint(-3, 3)) for _ in range(2)] for _ in range(2)]
        clients[0][0] += 4
        clients[1][1] -= 5
        return clients, random.choice((1, 2))

    return for_all(draw, holds, context, "attribution", count=10)


def identity_steps() -> list[Step]:
    """Substitution of the estimators."""
    sigma = (A - B) / (1 - 1 / K)
    r = sp.simplify((A - sigma) / sigma)
    return [
        Step("σ̂² by (13)", sigma),
        Step("r = μ̂²/σ̂² with μ̂² = A − σ̂² by (14)", r),
        Step("(K_c r + 1)/(r + 1)", sp.simplify((K * r + 1) / (r + 1))),
        Step("which is ‖ΣΔ_k‖²/Σ‖Δ_k‖² = K_c²B/(K_cA), in every round"),
    ]


def minibatch_steps() -> list[Step]:
    """Moments of the indicators of a batch."""
    b, n, s2 = sp.symbols("b n S2", positive=True)
    same, other = b / n, b * (b - 1) / (n * (n - 1))
    return [
        Step("A batch of b of n: E z_i z_j for i ≠ j", other),
        Step(
            "Centred gradients have Σ‖g_i‖² = (n−1)S² and Σ_{i≠j}⟨g_i, g_j⟩ = −(n−1)S²; the mean's variance",
            (same - other) * (n - 1) * s2 / b**2,
        ),
        Step("simplified: (S²/b)(1 − b/n)", sp.factor(sp.simplify((same - other) * (n - 1) * s2 / b**2))),
    ]


IDENTITY = SignalNoise(
    lambda k, r: (k * r + 1) / (r + 1),
    lambda a, b, k: (a - b) / (1 - Fraction(1) / k if isinstance(k, int) else 1 - 1 / k),
    lambda a, b, k: a - (a - b) / (1 - Fraction(1) / k if isinstance(k, int) else 1 - 1 / k),
)
SAMPLING = Unbiased(
    lambda a, b, k: (a - b) * k / (k - 1),
    lambda a, b, k: a - (a - b) * k / (k - 1),
    lambda mu2, s2, own, size: (s2 + own, mu2 - s2 / size),
)

CLAIMS = (
    Claim(
        "signal-to-noise",
        "In every round 1/Δ_S = (K_c r + 1)/(r + 1) exactly, with r the ratio of the server's two estimates",
        "eqs. 12–14, findings 1, 10",
        "1/Δ_S = (K_c r + 1)/(r + 1) = (K_c + 𝔅)/(1 + 𝔅), r = μ̂²/σ̂² = 1/𝔅; r → 0 gives 1, r → ∞ gives K_c",
        IDENTITY,
        {"symbolic": identity_symbolic, "exhaustive": identity_exhaustive},
        {
            "(K_c r + 1)/(r + K_c)": replace(IDENTITY, factor=lambda k, r: (k * r + 1) / (r + k)),
            "K_c r/(r + 1)": replace(IDENTITY, factor=lambda k, r: k * r / (r + 1)),
            "noise about the cohort's mean": replace(IDENTITY, noise=lambda a, b, k: a - b, signal=lambda a, b, k: b),
        },
        derivation=identity_steps,
    ),
    Claim(
        "estimators",
        "The estimators of signal and noise are unbiased; drawing from N clients takes a correction",
        "eqs. 13–14, finding 5",
        "K_c of N without replacement: E σ̂² = S² + v, E μ̂² = ‖μ_N‖² − S²/N, v the mean variance of a client's own "
        "noise; independent clients: E σ̂² = σ², E μ̂² = ‖μ‖²",
        SAMPLING,
        {"exhaustive": sampling_exhaustive, "monte carlo": independent_monte_carlo},
        {
            "σ̂² = A − B": replace(SAMPLING, noise=lambda a, b, k: a - b),
            "σ̂² = (A − B)(1 − 1/K_c)": replace(SAMPLING, noise=lambda a, b, k: (a - b) * (k - 1) / k),
            "μ̂² = B": replace(SAMPLING, signal=lambda a, b, k: b),
            "no correction for N": replace(SAMPLING, expected=lambda mu2, s2, own, size: (s2 + own, mu2)),
            "variance over N": replace(
                SAMPLING, expected=lambda mu2, s2, own, size: (s2 * (size - 1) / size + own, mu2 - s2 / size)
            ),
            "clients' own noise left out": replace(SAMPLING, expected=lambda mu2, s2, own, size: (s2, mu2 - s2 / size)),
            "clients' own noise corrected for N": replace(
                SAMPLING, expected=lambda mu2, s2, own, size: (s2 + own, mu2 - (s2 + own) / size)
            ),
        },
        ("μ is the population mean, not the cohort's",),
    ),
    Claim(
        "noise-scale",
        "With the population's noise scale the formula is a ratio of expectations, not the expected factor",
        "finding 10, and beyond the paper",
        "(K_c + 𝔅)/(1 + 𝔅) = K_c·E[B]/E[A], 𝔅 = σ²/‖μ‖²; it differs from E[1/Δ_S], see noise-scale-gap",
        NoiseScale(_ratio_of_means),
        {"exhaustive": scale_exhaustive},
        {
            "the expected factor": NoiseScale(_mean_of_ratios),
            "without K_c": NoiseScale(lambda moments, k: _ratio_of_means(moments, k) / k),
        },
        ("independent clients", "μ ≠ 0"),
    ),
    Claim(
        "noise-scale-gap",
        "The expected factor falls short of the noise scale's by the covariance of the factor with the updates' size",
        "beyond the paper",
        "E[1/Δ_S] = (K_c + 𝔅)/(1 + 𝔅) − Cov(1/Δ_S, A)/E[A]",
        lambda scale, covariance, size: scale - covariance / size,
        {"symbolic": gap_symbolic, "exhaustive": gap_exhaustive},
        {
            "no gap": lambda scale, covariance, size: scale,
            "with a plus": lambda scale, covariance, size: scale + covariance / size,
            "not divided by E[A]": lambda scale, covariance, size: scale - covariance,
        },
        ("E[A] ≠ 0",),
        gap_steps,
    ),
    Claim(
        "one-step-noise",
        "The minibatch noise of one local step follows from the per-sample gradient covariance, for any b",
        "beyond the paper",
        "Var(mean over b of n) = (tr C/b)(1 − b/n) with C the covariance (n − 1) of per-sample gradients; 0 at b = n",
        lambda covariance, b, n: covariance / b * (1 - Fraction(b, n) if isinstance(b, int) else 1 - b / n),
        {"symbolic": minibatch_symbolic, "exhaustive": minibatch_exhaustive},
        {
            "as if with replacement": lambda covariance, b, n: covariance / b,
            "1/b²": lambda covariance, b, n: (
                covariance / b**2 * (1 - Fraction(b, n) if isinstance(b, int) else 1 - b / n)
            ),
            "correction (n−b)/(n−1)": lambda covariance, b, n: covariance * (n - b) / (b * (n - 1)),
        },
        ("batches without replacement", "learning rate 1; the noise scales with its square"),
        derivation=minibatch_steps,
    ),
    Claim(
        "attribution",
        "The noise has three parts, each with an unbiased estimate: minibatch, finite shard, heterogeneity",
        "beyond the paper",
        "minibatch: ½ mean ‖Δ_k − Δ_k′‖² of two trainings on one shard; shard: σ̂² of pooled i.i.d. shards less "
        "their minibatch part; heterogeneity: the rest of σ̂²",
        Attribution(lambda repeats, pooled, own: (repeats[0], pooled - repeats[1], own - pooled)),
        {"exhaustive": attribution_exhaustive},
        {
            "shard part not cleared of minibatch noise": Attribution(
                lambda r, pooled, own: (r[0], pooled, own - pooled)
            ),
            "heterogeneity is all but minibatch noise": Attribution(
                lambda r, pooled, own: (r[0], pooled - r[1], own - r[0])
            ),
            "squared difference not halved": Attribution(
                lambda r, pooled, own: (2 * r[0], pooled - r[1], own - pooled)
            ),
        },
        ("shards i.i.d., of one size", "any local training: an update is any function of shard and batch order"),
        note="Heterogeneity is what changes when shards come from the pooled data instead of the client's own: the "
        "spread of the clients' means, and the difference of their within-client variances.",
    ),
)
