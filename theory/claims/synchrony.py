"""Synchrony between independent and shared masks: correlated masks, groups of clients, and the dial that they are."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from random import Random
from typing import Any

import sympy as sp
import torch

from fedmask import Blocks, correlation_for_recovery, gram_matrices
from theory.algebra import BOTH, SHARED, excess, p
from theory.checking import for_all, identical
from theory.claims.masking import (
    CLIENTS,
    LEVELS_OF,
    Penalty,
    Setting,
    Sums,
    coefficient,
    exact_sums,
    steps,
    with_scheme,
    with_value,
)
from theory.quadratics import Instance, draw_instance, expected, masked_mean, mean
from theory.registry import Claim, Context, Outcome, Step
from theory.schemes import Scheme, exact_masks, moments, rho

__all__ = ["CLAIMS"]


def _as_correlated(rho_of: Callable[[Setting], Any]) -> Callable[[Setting, Sums], Any]:
    """The penalty of partial synchrony at a ρ that the setting gives."""

    def value(s: Setting, d: Sums) -> Any:
        correlation = rho_of(s._replace(clients=_exact(s.clients), group=_exact(s.group)))
        if isinstance(d.both, float):
            correlation = float(correlation)
        return coefficient(s.p) * ((1 - correlation) * d.both + correlation * d.shared)

    return value


def _exact(value: Any) -> Any:
    return Fraction(value) if isinstance(value, int) else value


# The dial: which ρ reaches a wanted penalty.

Dial = Callable[[Any, Any, Any], Any]  # wanted R/R_ind, R_shr/R_ind, K_c → ρ


def dial_symbolic(formula: Dial, context: Context) -> Outcome:
    """R_ρ from the moments of correlated masks, at the ρ that is claimed to give w·R_ind, is w·R_ind."""
    wanted = sp.Symbol("w", positive=True)
    found = excess(moments(PARTIAL.scheme)).subs(rho, formula(wanted, SHARED / BOTH, CLIENTS))
    return identical(found - wanted * coefficient(p) * BOTH, "identity in w, p, weights, H")


def dial_exhaustive(formula: Dial, context: Context) -> Outcome:
    """R_ρ over all masks, for ρ with a rational root; production's function then finds that ρ from Gram matrices."""

    def draw(random: Random) -> Instance:
        instance = draw_instance(random, clients=2)
        d = range(len(instance.owner))
        return replace(
            instance,  # H is the identity, so that Euclidean Gram matrices are the exact ones
            hessian=[[Fraction(i == j) for j in d] for i in d],
            updates=[[x + 7 for x in instance.updates[0]], instance.updates[1]],
        )

    def holds(instance: Instance) -> bool:
        scheme, sums = PARTIAL.scheme, exact_sums(instance)
        value = expected(exact_masks(scheme, instance), lambda mask: instance.after(masked_mean(instance, mask)))
        wanted = (value - instance.after(mean(instance))) / (coefficient(instance.p) * sums.both)
        full = sums.shared / sums.both
        if full == 1:  # then every ρ has the same penalty
            return wanted == 1
        weighted = [[a * x for x in u] for a, u in zip(instance.weights, instance.updates, strict=True)]
        gram = gram_matrices(
            torch.tensor([[float(x) for x in u] for u in weighted], dtype=torch.float64),
            Blocks.of({"w": torch.zeros(len(instance.owner))}),
        )
        produced = correlation_for_recovery(gram, float(wanted))
        return bool(
            formula(wanted, full, Fraction(instance.clients)) == scheme.rho
            and abs(produced - float(scheme.rho)) <= 1e-9 / abs(float(full) - 1)
        )

    return for_all(draw, holds, context, "dial", count=10)


def dial_steps() -> list[Step]:
    """One linear equation."""
    wanted = sp.Symbol("w", positive=True)
    value = (1 - rho) * BOTH + rho * SHARED
    return [
        Step("R_ρ up to the coefficient (1−p)/(2p), by partial-synchrony", value),
        Step("Set equal to w·R_ind it is linear in ρ; solved", sp.factor(sp.solve(value - wanted * BOTH, rho)[0])),
        Step("which is (w − 1)/(f − 1), f = R_shr/R_ind; it lies in [0, 1] just for w between 1 and f"),
    ]


