"""Corollary 1 in the form that holds, the bounds of the recovery factor, and FedExP's step."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from random import Random
from typing import Any

import sympy as sp
import torch

from fedmask import Blocks, fedexp_step, gram_matrices, recovery_factor, signal
from theory.algebra import BOTH, SHARED, excess
from theory.checking import for_all, identical
from theory.quadratics import Instance, Vector, dot, draw_instance, expected, masked_mean, mean
from theory.registry import Claim, Context, Outcome, Step
from theory.schemes import Scheme, exact_masks, moments

__all__ = ["CLAIMS"]

Updates = list[Vector]


def draw_updates(random: Random, *, least: int = 2) -> Updates:
    """Two to four updates of one to three coordinates, not all zero; sometimes all equal, sometimes opposite."""
    k, d = random.randint(least, 4), random.randint(1, 3)
    updates = [[Fraction(random.randint(-4, 4), random.choice((1, 2))) for _ in range(d)] for _ in range(k)]
    updates[0][0] += 5
    kind = random.randint(0, 4)
    if kind == 0:
        return [updates[0]] * k
    if kind == 1:
        return [updates[0], [-x for x in updates[0]], *updates[2:]]
    return updates


def total_norm(updates: Updates) -> Fraction:
    """Σ‖Δ_k‖²."""
    return sum((dot(u, u) for u in updates), Fraction(0))


def norm_of_total(updates: Updates) -> Fraction:
    """‖ΣΔ_k‖²."""
    total = [sum(column, Fraction(0)) for column in zip(*updates, strict=True)]
    return dot(total, total)


def factor(updates: Updates) -> Fraction:
    """1/Δ_S."""
    return norm_of_total(updates) / total_norm(updates)


def as_gram(updates: Updates, counts: list[int] | None = None) -> Any:
    """The production Gram matrices of rational updates."""
    tensor = torch.tensor([[float(x) for x in u] for u in updates], dtype=torch.float64)
    return gram_matrices(tensor, Blocks.of({"w": torch.zeros(tensor.shape[1])}), counts=counts)


# Corollary 1: the ratio of the two penalties.


@dataclass(frozen=True)
class Ratio:
    """R_shr / R_ind as a function of curvatures c_b (H_bb = c_b I) and per-block ‖ΣΔ‖² and Σ‖Δ‖²."""

    value: Callable[[list[Any], list[Any], list[Any], int], Any]
    common: bool  # one curvature for all blocks
    hessian_weighted: bool = False


def ratio_exhaustive(formula: Ratio, context: Context) -> Outcome:
    """The ratio of the two expectations over all masks, each enumerated, with H_bb = c_b I or any positive H."""

    def draw(random: Random) -> Instance:
        instance = draw_instance(random, definite=True, uniform=True, clients=random.randint(2, 3))
        updates = [[x + 7 for x in instance.updates[0]], *instance.updates[1:]]  # so that R_ind > 0
        if formula.hessian_weighted:
            return replace(instance, updates=updates)
        curvature = [Fraction(random.randint(1, 5)) for _ in range(instance.blocks)]
        if formula.common:
            curvature = [curvature[0]] * instance.blocks
        d = len(instance.owner)
        hessian = [[curvature[instance.owner[i]] if i == j else Fraction(0) for j in range(d)] for i in range(d)]
        return replace(instance, hessian=hessian, updates=updates)

    def holds(instance: Instance) -> bool:
        dense = instance.after(mean(instance))
        shared, independent = (
            expected(exact_masks(Scheme(kind), instance), lambda m: instance.after(masked_mean(instance, m))) - dense
            for kind in ("shared", "independent")
        )
        return bool(shared / independent == formula.value(*_ratio_arguments(instance, formula), instance.clients))

    return for_all(draw, holds, context, "ratio")


def _ratio_arguments(instance: Instance, formula: Ratio) -> tuple[list[Any], list[Any], list[Any]]:
    total = [sum(column, Fraction(0)) for column in zip(*instance.updates, strict=True)]
    if formula.hessian_weighted:
        own = sum((instance.block_form(u, u) for u in instance.updates), Fraction(0))
        return [Fraction(1)], [instance.block_form(total, total)], [own]
    blocks = range(instance.blocks)
    curvature = [instance.hessian[instance.owner.index(b)][instance.owner.index(b)] for b in blocks]
    tops = [dot(instance.block(total, b), instance.block(total, b)) for b in blocks]
    bottoms = [total_norm([instance.block(u, b) for u in instance.updates]) for b in blocks]
    return curvature, tops, bottoms


def ratio_symbolic(formula: Ratio, context: Context) -> Outcome:
    """The two penalties from the moments of their masks; their sums for K_c = 3, and two blocks of symbols."""
    clients = 3
    if formula.hessian_weighted:
        c, top, bottom = [sp.Integer(1)], [sp.Symbol("N", positive=True)], [sp.Symbol("D", positive=True)]
    else:
        c = [sp.Symbol("c", positive=True)] * 2 if formula.common else list(sp.symbols("c1 c2", positive=True))
        parts = [[sp.Symbol(f"u{k}{b}") for k in range(clients)] for b in range(2)]
        top, bottom = [sum(row) ** 2 for row in parts], [sum(x**2 for x in row) for row in parts]
    sums = {
        SHARED: sum(cb * t for cb, t in zip(c, top, strict=True)) / clients**2,
        BOTH: sum(cb * t for cb, t in zip(c, bottom, strict=True)) / clients**2,
    }
    shared, independent = (excess(moments(Scheme(kind))).subs(sums) for kind in ("shared", "independent"))
    return identical(shared / independent - formula.value(c, top, bottom, clients), "identity, K_c = 3, B = 2")


def _weighted_mean(c: list[Any], top: list[Any], bottom: list[Any], k: int) -> Any:
    return sum(x * t for x, t in zip(c, top, strict=True)) / sum(x * t for x, t in zip(c, bottom, strict=True))


def _euclidean(c: list[Any], top: list[Any], bottom: list[Any], k: int) -> Any:
    return sum(top) / sum(bottom)


def _mean_of_factors(c: list[Any], top: list[Any], bottom: list[Any], k: int) -> Any:
    factors = [t / b if b else 0 for t, b in zip(top, bottom, strict=True)]
    return sum(factors) / len(factors)


# Bounds.


@dataclass(frozen=True)
class Bound:
    """The largest value of the recovery factor, and its value for equal updates, from weights a_k."""

    largest: Callable[[list[Fraction]], Any]
    for_equal: Callable[[list[Fraction]], Any]
    weighted: bool


def bound_exhaustive(formula: Bound, context: Context) -> Outcome:
    """No instance exceeds it; equal a_kΔ_k reach it; equal Δ_k have the claimed value, production code included."""

    def draw(random: Random) -> tuple[Updates, list[int]]:
        updates = draw_updates(random)
        counts = [random.randint(1, 4) if formula.weighted else 1 for _ in updates]
        if random.randint(0, 2) == 0:  # the extremal case: equal a_k Δ_k
            updates = [[x / n for x in updates[0]] for n in counts]
        return updates, counts

    def holds(case: tuple[Updates, list[int]]) -> bool:
        updates, counts = case
        a = [Fraction(n, sum(counts)) for n in counts]
        scaled = [[w * x for x in u] for w, u in zip(a, updates, strict=True)]
        value, most = factor(scaled), formula.largest(a)
        produced = recovery_factor(as_gram(updates, counts), weighted=formula.weighted).value
        equal_scaled = all(u == scaled[0] for u in scaled)
        equal = all(u == updates[0] for u in updates)
        return bool(
            value <= most
            and (value == most) == equal_scaled
            and (not equal or value == formula.for_equal(a))
            and produced is not None
            and abs(produced - float(value)) < 1e-9
        )

    return for_all(draw, holds, context, "bound", count=60)


def bound_symbolic(formula: Bound, context: Context) -> Outcome:
    """bound·Σ‖v_k‖² − ‖Σv_k‖² = Σ_{k<l} ‖v_k − v_l‖² ≥ 0 for v_k = a_kΔ_k, zero just for equal v_k; K_c = 2 … 5."""
    differences = []
    for k in range(2, 6):
        v = sp.symbols(f"v0:{k}", real=True)
        most = formula.largest([Fraction(1, k)] * k)
        pairs = sum((v[i] - v[j]) ** 2 for i in range(k) for j in range(i))
        differences.append(sp.nsimplify(most) * sum(x**2 for x in v) - sum(v) ** 2 - pairs)
    return identical(differences, "sum of squares, K_c = 2 … 5")


def _inverse_of_squares(a: list[Fraction]) -> Fraction:
    return 1 / sum((x**2 for x in a), Fraction(0))


# Below one.


def below_exhaustive(formula: Callable[[Updates], bool], context: Context) -> Outcome:
    """Whether a round is below one, on exact instances, and whether production's signal estimate is negative."""

    def holds(updates: Updates) -> bool:
        below = factor(updates) < 1
        mu = signal(as_gram(updates)).value
        return formula(updates) == below and (mu is not None) and (abs(mu) < 1e-12 or (mu < 0) == below)

    return for_all(draw_updates, holds, context, "below", count=80)


