"""Other perturbations, granularity, several rounds, and where the second-order expansion ends."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from random import Random
from typing import Any

import numpy as np
import sympy as sp
import torch
from torch import nn
from torch.func import functional_call, hessian

from fedmask import Blocks
from theory.checking import for_all, identical
from theory.quadratics import Instance, Vector, dot, draw_instance, mean
from theory.registry import Claim, Context, Outcome, Step

__all__ = ["CLAIMS"]


# Zero-mean perturbations, and a common shift.


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


# Granularity.


def granularity_exhaustive(formula: Callable[[Fraction, int], Fraction], context: Context) -> Outcome:
    """For positive semidefinite H: the whole form against its block-diagonal part; the bound is attained."""

    def holds(instance: Instance) -> bool:
        fine = instance.block_form(instance.updates[0], instance.updates[0])
        whole = instance.form(instance.updates[0], instance.updates[0])
        return bool(whole <= formula(fine, instance.blocks))

    found = for_all(
        lambda random: draw_instance(random, definite=True, clients=1), holds, context, "granularity", count=60
    )
    # Equality: H = 11ᵀ and an update of ones; and no order the other way: H = (1, −1)(1, −1)ᵀ has whole 0, fine 2.
    attained = all(formula(Fraction(blocks), blocks) == Fraction(blocks**2) for blocks in (1, 2, 3))
    return found if attained or not found.passed else Outcome(False, "the bound is not attained by H = 11ᵀ")


def granularity_symbolic(formula: Callable[[Any, int], Any], context: Context) -> Outcome:
    """B Σ_b v_bᵀv_b − (Σ_b v_b)ᵀ(Σ_b v_b) = Σ_{b<c}‖v_b − v_c‖² for v_b = H^½ Δ^(b); B = 2 … 4."""
    differences = []
    for blocks in range(2, 5):
        v = sp.symbols(f"v0:{blocks}", real=True)
        pairs = sum((v[i] - v[j]) ** 2 for i in range(blocks) for j in range(i))
        differences.append(formula(sum(x**2 for x in v), blocks) - sum(v) ** 2 - pairs)
    return identical(differences, "sum of squares, B = 2 … 4")


# Groups.


def groups_exhaustive(formula: Callable[[int, int], Fraction], context: Context) -> Outcome:
    """Over all assignments of K_c clients to groups of g: how often two given clients share a mask, and so ρ."""
    tried = 0
    for k, g in ((2, 1), (2, 2), (3, 1), (3, 3), (4, 2), (4, 4), (6, 2), (6, 3)):
        together = orders = 0
        for order in itertools.permutations(range(k)):
            group = {client: place // g for place, client in enumerate(order)}
            together += group[0] == group[1]
            orders += 1
        tried += orders
        if Fraction(together, orders) != formula(k, g):
            return Outcome(False, f"fails for K_c = {k}, g = {g}", samples=tried)
    return Outcome(True, "equal in exact rationals", samples=tried)


# Several rounds.


@dataclass(frozen=True)
class Recursion:
    """Σ_{t+1} from Σ_t: ``noise`` is the factor before the masked part, ``mean_too`` whether θ̄θ̄ᵀ enters it."""

    noise: Callable[[Fraction], Fraction]
    mean_too: bool = True
    blockwise: bool = True


def rounds_exhaustive(formula: Recursion, context: Context) -> Outcome:
    """Two and three rounds of θ ← θ − Σ_b (m_b/p) η(Hθ)^(b), every sequence of masks: mean, covariance, loss."""

    def holds(instance: Instance) -> bool:
        d, rate = len(instance.owner), Fraction(1, 5)
        h = instance.hessian
        if instance.blocks > 2:
            return True
        states: list[tuple[Fraction, Vector]] = [(Fraction(1), instance.theta)]
        center, sigma = instance.theta, [[Fraction(0)] * d for _ in range(d)]
        for _ in range(2):
            advanced = []
            for chance, theta in states:
                gradient = [rate * dot(row, theta) for row in h]
                for bits in itertools.product((0, 1), repeat=instance.blocks):
                    weight = instance.p ** sum(bits) * (1 - instance.p) ** (len(bits) - sum(bits))
                    scale = [Fraction(bits[b]) / instance.p for b in instance.owner]
                    advanced.append(
                        (chance * weight, [t - s * g for t, s, g in zip(theta, scale, gradient, strict=True)])
                    )
            states = advanced
            center, sigma = _recursion(formula, instance, rate, center, sigma)
            average = [sum((c * theta[i] for c, theta in states), Fraction(0)) for i in range(d)]
            covariance = [
                [sum((c * (x[i] - average[i]) * (x[j] - average[j]) for c, x in states), Fraction(0)) for j in range(d)]
                for i in range(d)
            ]
            if average != center or covariance != sigma:
                return False
            excess = (
                sum((c * instance.form(x, x) / 2 for c, x in states), Fraction(0)) - instance.form(center, center) / 2
            )
            trace = sum((dot(h[i], [row[i] for row in sigma]) for i in range(d)), Fraction(0))
            if excess != trace / 2:
                return False
        return True

    def draw(random: Random) -> Instance:
        instance = draw_instance(random, definite=True, clients=1)
        return replace(instance, theta=[x + 1 for x in instance.theta])

    return for_all(draw, holds, context, "rounds", count=15)


def _recursion(
    formula: Recursion, instance: Instance, rate: Fraction, center: Vector, sigma: list[Vector]
) -> tuple[Vector, list[Vector]]:
    d, h = range(len(center)), instance.hessian
    a = [[(1 if i == j else 0) - rate * h[i][j] for j in d] for i in d]
    second = [[sigma[i][j] + (center[i] * center[j] if formula.mean_too else 0) for j in d] for i in d]
    moved, masked = _sandwich(a, sigma), _sandwich([[rate * x for x in row] for row in h], second)
    factor = formula.noise(instance.p)
    same = [[instance.owner[i] == instance.owner[j] or not formula.blockwise for j in d] for i in d]
    new = [[moved[i][j] + (factor * masked[i][j] if same[i][j] else 0) for j in d] for i in d]
    return [dot(row, center) for row in a], new


def _sandwich(m: list[Vector], s: list[Vector]) -> list[Vector]:
    """M S Mᵀ."""
    ms = [[dot(row, [s[k][j] for k in range(len(s))]) for j in range(len(s))] for row in m]
    return [[dot(left, right) for right in m] for left in ms]


# The expansion's remainder, on networks.


@dataclass(frozen=True)
class Remainder:
    """|E l(masked) − l(dense) − R|: its order in the update's scale, by p and by where H is taken; the coefficient
    of R; the cubic term's coefficient; and how it grows as p falls."""

    order: Callable[[float, str], float]
    coefficient: Callable[[Any], Any] = lambda p: (1 - p) / (2 * p)
    cubic: Callable[[Any], Any] = lambda p: -(1 - p) * (1 - 2 * p) / (6 * p**2)
    growth: Callable[[float], float] = lambda p: (1 - p) * (1 - 2 * p) / p**2


