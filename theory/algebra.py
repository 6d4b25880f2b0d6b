"""A small algebra of mask moments, exact for symbolic p, weights, cohort and block structure.

A masked, averaged update is Σ_k a_k Σ_b (m_kb/p) Δ_k^(b). Its expected quadratic form needs only the second
moments E[m_kb m_lc]/p², and these take few values, by whether clients, their groups and blocks are the same.
So with

    D_kl,bc = Δ_k^(b)ᵀ H_bc Δ_l^(c)   and sums of a_k a_l D_kl,bc

    all      over k, l and b, c                       (the quadratic form of the dense mean)
    own      over k = l and all b, c
    shared   over all k, l and b = c
    both     over k = l and b = c
    grouped  over k, l of one group and b = c         (grouped_all: and all b, c)

every expectation is a linear form in them, whatever the numbers of clients, groups and blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import sympy as sp

__all__ = ["ALL", "BOTH", "GROUPED", "OWN", "SHARED", "Moments", "expectation", "excess", "p"]

p = sp.Symbol("p", positive=True)
ALL, OWN, SHARED, BOTH = sp.symbols("S_all S_own S_shared S_both", real=True)
GROUPED, _GROUPED_ALL = sp.symbols("S_grouped S_grouped_all", real=True)


def expectation(expression: sp.Expr, probabilities: Mapping[sp.Symbol, sp.Expr]) -> sp.Expr:
    """E of a polynomial in independent Bernoulli variables: powers drop (x² = x), products factor."""
    variables = list(probabilities)
    total = sp.Integer(0)
    for powers, coefficient in sp.Poly(sp.expand(expression), *variables).terms():
        total += coefficient * sp.prod([probabilities[v] for v, power in zip(variables, powers, strict=True) if power])
    return sp.simplify(total)


@dataclass(frozen=True)
class Moments:
    """E[m_kb m_lc]/p² by (same client?, same block?); for two clients of one group where that is a case of its own."""

    other_client_other_block: sp.Expr
    same_client_other_block: sp.Expr
    other_client_same_block: sp.Expr
    same_client_same_block: sp.Expr
    same_group_other_block: sp.Expr | None = None
    same_group_same_block: sp.Expr | None = None

    def quadratic_form(self) -> sp.Expr:
        """E of the masked mean's quadratic form: each case's moment times the sum over that case alone."""
        apart, together = self.other_client_other_block, self.other_client_same_block
        total = (
            apart * (ALL - OWN - SHARED + BOTH)
            + self.same_client_other_block * (OWN - BOTH)
            + together * (SHARED - BOTH)
            + self.same_client_same_block * BOTH
        )
        if self.same_group_other_block is not None and self.same_group_same_block is not None:
            total += (self.same_group_other_block - apart) * (_GROUPED_ALL - GROUPED - OWN + BOTH)
            total += (self.same_group_same_block - together) * (GROUPED - BOTH)
        return sp.expand(total)


def excess(moments: Moments) -> sp.Expr:
    """E l(θ − masked) − l(θ − dense) for a quadratic loss: half of what the quadratic form gains.

    The first-order term is linear in the masks, and E m/p = 1 makes it the dense one.
    """
    return sp.simplify((moments.quadratic_form() - ALL) / 2)