def below_symbolic(formula: Callable[[Updates], bool], context: Context) -> Outcome:
    """‖ΣΔ‖² − Σ‖Δ‖² is the formula's decision quantity: tested where it is within one of changing sign."""
    x = sp.Symbol("x", real=True)
    u = sp.symbols("u0:3", real=True)
    gap = sp.expand(sum(u) ** 2 - sum(v**2 for v in u))
    cross = sp.expand(2 * (u[0] * u[1] + u[0] * u[2] + u[1] * u[2]))
    if sp.simplify(gap - cross) != 0:
        return Outcome(False, "the expansion is wrong")
    # Along (2, 2, x) the cross terms 4 + 4x change sign at x = −1: the decision must change there and nowhere else.
    root = sp.solve(cross.subs({u[0]: 2, u[1]: 2, u[2]: x}), x)
    cases = [Fraction(n, 8) for n in range(-24, 25)]
    wrong = [c for c in cases if formula([[Fraction(2)], [Fraction(2)], [c]]) != (c < Fraction(int(root[0])))]
    return Outcome(not wrong, "sign change where the cross terms vanish" if not wrong else f"wrong at x = {wrong[0]}")


def _cross(updates: Updates) -> Fraction:
    return sum((dot(updates[i], updates[j]) for i in range(len(updates)) for j in range(i)), Fraction(0))