def remainder_network(formula: Remainder, context: Context) -> Outcome:
    """An MLP and a GroupNorm CNN in float64, the exact Hessian, all 2^B masks: slopes of the remainder in the scale."""
    torch.manual_seed(context.seed % 2**31)
    words: list[str] = []
    for network, inputs in _networks():
        for p, where, slope in _slopes(formula, network, inputs):
            words.append(f"{slope:.2f}")
            claimed = formula.order(p, where)
            # Where the cubic term vanishes the next ones may too, so there the order is a lower bound.
            if slope < claimed - 0.4 or (slope > claimed + 0.4 and claimed < 4):
                return Outcome(False, f"slope {slope:.2f} at p = {p}, H {where} the step; {claimed:g} claimed")
    network, inputs = _networks()[0]
    loss, blocks, theta = _flat_loss(network, inputs)
    directions, probabilities = _directions(len(theta)) / 256, (0.3, 0.2, 0.1, 0.05)
    rest = [_remainder(formula, loss, blocks, theta, directions, p, hessian(loss)) for p in probabilities]
    growth = np.array(rest) / [formula.growth(p) for p in probabilities]
    spread = float(growth.max() / growth.min())
    if spread > 1.3:
        return Outcome(False, f"growth with 1/p is off by {spread:.2f} between p = 0.3 and 0.05")
    return Outcome(True, f"slopes {' '.join(words)}; growth in p to {100 * (spread - 1):.0f} %", samples=len(words) + 4)


def _slopes(formula: Remainder, network: nn.Module, inputs: torch.Tensor) -> Iterator[tuple[float, str, float]]:
    """(p, where H is taken, slope of log remainder against log scale of the update)."""
    loss, blocks, theta = _flat_loss(network, inputs)
    directions, scales = _directions(len(theta)), (1 / 8, 1 / 16, 1 / 32)
    at_theta = hessian(loss)(theta)
    for p, where in itertools.product((0.5, 0.7), ("after", "before")):
        curvature = hessian(loss) if where == "after" else lambda _: at_theta
        rest = [_remainder(formula, loss, blocks, theta, scale * directions, p, curvature) for scale in scales]
        yield p, where, float(np.polyfit(np.log(scales), np.log(rest), 1)[0])


