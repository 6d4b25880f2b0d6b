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

from theory.algebra import ALL, BOTH, GROUPED, OWN, SHARED, excess, p
from theory.checking import INSTANCES, for_all, identical, sampled_outcome
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

    # Random groups have the most masks to sum over.
    count = 10 if formula.scheme.kind == "random groups" else INSTANCES
    return for_all(draw, holds, context, "masking", count=count)


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


def with_value(formula: Penalty, value: Callable[[Setting, Sums], Any]) -> Penalty:
    return replace(formula, value=value)


def with_scheme(formula: Penalty, **scheme: Any) -> Penalty:
    return replace(formula, scheme=replace(formula.scheme, **scheme))


def steps(formula: Penalty) -> Callable[[], list[Step]]:
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


def coefficient(keep: Any) -> Any:
    return (1 - keep) / (2 * keep)


LEVELS_OF = {"symbolic": symbolic, "exhaustive": exhaustive, "monte carlo": monte_carlo}

ONE = Penalty(Scheme("independent"), lambda s, d: coefficient(s.p) * d.both, one_client=True)
INDEPENDENT = Penalty(Scheme("independent"), lambda s, d: coefficient(s.p) * d.both)
SYNCHRONIZED = Penalty(Scheme("shared"), lambda s, d: coefficient(s.p) * d.shared)
FIXED = Penalty(
    Scheme("fixed"),
    lambda s, d: coefficient(s.p) * (d.both - (d.own - d.both) / (s.blocks - 1)),
)
WHOLE = Penalty(Scheme("one bit"), lambda s, d: coefficient(s.p) * d.own)


CLAIMS = (
    Claim(
        "one-client",
        "Masking one update charges its curvature, block by block",
        "eqs. 2, 4, 5 (Proposition 1)",
        "E l(θ − Δ̃) = l(θ − Δ) + (1−p)/(2p) · Σ_b Δ^(b)ᵀ H_bb Δ^(b), exactly on a quadratic",
        ONE,
        LEVELS_OF,
        {
            "coefficient (1−p)/p": with_value(ONE, lambda s, d: (1 - s.p) / s.p * d.both),
            "coefficient (1−p)/2": with_value(ONE, lambda s, d: (1 - s.p) / 2 * d.both),
            "cross-block terms too": with_value(ONE, lambda s, d: coefficient(s.p) * d.own),
            "no rescaling by 1/p": with_scheme(ONE, rescaled=False),
            "one bit for all blocks": with_scheme(ONE, kind="one bit"),
        },
        ("masks independent over blocks", "quadratic loss; otherwise up to O(‖Δ‖³), see expansion"),
        steps(ONE),
    ),
    Claim(
        "independent-masks",
        "Independent masks: the penalty is diluted, Σ a_k² R(Δ_k)",
        "eq. 6 (Proposition 2), finding 2",
        "R_ind = (1−p)/(2p) · Σ_k a_k² Σ_b Δ_k^(b)ᵀ H_bb Δ_k^(b); with a_k = 1/K_c it is K_c⁻² Σ R(Δ_k)",
        INDEPENDENT,
        LEVELS_OF,
        {
            "penalty of the mean": with_value(INDEPENDENT, lambda s, d: coefficient(s.p) * d.shared),
            "a further 1/K_c": with_value(INDEPENDENT, lambda s, d: coefficient(s.p) * d.both / (s.clients + 1)),
            "no dilution": with_value(INDEPENDENT, lambda s, d: coefficient(s.p) * d.both * (s.clients + 1)),
            "masks shared by all clients": with_scheme(INDEPENDENT, kind="shared"),
            "masks shared across blocks": with_scheme(INDEPENDENT, kind="one bit"),
        },
        ("masks independent over blocks and clients", "H is that of the global objective"),
        steps(INDEPENDENT),
    ),
    Claim(
        "shared-mask",
        "One shared mask: the penalty is that of the mean",
        "eq. 7 (Proposition 3)",
        "R_shr = (1−p)/(2p) · Σ_b Δ̄^(b)ᵀ H_bb Δ̄^(b) = R(Σ a_k Δ_k)",
        SYNCHRONIZED,
        LEVELS_OF,
        {
            "penalty of independent masks": with_value(SYNCHRONIZED, lambda s, d: coefficient(s.p) * d.both),
            "cross-block terms too": with_value(SYNCHRONIZED, lambda s, d: coefficient(s.p) * d.all),
            "coefficient (1−p)/p": with_value(SYNCHRONIZED, lambda s, d: (1 - s.p) / s.p * d.shared),
            "masks of its own for each client": with_scheme(SYNCHRONIZED, kind="independent"),
        },
        ("one mask for all clients, independent over blocks",),
        steps(SYNCHRONIZED),
    ),
    Claim(
        "fixed-size-masks",
        "Masks that keep exactly m of B blocks bring in cross-block terms",
        "beyond the paper",
        "R = (1−p)/(2p) · Σ_k a_k² [Σ_b Δ_kᵇᵀH_bbΔ_kᵇ − 1/(B−1) Σ_{b≠c} Δ_kᵇᵀH_bcΔ_kᶜ], p = m/B",
        FIXED,
        LEVELS_OF,
        {
            "no cross-block terms": with_value(FIXED, lambda s, d: coefficient(s.p) * d.both),
            "cross-block terms with 1/B": with_value(
                FIXED, lambda s, d: coefficient(s.p) * (d.both - (d.own - d.both) / s.blocks)
            ),
            "cross-block terms with a plus": with_value(
                FIXED, lambda s, d: coefficient(s.p) * (d.both + (d.own - d.both) / (s.blocks - 1))
            ),
            "coefficient (1−p)/p": with_value(
                FIXED, lambda s, d: 2 * coefficient(s.p) * (d.both - (d.own - d.both) / (s.blocks - 1))
            ),
        },
        ("B ≥ 2", "clients' masks independent"),
        steps(FIXED),
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
            "block-diagonal terms only": with_value(WHOLE, lambda s, d: coefficient(s.p) * d.both),
            "a bit for each block": with_scheme(WHOLE, kind="independent"),
        },
        (),
        steps(WHOLE),
    ),
)
