"""Granularity: which terms of the Hessian are charged, and how much more a coarser mask can charge."""

import itertools
from collections.abc import Callable
from fractions import Fraction
from random import Random
from typing import Any, NamedTuple

import numpy as np
import sympy as sp
import torch

from fedmask import Blocks, Granularity, masked_mean
from theory.checking import for_all, identical
from theory.quadratics import Instance, draw_instance
from theory.registry import Claim, Context, Outcome, Step

__all__ = ["CLAIMS"]


class Place(NamedTuple):
    """Where a parameter lies; a row is an index along its tensor's first axis."""

    layer: int
    tensor: int
    row: int
    element: int


# Two layers: a weight of 2 × 2 with a bias of 2, and a weight of 1 × 2.
SHAPES = {"first.weight": (2, 2), "first.bias": (2,), "second.weight": (1, 2)}
PLACES = (
    *(Place(0, 0, i, j) for i in range(2) for j in range(2)),
    *(Place(0, 1, i, 0) for i in range(2)),
    *(Place(1, 2, 0, j) for j in range(2)),
)
GRANULARITIES: tuple[Granularity, ...] = ("element", "row", "tensor", "layer", "model")

Survives = Callable[[Granularity, Place, Place], bool]


def terms_exhaustive(formula: Survives, context: Context) -> Outcome:
    """Production's blocks at every granularity, its masked mean under every mask, against the terms claimed."""

    def holds(instance: Instance) -> bool:
        h = np.array([[float(x) for x in row] for row in instance.hessian])
        update = torch.tensor([[float(x) for x in instance.updates[0]]], dtype=torch.float64)
        u, p = update[0].numpy(), float(instance.p)
        for granularity in GRANULARITIES:
            blocks = Blocks.of({name: torch.zeros(shape) for name, shape in SHAPES.items()}, granularity)
            found = 0.0
            for bits in itertools.product((False, True), repeat=blocks.count):
                mask = np.array([bits])
                step = masked_mean(update, blocks, masks=mask, p=p, statistics="none").mean.numpy()
                found += p ** sum(bits) * (1 - p) ** (len(bits) - sum(bits)) * float((step - u) @ h @ (step - u)) / 2
            kept = np.array([[formula(granularity, one, other) for other in PLACES] for one in PLACES])
            claimed = (1 - p) / (2 * p) * float(u @ (h * kept) @ u)
            if abs(found - claimed) > 1e-9 * float(np.abs(u) @ np.abs(h) @ np.abs(u)) / p:
                return False
        return True

    def draw(random: Random) -> Instance:
        return draw_instance(random, clients=1, owner=tuple(range(len(PLACES))))

    found = for_all(draw, holds, context, "terms", count=2)
    return Outcome(
        found.passed, "equal to 1e-9 at five granularities" if found.passed else found.found, samples=found.samples
    )


def survives(granularity: Granularity, one: Place, other: Place) -> bool:
    """H_ij is charged just where i and j lie in one block."""
    depth = {"model": 0, "layer": 1, "tensor": 2, "row": 3, "element": 4}[granularity]
    return one[:depth] == other[:depth]


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


def granularity_steps() -> list[Step]:
    """The same sum of squares as for the recovery factor's bound, over blocks."""
    v = sp.symbols("v1:4", real=True)
    gap = sp.expand(3 * sum(x**2 for x in v) - sum(v) ** 2)
    return [
        Step("H = H^½ H^½ for a positive semidefinite H; with v_b = H^½ Δ^(b), B Σ‖v_b‖² − ‖Σv_b‖² for B = 3", gap),
        Step("It is the sum over pairs of blocks of ‖v_b − v_c‖², so not negative", sp.factor(gap)),
    ]


CLAIMS = (
    Claim(
        "granularity-terms",
        "A mask's granularity says which terms of the Hessian are charged: those within one of its blocks",
        "finding 9, and beyond the paper",
        "R = (1−p)/(2p) Σ_{i,j in one block} Δ_i H_ij Δ_j: element: the diagonal; row; tensor (the paper's); layer; "
        "model: all of H",
        survives,
        {"exhaustive": terms_exhaustive},
        {
            "a row reaches over tensors": lambda g, i, j: i.row == j.row if g == "row" else survives(g, i, j),
            "a layer charges its tensors apart": lambda g, i, j: survives("tensor" if g == "layer" else g, i, j),
            "the model charges its layers apart": lambda g, i, j: survives("layer" if g == "model" else g, i, j),
            "a row charges its diagonal alone": lambda g, i, j: survives("element" if g == "row" else g, i, j),
            "a tensor charges all its layer": lambda g, i, j: survives("layer" if g == "tensor" else g, i, j),
        },
        ("quadratic loss", "one client; the sums over a cohort follow"),
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
)
