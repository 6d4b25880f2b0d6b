"""How curvature and excess loss are measured without bias: random block signs, and complementary masks."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from random import Random
from typing import Any

import sympy as sp

from theory.checking import for_all, identical
from theory.quadratics import Instance, Vector, all_masks, dot, draw_instance, masked_mean, mean
from theory.registry import Claim, Context, Outcome, Step

__all__ = ["CLAIMS"]

# signs s, block b → (signs that u_k is multiplied with, block by block; the sign at reading block b)
Signing = Callable[[Sequence[int], int], tuple[Sequence[int], int]]


def signs_exhaustive(formula: Signing, context: Context) -> Outcome:
    """The mean over all 2^B sign vectors against u_k^(b)ᵀ H_bb u_l^(b), in rationals."""

    def holds(instance: Instance) -> bool:
        u, v = instance.updates
        for b in range(instance.blocks):
            total = Fraction(0)
            for signs in itertools.product((-1, 1), repeat=instance.blocks):
                factors, reading = formula(signs, b)
                signed = [factors[owner] * x for x, owner in zip(u, instance.owner, strict=True)]
                total += reading * instance.form(instance.block(v, b), signed)
            if total / 2**instance.blocks != instance.form(instance.block(u, b), instance.block(v, b)):
                return False
        return True

    return for_all(lambda random: draw_instance(random, clients=2, least_blocks=2), holds, context, "signs", count=60)


def signs_symbolic(formula: Signing, context: Context) -> Outcome:
    """The same with a symbol for every u_k^(c)ᵀ H_bc u_l^(b); B = 2 … 4."""
    differences = []
    for blocks in range(2, 5):
        form = sp.Matrix(blocks, blocks, lambda b, c: sp.Symbol(f"h{b}{c}"))
        for b in range(blocks):
            found = 0
            for signs in itertools.product((-1, 1), repeat=blocks):
                factors, reading = formula(signs, b)
                found += reading * sum(factors[c] * form[b, c] for c in range(blocks))
            differences.append(found / sp.Integer(2**blocks) - form[b, b])
    return identical(differences, "every sign vector, B = 2 … 4")


def signs_steps() -> list[Step]:
    """Two blocks, written out."""
    s, h = sp.symbols("s1:3"), sp.symbols("h11 h12")
    product = sp.expand(s[0] * (s[0] * h[0] + s[1] * h[1]))
    return [
        Step("With h_bc = u_l^(b)ᵀ H_bc u_k^(c), the reading of block 1 of two", product),
        Step("s_1² = 1, and E s_1 s_2 = 0 for independent signs", product.subs({s[0] * s[1]: 0, s[0] ** 2: 1})),
    ]


Complement = Callable[[Any, Any], Any]  # the mean's and the masked mean's coordinate → the complement's


def complement_exhaustive(formula: Complement, context: Context) -> Outcome:
    """½(l(θ−Δ̃) + l(θ−Δ̃′)) over all masks, independent and shared, against E l(θ−Δ̃), p = ½; with no linear term."""

    def holds(instance: Instance) -> bool:
        dense = mean(instance)
        for shared in (False, True):
            single = paired = Fraction(0)
            for probability, mask in all_masks(instance, shared):
                step = masked_mean(instance, mask)
                other: Vector = [formula(d, m) for d, m in zip(dense, step, strict=True)]
                flat = replace(instance, hessian=[[Fraction(0)] * len(dense) for _ in dense])
                if dot(instance.gradient, step) + dot(instance.gradient, other) != 2 * dot(instance.gradient, dense):
                    return False
                if flat.after(step) + flat.after(other) != 2 * flat.after(dense):
                    return False
                single += probability * instance.after(step)
                paired += probability * (instance.after(step) + instance.after(other)) / 2
            if single != paired:
                return False
        return True

    def draw(random: Random) -> Instance:
        return replace(draw_instance(random, clients=2), p=Fraction(1, 2))

    return for_all(draw, holds, context, "complement", count=40)


def complement_symbolic(formula: Complement, context: Context) -> Outcome:
    """For a polynomial loss of degree five in one coordinate the pair's excess has no odd power of the deviation."""
    dense, deviation = sp.symbols("d e", real=True)
    terms = sp.symbols("c0:6", real=True)

    def loss(x: Any) -> Any:
        return sum(c * x**i for i, c in enumerate(terms))

    # l at θ − Δ̄ is expanded about the dense point, so deviations are all that it sees.
    other = formula(dense, dense + deviation) - dense
    pair = sp.Poly(sp.expand((loss(deviation) + loss(other)) / 2 - loss(0)), deviation)
    odd = [pair.coeff_monomial(deviation**i) for i in (1, 3, 5)]
    even = [pair.coeff_monomial(deviation**i) - terms[i] for i in (2, 4)]
    return identical([*odd, *even], "polynomials of degree five")


def complement_steps() -> list[Step]:
    """Why the complement mirrors the deviation, and what is left of a Taylor expansion."""
    e, m = sp.symbols("e m", real=True)
    terms = sp.symbols("c0:4", real=True)
    taylor = sum(c * e**i for i, c in enumerate(terms))
    return [
        Step("At p = ½ a bit m deviates by (m/p − 1)Δ, its complement by the opposite", sp.expand(2 * m - 1)),
        Step("So the two deviations e and −e have one distribution, and each the excess's expectation"),
        Step("Their mean loss, with c_i the terms of order i", sp.expand((taylor + taylor.subs(e, -e)) / 2)),
    ]


CLAIMS = (
    Claim(
        "block-signs",
        "Random block signs give every block's curvature form without bias, from one product a vector",
        "beyond the paper",
        "E s_b u_l^(b)ᵀ (H Σ_c s_c u_k^(c))^(b) = u_l^(b)ᵀ H_bb u_k^(b) for independent signs s_b = ±1",
        lambda signs, b: (signs, signs[b]),
        {"symbolic": signs_symbolic, "exhaustive": signs_exhaustive},
        {
            "no sign where the block is read": lambda signs, b: (signs, 1),
            "one sign for the whole vector": lambda signs, b: ([signs[0]] * len(signs), signs[0]),
            "another block's sign": lambda signs, b: (signs, signs[(b + 1) % len(signs)]),
        },
        ("H symmetric; definite or not",),
        derivation=signs_steps,
    ),
    Claim(
        "complementary-masks",
        "At p = ½ a mask and its complement give the excess loss without its odd terms, and without bias",
        "beyond the paper",
        "½(l(θ−Δ̃) + l(θ−Δ̃′)) with Δ̃′ = 2Δ̄ − Δ̃ has the expectation of l(θ−Δ̃) and no first or third order term",
        lambda dense, masked: 2 * dense - masked,
        {"symbolic": complement_symbolic, "exhaustive": complement_exhaustive},
        {
            "the complement is not rescaled": lambda dense, masked: dense - masked,
            "the same mask twice": lambda dense, masked: masked,
            "the dense mean": lambda dense, masked: dense,
        },
        ("p = ½; independent or shared masks",),
        derivation=complement_steps,
    ),
)