def _flat_loss(
    network: nn.Module, inputs: torch.Tensor
) -> tuple[Callable[[torch.Tensor], torch.Tensor], Blocks, torch.Tensor]:
    """The network's loss as a function of its flat parameters, their blocks, and where they are."""
    blocks, labels = Blocks.of(network), torch.arange(len(inputs)) % 3

    def loss(flat: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(functional_call(network, blocks.views(flat), (inputs,)), labels)

    return loss, blocks, blocks.flatten(dict(network.named_parameters())).detach()


def _directions(parameters: int) -> torch.Tensor:
    """Several, since the remainder along one of them may be passing through zero."""
    directions = torch.randn(6, parameters, dtype=torch.float64)
    return 0.3 * directions / directions.norm(dim=1, keepdim=True)


def _remainder(
    formula: Remainder,
    loss: Callable[[torch.Tensor], torch.Tensor],
    blocks: Blocks,
    theta: torch.Tensor,
    steps: torch.Tensor,
    p: float,
    curvature: Callable[[torch.Tensor], torch.Tensor],
) -> float:
    """Root sum of squares over steps of E l(θ − masked) − l(θ − step) − R, with all 2^B masks."""
    owner = torch.repeat_interleave(torch.arange(blocks.count), torch.from_numpy(blocks.sizes))
    same = owner[:, None] == owner[None, :]
    masks = torch.tensor(list(itertools.product((0.0, 1.0), repeat=blocks.count)), dtype=torch.float64)
    chances = (p**masks * (1 - p) ** (1 - masks)).prod(dim=1)
    squares = 0.0
    for step in steps:
        penalty = formula.coefficient(p) * float(step @ (curvature(theta - step) * same) @ step)
        expected = float(chances @ torch.vmap(loss)(theta - masks[:, owner] / p * step))
        squares += (expected - float(loss(theta - step)) - penalty) ** 2
    return squares**0.5


def _networks() -> list[tuple[nn.Module, torch.Tensor]]:
    mlp = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    cnn = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Softplus(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    ).double()
    return [(mlp, torch.randn(6, 4).double()), (cnn, torch.randn(6, 1, 6, 6).double())]


def remainder_symbolic(formula: Remainder, context: Context) -> Outcome:
    """One block, l with third derivative T: the cubic term is −(1−p)(1−2p)/(6p²)·T·Δ³, H after the step."""
    p = sp.Symbol("p", positive=True)
    # l about θ − Δ: l(θ − (m/p)Δ) = Σ_j l_j ((1 − m/p)Δ)^j / j!, with E over m; up to fourth order.
    z = {1: 1 - 1 / p, 0: sp.Integer(1)}

    def moment(j: int) -> sp.Expr:
        return sp.simplify(p * z[1] ** j + (1 - p) * z[0] ** j)

    cubic = sp.factor(moment(3) / 6)
    second = sp.simplify(moment(2) / 2 - formula.coefficient(p))
    if second != 0:
        return Outcome(False, f"second order differs by {sp.factor(second)}")
    for value in (Fraction(1, 2), Fraction(7, 10)):
        rest = cubic.subs(p, sp.Rational(value))
        order = 3 if rest != 0 else 4
        if formula.order(float(value), "after") != order:
            return Outcome(False, f"order is {order} at p = {value}")
    return identical(cubic - formula.cubic(p), "cubic term −(1−p)(1−2p)/(6p²)")


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


def remainder_steps() -> list[Step]:
    """Moments of 1 − m/p."""
    p = sp.Symbol("p", positive=True)

    def moment(j: int) -> sp.Expr:
        return sp.factor(p * (1 - 1 / p) ** j + (1 - p))

    return [
        Step("About θ − Δ the masked step leaves (1 − m/p)Δ: its first moment", sp.simplify(moment(1))),
        Step("its second moment over 2: the coefficient of Δᵀ H_bb Δ", sp.factor(moment(2) / 2)),
        Step("its third moment over 6: the coefficient of T[Δ, Δ, Δ], zero at p = ½", sp.factor(moment(3) / 6)),
    ]


def granularity_steps() -> list[Step]:
    """The same sum of squares as for the recovery factor's bound, over blocks."""
    v = sp.symbols("v1:4", real=True)
    gap = sp.expand(3 * sum(x**2 for x in v) - sum(v) ** 2)
    return [
        Step("H = H^½ H^½ for a positive semidefinite H; with v_b = H^½ Δ^(b), B Σ‖v_b‖² − ‖Σv_b‖² for B = 3", gap),
        Step("It is the sum over pairs of blocks of ‖v_b − v_c‖², so not negative", sp.factor(gap)),
    ]


INDEPENDENT_NOISE = Perturbed(_diluted, shifted=False)
SHIFT = Perturbed(_diluted, shifted=True)
RECURSION = Recursion(lambda p: (1 - p) / p)
REMAINDER = Remainder(lambda p, where: 4.0 if p == 0.5 and where == "after" else 3.0)
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
        derivation=perturbed_steps,
    ),
    Claim(
        "granularity-order",
        "For positive semidefinite H a coarser mask charges at most as many times more as it joins blocks",
        "finding 9, and beyond the paper",
        "ΔᵀHΔ ≤ B Σ_b Δ^(b)ᵀH_bbΔ^(b); there is no order the other way",
        lambda fine, blocks: blocks * fine,
        {"symbolic": granularity_symbolic, "exhaustive": granularity_exhaustive},
        {
            "coarser charges no more": lambda fine, blocks: fine,
            "√B": lambda fine, blocks: fine * blocks if blocks < 2 else fine * sp.sqrt(blocks),
            "B²": lambda fine, blocks: blocks**2 * fine,
        },
        ("H positive semidefinite",),
        note="H = (1, −1)(1, −1)ᵀ and Δ = (1, 1): elements charge 2, the model 0; H = 11ᵀ: 2 and 4.",
        derivation=granularity_steps,
    ),
    Claim(
        "random-groups",
        "Random groups of g clients with a mask each are a correlation of (g − 1)/(K_c − 1) in expectation",
        "beyond the paper",
        "P(two clients share a mask) = (g − 1)/(K_c − 1), so E R = R_ρ with that ρ",
        lambda k, g: Fraction(g - 1, k - 1),
        {"exhaustive": groups_exhaustive},
        {
            "g/K_c": lambda k, g: Fraction(g, k),
            "(g − 1)/K_c": lambda k, g: Fraction(g - 1, k),
        },
        ("g divides K_c",),
    ),
    Claim(
        "many-rounds",
        "On a quadratic the mean iterate is the dense one and only the covariance grows",
        "beyond the paper",
        "Σ' = AΣAᵀ + (1−p)/p η² Σ_b P_b H(Σ + θ̄θ̄ᵀ)H P_b, A = I − ηH; E l(θ_T) − l(θ̄_T) = ½ tr(HΣ_T)",
        RECURSION,
        {"exhaustive": rounds_exhaustive},
        {
            "coefficient (1−p)/(2p)": replace(RECURSION, noise=lambda p: (1 - p) / (2 * p)),
            "without the mean": replace(RECURSION, mean_too=False),
            "not block by block": replace(RECURSION, blockwise=False),
        },
        ("one masked gradient step a round", "minimum at 0"),
        note="Σ_T stays bounded if the linear map Σ → AΣAᵀ + (1−p)/p η² Σ_b P_b HΣH P_b has spectral radius below one.",
    ),
    Claim(
        "expansion",
        "The second-order expansion leaves a cubic remainder, which vanishes at p = ½ with H after the step",
        "eq. 5, finding 8",
        "E l(θ−Δ̃) = l(θ−Δ) + R(Δ) − (1−p)(1−2p)/(6p²) Σ_b T[Δ_b,Δ_b,Δ_b] + O(‖Δ‖⁴), H and T at θ − Δ",
        REMAINDER,
        {"symbolic": remainder_symbolic, "network": remainder_network},
        {
            "cubic at p = ½ too": replace(REMAINDER, order=lambda p, where: 3.0),
            "quartic everywhere": replace(REMAINDER, order=lambda p, where: 4.0),
            "coefficient (1−p)/p": replace(REMAINDER, coefficient=lambda p: (1 - p) / p),
            "growth like 1/p": replace(REMAINDER, growth=lambda p: (1 - p) * (1 - 2 * p) / p),
            "growth like 1/p³": replace(REMAINDER, growth=lambda p: (1 - p) * (1 - 2 * p) / p**3),
            "cubic term with a plus": replace(REMAINDER, cubic=lambda p: (1 - p) * (1 - 2 * p) / (6 * p**2)),
        },
        ("third-order regularity",),
        derivation=remainder_steps,
    ),
)