# FedExP.


@dataclass(frozen=True)
class FedExpStep:
    """FedExP's step before the max, as a function of K_c and Δ_S."""

    value: Callable[[Any, Any], Any]


def fedexp_symbolic(formula: FedExpStep, context: Context) -> Outcome:
    """Σ‖Δ‖²/(2K_c‖Δ̄‖²) with ‖Δ̄‖² = ‖ΣΔ‖²/K_c²."""
    k, sums, square = sp.symbols("K_c A_sum S", positive=True)
    return identical(sums / (2 * k * square / k**2) - formula.value(k, sums / square), "identity in K_c and the sums")


def fedexp_exhaustive(formula: FedExpStep, context: Context) -> Outcome:
    """Production's step is the larger of one and the claimed value."""

    def holds(updates: Updates) -> bool:
        produced = fedexp_step(as_gram(updates)).value
        if norm_of_total(updates) == 0:
            return produced is None
        claimed = max(1.0, float(formula.value(len(updates), 1 / factor(updates))))
        return produced is not None and abs(produced - claimed) <= 1e-9 * claimed

    return for_all(draw_updates, holds, context, "fedexp", count=60)


def ratio_steps() -> list[Step]:
    """From Propositions 2 and 3."""
    k, n, d = sp.symbols("K_c N D", positive=True)
    shared, independent = (
        excess(moments(Scheme(kind))).subs({SHARED: n / k**2, BOTH: d / k**2}) for kind in ("shared", "independent")
    )
    return [
        Step(
            "Proposition 3 for equal weights: the mean is the sum over K_c; N = Σ_b ‖ΣΔ_k^(b)‖²_H",
            shared,
        ),
        Step("Proposition 2 for equal weights; D = Σ_k Σ_b ‖Δ_k^(b)‖²_H", independent),
        Step("The coefficient and K_c² cancel in the ratio", sp.simplify(shared / independent)),
        Step("With H_bb = c_b I a block's norms are c_b times the Euclidean ones; one common c cancels too: 1/Δ_S"),
    ]


