"""Other perturbations than masks: what is independent across clients is diluted, what they share is not."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from random import Random
from typing import Any

import sympy as sp

from theory.checking import for_all, identical
from theory.quadratics import Instance, Vector, draw_instance, mean
from theory.registry import Claim, Context, Outcome, Step

__all__ = ["CLAIMS"]


@dataclass(frozen=True)
class Perturbed:
    """Excess loss over the dense step when client k's update is perturbed by ξ_k.

    ``value`` takes the weights, E½ξ_kᵀHξ_k of the zero-mean parts, and the excess of the weighted mean shift alone.
    """

    value: Callable[[list[Fraction], list[Fraction], Fraction], Fraction]
    shifted: bool
    kind: str = "any"


def perturbed_exhaustive(formula: Perturbed, context: Context) -> Outcome:
    """ξ_k = shift_k + ζ_k, with ζ_k one of two or three values of mean zero, independent: all outcomes summed.

    Dropout drops each coordinate of an update with probability 1 − p and rescales; additive noise is ± a vector.
    """

    def draw(random: Random) -> tuple[Instance, list[list[tuple[Fraction, Vector]]], list[Vector]]:
        instance = draw_instance(random, clients=2)
        d = len(instance.owner)
        noises = []
        for update in instance.updates:
            if random.randint(0, 1) and d <= 3:  # update dropout
                outcomes = []
                for bits in itertools.product((0, 1), repeat=d):
                    chance = instance.p ** sum(bits) * (1 - instance.p) ** (d - sum(bits))
                    outcomes.append((chance, [(b / instance.p - 1) * x for b, x in zip(bits, update, strict=True)]))
            else:  # additive noise
                v = [Fraction(random.randint(-3, 3)) + Fraction(1, 2) for _ in range(d)]
                outcomes = [(Fraction(1, 4), [-3 * x for x in v]), (Fraction(3, 4), v)]
            noises.append(outcomes)
        shift = [[Fraction(random.randint(1, 3)) for _ in range(d)] for _ in instance.updates]
        if not formula.shifted:
            shift = [[Fraction(0)] * d for _ in instance.updates]
        return instance, noises, shift

    def holds(case: tuple[Instance, list[list[tuple[Fraction, Vector]]], list[Vector]]) -> bool:
        instance, noises, shifts = case

        def step(parts: list[Vector]) -> Vector:
            moved = [
                [x + s for x, s in zip(u, part, strict=True)] for u, part in zip(instance.updates, parts, strict=True)
            ]
            return mean(replace(instance, updates=moved))

        dense = instance.after(mean(instance))
        total = Fraction(0)
        for combination in itertools.product(*noises):
            chance = combination[0][0] * combination[1][0]
            parts = [
                [s + z for s, z in zip(shift, zeta, strict=True)]
                for shift, (_, zeta) in zip(shifts, combination, strict=True)
            ]
            total += chance * instance.after(step(parts))
        forms = [sum((c * instance.form(z, z) / 2 for c, z in outcomes), Fraction(0)) for outcomes in noises]
        return bool(total - dense == formula.value(instance.weights, forms, instance.after(step(shifts)) - dense))

    return for_all(draw, holds, context, "perturbed")


def perturbed_symbolic(formula: Perturbed, context: Context) -> Outcome:
    """Two clients, one coordinate: E over independent zero-mean ζ with variances v_k, a shift each."""
    a1, a2, v1, v2, h, g, s1, s2 = sp.symbols("a1 a2 v1 v2 h g s1 s2", real=True)
    if not formula.shifted:
        s1 = s2 = sp.Integer(0)
    shift = a1 * s1 + a2 * s2
    # l(x − ξ) − l(x) = −gξ + hξ²/2 with E ξ = shift and E ξ² = shift² + Σa²v.
    excess = -g * shift + h * (shift**2 + a1**2 * v1 + a2**2 * v2) / 2
    claimed = formula.value([a1, a2], [h * v1 / 2, h * v2 / 2], -g * shift + h * shift**2 / 2)
    return identical(excess - claimed, "identity in weights, variances and shifts")


def _diluted(a: list[Any], forms: list[Any], shift: Any) -> Any:
    return sum(x**2 * f for x, f in zip(a, forms, strict=True)) + shift


def perturbed_steps() -> list[Step]:
    """Second order in the perturbation of the mean."""
    a1, a2, v1, v2, h, g, s = sp.symbols("a1 a2 v1 v2 h g s", real=True)
    return [
        Step(
            "A shift s of the mean step plus zero-mean parts ζ_k: E ξ² for ξ = s + a1 ζ1 + a2 ζ2",
            s**2 + a1**2 * v1 + a2**2 * v2,
        ),
        Step("E of −gξ + hξ²/2, the excess", -g * s + h * (s**2 + a1**2 * v1 + a2**2 * v2) / 2),
        Step("The shift's own excess is whole; what is independent across clients carries a_k²"),
    ]


INDEPENDENT_NOISE = Perturbed(_diluted, shifted=False)
SHIFT = Perturbed(_diluted, shifted=True)
PERTURBED_LEVELS = {"symbolic": perturbed_symbolic, "exhaustive": perturbed_exhaustive}

CLAIMS = (
    Claim(
        "other-perturbations",
        "Every zero-mean perturbation independent across clients is diluted alike: dropout, additive noise",
        "other perturbations",
        "E l(θ − Σa_k(Δ_k + ξ_k)) − l(θ − Δ̄) = Σ a_k² E ½ξ_kᵀHξ_k",
        INDEPENDENT_NOISE,
        PERTURBED_LEVELS,
        {
            "weights not squared": replace(
                INDEPENDENT_NOISE, value=lambda a, f, s: sum(x * y for x, y in zip(a, f, strict=True)) + s
            ),
            "no dilution": replace(INDEPENDENT_NOISE, value=lambda a, f, s: sum(f) + s),
            "no second order": replace(INDEPENDENT_NOISE, value=lambda a, f, s: s),
        },
        ("E ξ_k = 0", "independent across clients"),
        derivation=perturbed_steps,
    ),
    Claim(
        "mean-shift",
        "A mean shift, as SAM's, passes averaging undiminished as far as it is common, and only that far",
        "other perturbations",
        "E ξ_k = s_k: the excess is that of the shift Σa_k s_k, whole, plus Σ a_k² E ½ζ_kᵀHζ_k, ζ_k = ξ_k − s_k",
        SHIFT,
        PERTURBED_LEVELS,
        {
            "the shift diluted too": replace(SHIFT, value=lambda a, f, s: _diluted(a, f, s * sum(x**2 for x in a))),
            "the shift ignored": replace(SHIFT, value=lambda a, f, s: _diluted(a, f, 0 * s)),
            "the noise undiluted": replace(SHIFT, value=lambda a, f, s: sum(f) + s),
        },
        note="SAM's shift is s_k = η[∇l_k(θ + r∇l_k/‖∇l_k‖) − ∇l_k(θ)]. Only Σa_k s_k reaches the server: what all "
        "clients' shifts have in common, whole; the rest as far as it does not cancel, and a part that is independent "
        "across clients with mean zero is diluted like any noise.",
        derivation=perturbed_steps,
    ),
)