def _root(value: Any) -> Any:
    if isinstance(value, Fraction):
        return Fraction(int(value.numerator**0.5 + 0.5), int(value.denominator**0.5 + 0.5))
    return sp.sqrt(value) if isinstance(value, sp.Basic) else value**0.5


PARTIAL = Penalty(Scheme("correlated"), lambda s, d: coefficient(s.p) * ((1 - s.rho) * d.both + s.rho * d.shared))
GROUPS = Penalty(Scheme("groups"), lambda s, d: coefficient(s.p) * d.grouped)
RANDOM_GROUPS = Penalty(Scheme("random groups"), _as_correlated(lambda s: (s.group - 1) / (s.clients - 1)))

CLAIMS = (
    Claim(
        "partial-synchrony",
        "Masks of correlation ρ between clients interpolate: synchrony is a dial",
        "beyond the paper",
        "R_ρ = (1−ρ) R_ind + ρ R_shr; so ρ = (R − R_ind)/(R_shr − R_ind) reaches any R between them",
        PARTIAL,
        LEVELS_OF,
        {
            "√ρ in place of ρ": with_value(
                PARTIAL, lambda s, d: coefficient(s.p) * ((1 - _root(s.rho)) * d.both + _root(s.rho) * d.shared)
            ),
            "ρ²": with_value(PARTIAL, lambda s, d: coefficient(s.p) * ((1 - s.rho**2) * d.both + s.rho**2 * d.shared)),
            "ρ the other way round": with_value(
                PARTIAL, lambda s, d: coefficient(s.p) * (s.rho * d.both + (1 - s.rho) * d.shared)
            ),
        },
        ("per client and block, the shared bit with probability √ρ, else an own one",),
        steps(PARTIAL),
    ),
    Claim(
        "dial",
        "Synchrony is a dial: which correlation reaches a wanted penalty follows from the Gram matrices",
        "beyond the paper",
        "R_ρ = w·R_ind at ρ = (w − 1)/(f − 1), f = R_shr/R_ind, for w between 1 and f",
        lambda wanted, full, clients: (wanted - 1) / (full - 1),
        {"symbolic": dial_symbolic, "exhaustive": dial_exhaustive},
        {
            "w/f": lambda wanted, full, clients: wanted / full,
            "(w − 1)/(K_c − 1)": lambda wanted, full, clients: (wanted - 1) / (clients - 1),
            "(w − 1)/f": lambda wanted, full, clients: (wanted - 1) / full,
        },
        ("f ≠ 1",),
        dial_steps,
    ),
    Claim(
        "groups",
        "Groups of clients with a mask each: every group's mean is charged, with the square of its weight",
        "beyond the paper",
        "R = Σ_g R(Σ_{k∈g} a_kΔ_k)",
        GROUPS,
        LEVELS_OF,
        {
            "as if independent": with_value(GROUPS, lambda s, d: coefficient(s.p) * d.both),
            "as if one mask for all": with_value(GROUPS, lambda s, d: coefficient(s.p) * d.shared),
            "coefficient (1−p)/p": with_value(GROUPS, lambda s, d: 2 * coefficient(s.p) * d.grouped),
            "masks of their own in a group": with_scheme(GROUPS, kind="independent"),
        },
        ("masks of different groups independent",),
        steps(GROUPS),
    ),
    Claim(
        "random-groups",
        "Random groups of g clients with a mask each are a correlation of (g − 1)/(K_c − 1) in expectation",
        "beyond the paper",
        "P(two clients share a mask) = (g − 1)/(K_c − 1), so E R = R_ρ with that ρ",
        RANDOM_GROUPS,
        LEVELS_OF,
        {
            "g/K_c": with_value(RANDOM_GROUPS, _as_correlated(lambda s: s.group / s.clients)),
            "(g − 1)/K_c": with_value(RANDOM_GROUPS, _as_correlated(lambda s: (s.group - 1) / s.clients)),
            "one mask for all": with_value(RANDOM_GROUPS, lambda s, d: coefficient(s.p) * d.shared),
            "the groups of one round": with_value(RANDOM_GROUPS, lambda s, d: coefficient(s.p) * d.grouped),
        },
        ("g divides K_c", "groups drawn anew, uniformly"),
        steps(RANDOM_GROUPS),
    ),
)
