"""Where the second-order expansion ends: the order and the growth of its remainder, on networks."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import sympy as sp
import torch
from torch import nn
from torch.func import functional_call, hessian

from fedmask import Blocks
from theory.checking import identical
from theory.registry import Claim, Context, Outcome, Step

__all__ = ["CLAIMS"]


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


REMAINDER = Remainder(lambda p, where: 4.0 if p == 0.5 and where == "after" else 3.0)

CLAIMS = (
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