def bound_steps() -> list[Step]:
    """A sum of squares."""
    v = sp.symbols("v1:4", real=True)
    gap = 3 * sum(x**2 for x in v) - sum(v) ** 2
    return [
        Step("Write v_k = a_kΔ_k; K_cΣ‖v_k‖² − ‖Σv_k‖², shown for K_c = 3 and one coordinate", sp.expand(gap)),
        Step("It is the sum over pairs of ‖v_k − v_l‖²", sum((v[i] - v[j]) ** 2 for i in range(3) for j in range(i))),
        Step("Their difference", sp.expand(gap - sum((v[i] - v[j]) ** 2 for i in range(3) for j in range(i)))),
        Step("So the factor is at most K_c, with equality just where all v_k are equal"),
    ]


def below_steps() -> list[Step]:
    """The cross products decide."""
    u = sp.symbols("u1:4", real=True)
    return [
        Step(
            "1/Δ_S < 1 says ‖ΣΔ_k‖² < Σ‖Δ_k‖²; their difference, for K_c = 3",
            sp.expand(sum(u) ** 2 - sum(x**2 for x in u)),
        ),
        Step("That is twice the sum of cross products; and μ̂² is it over K_c(K_c − 1), so has its sign"),
    ]


def fedexp_steps() -> list[Step]:
    """‖Δ̄‖² = ‖ΣΔ_k‖²/K_c²."""
    k, total, square = sp.symbols("K_c D N", positive=True)
    return [
        Step("FedExP's ratio, with D = Σ‖Δ_k‖² and ‖Δ̄‖² = N/K_c²", total / (2 * k * (square / k**2))),
        Step("As Δ_S = D/N, this is (K_c/2)·Δ_S", sp.simplify(total / (2 * k * (square / k**2)))),
    ]


HESSIAN = Ratio(_weighted_mean, common=False, hessian_weighted=True)
PER_BLOCK = Ratio(_weighted_mean, common=False)
EUCLIDEAN = Ratio(_euclidean, common=True)
COHORT = Bound(len, len, weighted=False)
WEIGHTED = Bound(len, _inverse_of_squares, weighted=True)
RATIO_LEVELS = {"symbolic": ratio_symbolic, "exhaustive": ratio_exhaustive}

