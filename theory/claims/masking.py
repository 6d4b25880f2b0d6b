"""Propositions 1 to 3 and their extensions: what masking adds to the expected loss of a quadratic.

One formula type serves them all: a scheme of masks, and the penalty as a function of p and the four sums of
:mod:`theory.algebra`. On a quadratic the second-order statements are exact.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from random import Random
from typing import Any, NamedTuple

import sympy as sp
import torch

from fedmask import Blocks, correlation_for_recovery, gram_matrices
from theory.algebra import ALL, BOTH, GROUPED, OWN, SHARED, excess, p
from theory.checking import for_all, identical, sampled_outcome
from theory.quadratics import Instance, draw_instance, expected, masked_mean, mean
from theory.registry import Claim, Context, Outcome, Step
from theory.schemes import (
    Scheme,
    exact_masks,
    group_of,
    largest_excess,
    moments,
    problem,
    production_excess,
    rho,
    symbolic_blocks,
)
from theory.sequences import sampled_mean_equals

__all__ = ["CLAIMS"]


class Sums(NamedTuple):
    """The sums of :mod:`theory.algebra`, as symbols, rationals or floats."""

    all: Any
    own: Any
    shared: Any
    both: Any
    grouped: Any


class Setting(NamedTuple):
    """What else a penalty may depend on."""

    p: Any
    rho: Any
    blocks: Any
    clients: Any
    group: Any = 2  # clients of a group


@dataclass(frozen=True)
class Penalty:
    """E l(θ − masked mean) − l(θ − mean) under a scheme, as a function of the setting and the sums."""

    scheme: Scheme
    value: Callable[[Setting, Sums], Any]
    one_client: bool = False

    @property
    def sampled_clients(self) -> int:
        """K_c of the sampled level."""
        return 1 if self.one_client else 4 if self.scheme.kind == "random groups" else 3


SYMBOLS = Sums(ALL, OWN, SHARED, BOTH, GROUPED)
CLIENTS, GROUP = sp.symbols("K_c g", positive=True)


def symbolic(formula: Penalty, context: Context) -> Outcome:
    """The penalty from the moments of the scheme, for any p, weights, K_c and block structure."""
    found = excess(moments(formula.scheme))
    claimed = formula.value(Setting(p, rho, symbolic_blocks, CLIENTS, GROUP), SYMBOLS)
    alone = {OWN: ALL, BOTH: SHARED} if formula.one_client else {}
    return identical(sp.sympify(found - claimed).subs(alone), "identity in p, K_c, B, weights, H")


def exhaustive(formula: Penalty, context: Context) -> Outcome:
    """The expectation over every mask of the cohort, in rationals, on definite and indefinite Hessians."""

    def draw(random: Random) -> Instance:
        fixed, clients = formula.scheme.kind == "fixed", 1 if formula.one_client else None
        match formula.scheme.kind:
            case "correlated":  # the shared bits come on top of every client's own
                clients = 2
            case "groups":
                clients = random.randint(2, 4)
            case "random groups":
                clients = random.choice((2, 4))
        definite = random.choice((True, None))
        instance = draw_instance(random, clients=clients, definite=definite, least_blocks=2 if fixed else 1)
        if fixed:
            return replace(instance, p=Fraction(random.randint(1, instance.blocks), instance.blocks))
        return instance

    def holds(instance: Instance) -> bool:
        scale = None if formula.scheme.rescaled else Fraction(1)
        value = expected(
            exact_masks(formula.scheme, instance), lambda mask: instance.after(masked_mean(instance, mask, scale))
        )
        setting = Setting(instance.p, formula.scheme.rho, instance.blocks, instance.clients)
        return bool(value - instance.after(mean(instance)) == formula.value(setting, exact_sums(instance)))

    return for_all(draw, holds, context, "masking")


def monte_carlo(formula: Penalty, context: Context) -> Outcome:
    """The production masks and masked mean, on 2,000 dimensions with the exact Hessian."""
    seed = context.numpy("masking").integers(2**62)
    clients, keep = formula.sampled_clients, 0.4
    case = problem(clients, int(seed) % 2**31)
    setting = Setting(keep, float(formula.scheme.rho), case.blocks.count, clients)
    claimed = float(formula.value(setting, Sums(**case.sums())))
    done = 0

    def draw(count: int) -> Any:
        nonlocal done
        values = production_excess(formula.scheme, case, keep, int(seed), done, count)
        done += count
        return values

    bound = largest_excess(formula.scheme, case, keep)
    sampled = sampled_mean_equals(
        draw, claimed, bounds=(0.0, bound), tolerance=0.15 * abs(claimed), alpha=context.alpha, most=12_000
    )
    return sampled_outcome(sampled, claimed)


def exact_sums(instance: Instance) -> Sums:
    """The sums of a rational instance."""
    weighted = [[a * x for x in u] for a, u in zip(instance.weights, instance.updates, strict=True)]
    total = mean(instance)
    groups = [
        [sum(column, Fraction(0)) for column in zip(*members, strict=True)]
        for _, grouped in itertools.groupby(range(instance.clients), group_of)
        if (members := [weighted[k] for k in grouped])
    ]
    return Sums(
        instance.form(total, total),
        sum((instance.form(v, v) for v in weighted), Fraction(0)),
        instance.block_form(total, total),
        sum((instance.block_form(v, v) for v in weighted), Fraction(0)),
        sum((instance.block_form(v, v) for v in groups), Fraction(0)),
    )


def _with(formula: Penalty, value: Callable[[Setting, Sums], Any]) -> Penalty:
    return replace(formula, value=value)


def _by(formula: Penalty, **scheme: Any) -> Penalty:
    return replace(formula, scheme=replace(formula.scheme, **scheme))


def _steps(formula: Penalty) -> Callable[[], list[Step]]:
    def steps() -> list[Step]:
        scheme = formula.scheme
        found = moments(scheme)
        cases = ("k ≠ l, b ≠ c", "k = l, b ≠ c", "k ≠ l, b = c", "k = l, b = c")
        values = (
            found.other_client_other_block,
            found.same_client_other_block,
            found.other_client_same_block,
            found.same_client_same_block,
        )
        lines = [Step(f"Second moment E[m_kb m_lc]/p² for {case}", v) for case, v in zip(cases, values, strict=True)]
        if found.same_group_same_block is not None:
            lines.append(Step("and for k ≠ l of one group, b = c", found.same_group_same_block))
        lines.append(Step("Each moment times its sum: E of the masked mean's quadratic form", found.quadratic_form()))
        lines.append(
            Step("The first-order term is the dense one, since E m/p = 1; half of what is gained", excess(found))
        )
        claimed = formula.value(Setting(p, rho, symbolic_blocks, CLIENTS, GROUP), SYMBOLS)
        lines.append(Step("The claim", claimed))
        alone = {OWN: ALL, BOTH: SHARED} if formula.one_client else {}
        lines.append(Step("Their difference", sp.simplify(sp.sympify(excess(found) - claimed).subs(alone))))
        return lines

    return steps


def _coefficient(keep: Any) -> Any:
    return (1 - keep) / (2 * keep)


def _as_correlated(rho_of: Callable[[Setting], Any]) -> Callable[[Setting, Sums], Any]:
    """The penalty of partial synchrony at a ρ that the setting gives."""

    def value(s: Setting, d: Sums) -> Any:
        correlation = rho_of(s._replace(clients=_exact(s.clients), group=_exact(s.group)))
        if isinstance(d.both, float):
            correlation = float(correlation)
        return _coefficient(s.p) * ((1 - correlation) * d.both + correlation * d.shared)

    return value


def _exact(value: Any) -> Any:
    return Fraction(value) if isinstance(value, int) else value


# The dial: which ρ reaches a wanted penalty.

Dial = Callable[[Any, Any, Any], Any]  # wanted R/R_ind, R_shr/R_ind, K_c → ρ


def dial_symbolic(formula: Dial, context: Context) -> Outcome:
    """R_ρ from the moments of correlated masks, at the ρ that is claimed to give w·R_ind, is w·R_ind."""
    wanted = sp.Symbol("w", positive=True)
    found = excess(moments(PARTIAL.scheme)).subs(rho, formula(wanted, SHARED / BOTH, CLIENTS))
    return identical(found - wanted * _coefficient(p) * BOTH, "identity in w, p, weights, H")


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
        wanted = (value - instance.after(mean(instance))) / (_coefficient(instance.p) * sums.both)
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

    return for_all(draw, holds, context, "dial")


def dial_steps() -> list[Step]:
    """One linear equation."""
    wanted = sp.Symbol("w", positive=True)
    value = (1 - rho) * BOTH + rho * SHARED
    return [
        Step("R_ρ up to the coefficient (1−p)/(2p), by partial-synchrony", value),
        Step("Set equal to w·R_ind it is linear in ρ; solved", sp.factor(sp.solve(value - wanted * BOTH, rho)[0])),
        Step("which is (w − 1)/(f − 1), f = R_shr/R_ind; it lies in [0, 1] just for w between 1 and f"),
    ]


LEVELS_OF = {"symbolic": symbolic, "exhaustive": exhaustive, "monte carlo": monte_carlo}

ONE = Penalty(Scheme("independent"), lambda s, d: _coefficient(s.p) * d.both, one_client=True)
INDEPENDENT = Penalty(Scheme("independent"), lambda s, d: _coefficient(s.p) * d.both)
SYNCHRONIZED = Penalty(Scheme("shared"), lambda s, d: _coefficient(s.p) * d.shared)
PARTIAL = Penalty(Scheme("correlated"), lambda s, d: _coefficient(s.p) * ((1 - s.rho) * d.both + s.rho * d.shared))
FIXED = Penalty(
    Scheme("fixed"),
    lambda s, d: _coefficient(s.p) * (d.both - (d.own - d.both) / (s.blocks - 1)),
)
GROUPS = Penalty(Scheme("groups"), lambda s, d: _coefficient(s.p) * d.grouped)
RANDOM_GROUPS = Penalty(Scheme("random groups"), _as_correlated(lambda s: (s.group - 1) / (s.clients - 1)))
WHOLE = Penalty(Scheme("one bit"), lambda s, d: _coefficient(s.p) * d.own)


CLAIMS = (
    Claim(
        "one-client",
        "Masking one update charges its curvature, block by block",
        "eqs. 2, 4, 5 (Proposition 1)",
        "E l(θ − Δ̃) = l(θ − Δ) + (1−p)/(2p) · Σ_b Δ^(b)ᵀ H_bb Δ^(b), exactly on a quadratic",
        ONE,
        LEVELS_OF,
        {
            "coefficient (1−p)/p": _with(ONE, lambda s, d: (1 - s.p) / s.p * d.both),
            "coefficient (1−p)/2": _with(ONE, lambda s, d: (1 - s.p) / 2 * d.both),
            "cross-block terms too": _with(ONE, lambda s, d: _coefficient(s.p) * d.own),
            "no rescaling by 1/p": _by(ONE, rescaled=False),
            "one bit for all blocks": _by(ONE, kind="one bit"),
        },
        ("masks independent over blocks", "quadratic loss; otherwise up to O(‖Δ‖³), see expansion"),
        _steps(ONE),
    ),
    Claim(
        "independent-masks",
        "Independent masks: the penalty is diluted, Σ a_k² R(Δ_k)",
        "eq. 6 (Proposition 2), finding 2",
        "R_ind = (1−p)/(2p) · Σ_k a_k² Σ_b Δ_k^(b)ᵀ H_bb Δ_k^(b); with a_k = 1/K_c it is K_c⁻² Σ R(Δ_k)",
        INDEPENDENT,
        LEVELS_OF,
        {
            "penalty of the mean": _with(INDEPENDENT, lambda s, d: _coefficient(s.p) * d.shared),
            "a further 1/K_c": _with(INDEPENDENT, lambda s, d: _coefficient(s.p) * d.both / (s.clients + 1)),
            "no dilution": _with(INDEPENDENT, lambda s, d: _coefficient(s.p) * d.both * (s.clients + 1)),
            "masks shared by all clients": _by(INDEPENDENT, kind="shared"),
            "masks shared across blocks": _by(INDEPENDENT, kind="one bit"),
        },
        ("masks independent over blocks and clients", "H is that of the global objective"),
        _steps(INDEPENDENT),
    ),
    Claim(
        "shared-mask",
        "One shared mask: the penalty is that of the mean",
        "eq. 7 (Proposition 3)",
        "R_shr = (1−p)/(2p) · Σ_b Δ̄^(b)ᵀ H_bb Δ̄^(b) = R(Σ a_k Δ_k)",
        SYNCHRONIZED,
        LEVELS_OF,
        {
            "penalty of independent masks": _with(SYNCHRONIZED, lambda s, d: _coefficient(s.p) * d.both),
            "cross-block terms too": _with(SYNCHRONIZED, lambda s, d: _coefficient(s.p) * d.all),
            "coefficient (1−p)/p": _with(SYNCHRONIZED, lambda s, d: (1 - s.p) / s.p * d.shared),
            "masks of its own for each client": _by(SYNCHRONIZED, kind="independent"),
        },
        ("one mask for all clients, independent over blocks",),
        _steps(SYNCHRONIZED),
    ),
    Claim(
        "partial-synchrony",
        "Masks of correlation ρ between clients interpolate: synchrony is a dial",
        "beyond the paper",
        "R_ρ = (1−ρ) R_ind + ρ R_shr; so ρ = (R − R_ind)/(R_shr − R_ind) reaches any R between them",
        PARTIAL,
        LEVELS_OF,
        {
            "√ρ in place of ρ": _with(
                PARTIAL, lambda s, d: _coefficient(s.p) * ((1 - _root(s.rho)) * d.both + _root(s.rho) * d.shared)
            ),
            "ρ²": _with(PARTIAL, lambda s, d: _coefficient(s.p) * ((1 - s.rho**2) * d.both + s.rho**2 * d.shared)),
            "ρ the other way round": _with(
                PARTIAL, lambda s, d: _coefficient(s.p) * (s.rho * d.both + (1 - s.rho) * d.shared)
            ),
        },
        ("per client and block, the shared bit with probability √ρ, else an own one",),
        _steps(PARTIAL),
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
            "as if independent": _with(GROUPS, lambda s, d: _coefficient(s.p) * d.both),
            "as if one mask for all": _with(GROUPS, lambda s, d: _coefficient(s.p) * d.shared),
            "coefficient (1−p)/p": _with(GROUPS, lambda s, d: 2 * _coefficient(s.p) * d.grouped),
            "masks of their own in a group": _by(GROUPS, kind="independent"),
        },
        ("masks of different groups independent",),
        _steps(GROUPS),
    ),
    Claim(
        "random-groups",
        "Random groups of g clients with a mask each are a correlation of (g − 1)/(K_c − 1) in expectation",
        "beyond the paper",
        "P(two clients share a mask) = (g − 1)/(K_c − 1), so E R = R_ρ with that ρ",
        RANDOM_GROUPS,
        LEVELS_OF,
        {
            "g/K_c": _with(RANDOM_GROUPS, _as_correlated(lambda s: s.group / s.clients)),
            "(g − 1)/K_c": _with(RANDOM_GROUPS, _as_correlated(lambda s: (s.group - 1) / s.clients)),
            "the groups of one round": _with(RANDOM_GROUPS, lambda s, d: _coefficient(s.p) * d.grouped),
        },
        ("g divides K_c", "groups drawn anew, uniformly"),
        _steps(RANDOM_GROUPS),
    ),
    Claim(
        "fixed-size-masks",
        "Masks that keep exactly m of B blocks bring in cross-block terms",
        "beyond the paper",
        "R = (1−p)/(2p) · Σ_k a_k² [Σ_b Δ_kᵇᵀH_bbΔ_kᵇ − 1/(B−1) Σ_{b≠c} Δ_kᵇᵀH_bcΔ_kᶜ], p = m/B",
        FIXED,
        LEVELS_OF,
        {
            "no cross-block terms": _with(FIXED, lambda s, d: _coefficient(s.p) * d.both),
            "cross-block terms with 1/B": _with(
                FIXED, lambda s, d: _coefficient(s.p) * (d.both - (d.own - d.both) / s.blocks)
            ),
            "cross-block terms with a plus": _with(
                FIXED, lambda s, d: _coefficient(s.p) * (d.both + (d.own - d.both) / (s.blocks - 1))
            ),
            "coefficient (1−p)/p": _with(
                FIXED, lambda s, d: 2 * _coefficient(s.p) * (d.both - (d.own - d.both) / (s.blocks - 1))
            ),
        },
        ("B ≥ 2", "clients' masks independent"),
        _steps(FIXED),
        "In the expected quadratic form the coefficient of the cross terms is −(1−p)/(p(B−1)), half of it in the loss.",
    ),
    Claim(
        "model-granularity",
        "One bit for the whole model charges the whole Hessian, cross-block terms included",
        "finding 9",
        "R = (1−p)/(2p) Σ_k a_k² Δ_kᵀ H Δ_k; l = (x+y)²/2 at (1,1), Δ = (½,½), p = ½: E l is 1, and ¾ with a bit each",
        WHOLE,
        LEVELS_OF,
        {
            "block-diagonal terms only": _with(WHOLE, lambda s, d: _coefficient(s.p) * d.both),
            "a bit for each block": _by(WHOLE, kind="independent"),
        },
        (),
        _steps(WHOLE),
    ),
)


def _root(value: Any) -> Any:
    if isinstance(value, Fraction):
        return Fraction(int(value.numerator**0.5 + 0.5), int(value.denominator**0.5 + 0.5))
    return sp.sqrt(value) if isinstance(value, sp.Basic) else value**0.5