CLAIMS = (
    Claim(
        "recovery-exact",
        "A shared mask recovers the inverse diversity in the H-weighted norm",
        "eq. 8 (Corollary 1), finding 4",
        "R_shr/R_ind = Σ_b (ΣΔ_k^(b))ᵀH_bb(ΣΔ_k^(b)) / Σ_k Σ_b Δ_k^(b)ᵀH_bbΔ_k^(b)",
        HESSIAN,
        RATIO_LEVELS,
        {
            "its inverse": replace(HESSIAN, value=lambda c, t, b, k: sum(b) / sum(t) if sum(t) else 0),
            "K_c": replace(HESSIAN, value=lambda c, t, b, k: k),
            "divided by K_c": replace(HESSIAN, value=lambda c, t, b, k: sum(t) / sum(b) / k),
        },
        ("R_ind ≠ 0",),
        note="For an indefinite H the penalties can be negative and the ratio is not bounded by K_c.",
        derivation=ratio_steps,
    ),
    Claim(
        "recovery-per-block",
        "H_bb = c_b I is not enough for 1/Δ_S: the ratio is a curvature-weighted mean of the blocks' factors",
        "eq. 8, finding 3",
        "R_shr/R_ind = Σ_b c_b‖ΣΔ_k^(b)‖² / Σ_b c_b Σ_k‖Δ_k^(b)‖²",
        PER_BLOCK,
        RATIO_LEVELS,
        {
            "1/Δ_S whatever the c_b": replace(PER_BLOCK, value=_euclidean),
            "plain mean of the blocks' factors": replace(PER_BLOCK, value=_mean_of_factors),
        },
        ("H_bb = c_b I",),
        derivation=ratio_steps,
    ),
    Claim(
        "recovery-euclidean",
        "With one curvature common to all blocks the ratio is 1/Δ_S",
        "eqs. 3, 8 (Corollary 1)",
        "R_shr/R_ind = ‖ΣΔ_k‖²/Σ‖Δ_k‖² = 1/Δ_S if H_bb = c I for all b",
        EUCLIDEAN,
        RATIO_LEVELS,
        {
            "Δ_S": replace(EUCLIDEAN, value=lambda c, t, b, k: sum(b) / sum(t) if sum(t) else 0),
            "K_c/Δ_S": replace(EUCLIDEAN, value=lambda c, t, b, k: k * sum(t) / sum(b)),
            "mean of the blocks' factors": replace(EUCLIDEAN, value=_mean_of_factors),
        },
        ("H_bb = c I with the same c for all blocks", "equal weights"),
        derivation=ratio_steps,
    ),
    Claim(
        "bound",
        "The recovery factor is at most K_c, with equality just for equal updates",
        "bounds",
        "1/Δ_S ≤ K_c; K_cΣ‖Δ_k‖² − ‖ΣΔ_k‖² = Σ_{k<l}‖Δ_k − Δ_l‖²",
        COHORT,
        {"symbolic": bound_symbolic, "exhaustive": bound_exhaustive},
        {
            "K_c − 1": replace(COHORT, largest=lambda a: len(a) - 1),
            "K_c + 1": replace(COHORT, largest=lambda a: len(a) + 1),
            "K_c²": replace(COHORT, largest=lambda a: len(a) ** 2),
        },
        derivation=bound_steps,
    ),
    Claim(
        "bound-weighted",
        "Weighted, the factor is at most K_c too, and 1/Σa_k² for equal updates",
        "finding 2, and beyond the paper",
        "‖Σa_kΔ_k‖²/Σa_k²‖Δ_k‖² ≤ K_c, with equality just for equal a_kΔ_k; for equal Δ_k it is 1/Σa_k²",
        WEIGHTED,
        {"exhaustive": bound_exhaustive},
        {
            "bounded by 1/Σa_k²": replace(WEIGHTED, largest=_inverse_of_squares),
            "K_c for equal updates": replace(WEIGHTED, for_equal=len),
        },
        note="The effective cohort size is no bound: weights 1 : 2 and updates 2, 1 give 2, and 1/Σa_k² is 1.8.",
        derivation=bound_steps,
    ),
    Claim(
        "below-one",
        "A round is below one exactly when the updates' cross products sum to less than zero, that is when μ̂² < 0",
        "bounds, finding 6",
        "1/Δ_S < 1 ⇔ Σ_{i<j}⟨Δ_i, Δ_j⟩ < 0 ⇔ μ̂² < 0",
        lambda updates: _cross(updates) < 0,
        {"symbolic": below_symbolic, "exhaustive": below_exhaustive},
        {
            "some pair is negative": lambda updates: any(
                dot(updates[i], updates[j]) < 0 for i in range(len(updates)) for j in range(i)
            ),
            "norms counted too": lambda updates: _cross(updates) + total_norm(updates) < 0,
            "at most zero": lambda updates: _cross(updates) <= 0,
        },
        derivation=below_steps,
    ),
    Claim(
        "fedexp",
        "FedExP's server step is (K_c/2)·Δ_S",
        "FedExP, finding 7",
        "Σ‖Δ_k‖²/(2K_c‖Δ̄‖²) = (K_c/2)·Δ_S",
        FedExpStep(lambda k, diversity: k * diversity / 2),
        {"symbolic": fedexp_symbolic, "exhaustive": fedexp_exhaustive},
        {
            "K_c·Δ_S": FedExpStep(lambda k, diversity: k * diversity),
            "Δ_S/2": FedExpStep(lambda k, diversity: diversity / 2),
            "K_c/(2Δ_S)": FedExpStep(lambda k, diversity: k / (2 * diversity)),
        },
        ("ε = 0", "equal weights", "before the max with 1"),
        derivation=fedexp_steps,
    ),
)
