"""Ways of masking a cohort, each known by its moments, by all its masks, and through the production code."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from typing import Literal

import numpy as np
import sympy as sp
import torch

from fedmask import (
    Blocks,
    Correlated,
    Independent,
    Sharing,
    Synchronized,
    bernoulli_mask,
    fixed_size_mask,
    masked_mean,
)
from theory.algebra import Moments, expectation, p
from theory.quadratics import Instance, Mask

__all__ = ["Scheme", "Problem", "exact_masks", "moments", "production_excess", "rho", "symbolic_blocks"]

rho = sp.Symbol("rho", nonnegative=True)
symbolic_blocks = sp.Symbol("B", positive=True)

Kind = Literal["independent", "shared", "correlated", "fixed", "one bit", "one bit shared"]


@dataclass(frozen=True)
class Scheme:
    """How bits are drawn, and whether kept blocks are scaled by 1/p.

    "one bit" gives a client a single bit for all its blocks, which is masking at granularity model.
    """

    kind: Kind = "independent"
    rescaled: bool = True
    rho: Fraction = Fraction(1, 4)  # for exact instances; √ρ must be rational


def moments(scheme: Scheme) -> Moments:
    """E[m_kb m_lc]/p² in the four cases, from the definition of the scheme."""
    scale = p if scheme.rescaled else sp.Integer(1)
    if scheme.kind == "fixed":
        # p = m/B, so that m = pB blocks are kept: P(b and c both kept) = p(pB − 1)/(B − 1).
        other = p * (p * symbolic_blocks - 1) / (symbolic_blocks - 1)
        cases = [p**2, other, p**2, p]
        return Moments(*(sp.simplify(case / scale**2) for case in cases))
    probabilities: dict[sp.Symbol, sp.Expr] = {}

    def bernoulli(name: str, probability: sp.Expr) -> sp.Symbol:
        symbol = sp.Symbol(name)
        probabilities[symbol] = probability
        return symbol

    def bit(client: int, block: int) -> sp.Expr:
        own = bernoulli(f"x{client}{block}", p)
        shared = bernoulli(f"z{block}", p)
        match scheme.kind:
            case "independent":
                return own
            case "shared":
                return shared
            case "one bit":
                return bernoulli(f"y{client}", p)
            case "one bit shared":
                return bernoulli("y", p)
            case _:
                select = bernoulli(f"s{client}{block}", sp.sqrt(rho))
                return select * shared + (1 - select) * own

    cases = [((0, 0), (1, 1)), ((0, 0), (0, 1)), ((0, 0), (1, 0)), ((0, 0), (0, 0))]
    return Moments(*(expectation(bit(*one) * bit(*other), probabilities) / scale**2 for one, other in cases))


def exact_masks(scheme: Scheme, instance: Instance) -> Iterator[tuple[Fraction, Mask]]:
    """Every mask of the cohort that has a probability, with it; of clients and blocks at most 2^12 masks."""
    clients, blocks, keep = instance.clients, instance.blocks, instance.p

    def bits(count: int, probability: Fraction) -> Iterator[tuple[Fraction, tuple[int, ...]]]:
        for row in itertools.product((0, 1), repeat=count):
            yield probability ** sum(row) * (1 - probability) ** (count - sum(row)), row

    match scheme.kind:
        case "independent":
            for chance, row in bits(clients * blocks, keep):
                yield chance, tuple(row[k * blocks : (k + 1) * blocks] for k in range(clients))
        case "shared":
            for chance, row in bits(blocks, keep):
                yield chance, (row,) * clients
        case "one bit":
            for chance, row in bits(clients, keep):
                yield chance, tuple((bit,) * blocks for bit in row)
        case "one bit shared":
            for chance, row in bits(1, keep):
                yield chance, ((row[0],) * blocks,) * clients
        case "fixed":
            kept = int(keep * blocks)
            rows = [
                tuple(int(b in chosen) for b in range(blocks)) for chosen in itertools.combinations(range(blocks), kept)
            ]
            for table in itertools.product(rows, repeat=clients):
                yield Fraction(1, len(rows) ** clients), table
        case "correlated":
            root = Fraction(int(scheme.rho.numerator**0.5 + 0.5), int(scheme.rho.denominator**0.5 + 0.5))
            assert root**2 == scheme.rho, "the exact check takes ρ with a rational root"
            # Given the shared bits, a client's bit is 1 with probability √ρ·z_b + (1 − √ρ)·p, independently.
            for chance, shared in bits(blocks, keep):
                for row in itertools.product((0, 1), repeat=clients * blocks):
                    probability = chance
                    for place, bit in enumerate(row):
                        one = root * shared[place % blocks] + (1 - root) * keep
                        probability *= one if bit else 1 - one
                    yield probability, tuple(row[k * blocks : (k + 1) * blocks] for k in range(clients))


@dataclass(frozen=True)
class Problem:
    """A quadratic in thousands of dimensions with an exact Hessian, for the production code.

    H is diagonal plus a coupling of rank one, so that every H_bb and H_bc is known and none is zero.
    """

    blocks: Blocks
    updates: torch.Tensor  # (clients, d), float64
    counts: list[int]
    scale: torch.Tensor  # (d,), the diagonal
    coupling: torch.Tensor  # (d,), v of the term v vᵀ

    def form(self, u: torch.Tensor) -> torch.Tensor:
        """uᵀHu of each row."""
        return (u**2 * self.scale).sum(dim=-1) + (u @ self.coupling) ** 2

    def sums(self) -> dict[str, float]:
        """The four sums of :mod:`theory.algebra`, in float64."""
        a = torch.tensor(self.counts, dtype=torch.float64) / sum(self.counts)
        weighted = self.updates * a[:, None]
        ends = np.cumsum(self.blocks.sizes)
        cuts = [slice(int(end - size), int(end)) for end, size in zip(ends, self.blocks.sizes, strict=True)]

        def blockwise(u: torch.Tensor) -> float:
            parts = [(u[c] ** 2 * self.scale[c]).sum() + (u[c] @ self.coupling[c]) ** 2 for c in cuts]
            return float(sum(parts))

        mean = weighted.sum(dim=0)
        return {
            "all": float(self.form(mean)),
            "own": float(self.form(weighted).sum()),
            "shared": blockwise(mean),
            "both": sum(blockwise(row) for row in weighted),
        }


@cache
def problem(clients: int, seed: int) -> Problem:
    """A problem of 2,000 dimensions in five tensors, with updates that share a common part."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (200, 300, 400, 500, 600)
    blocks = Blocks.of({f"tensor{i}": torch.zeros(size) for i, size in enumerate(sizes)})
    common = torch.randn(2000, generator=generator, dtype=torch.float64)
    updates = common + 1.5 * torch.randn(clients, 2000, generator=generator, dtype=torch.float64)
    scale = torch.rand(2000, generator=generator, dtype=torch.float64) + 0.5
    coupling = 0.03 * common  # along the updates, so that what is between blocks is not small beside what is within
    counts = [3 + k for k in range(clients)]
    return Problem(blocks, updates, counts, scale, coupling)


def sharing_of(scheme: Scheme) -> Sharing:
    """The production code's name for a scheme."""
    if scheme.kind in ("shared", "one bit shared"):
        return Synchronized()
    if scheme.kind == "correlated":
        return Correlated(float(scheme.rho))
    return Independent()


def production_excess(
    scheme: Scheme, case: Problem, keep: float, seed: int, first_round: int, count: int
) -> tuple[np.ndarray, float]:
    """½ δᵀHδ for δ = masked − dense mean, over ``count`` rounds of the production masks and mean, and its bound.

    E l(θ − masked) − l(θ − dense) is the expectation of this, for the first-order term has mean zero.
    """
    clients = len(case.updates)
    blocks = case.blocks.at("model") if scheme.kind.startswith("one bit") else case.blocks
    sharing = sharing_of(scheme)
    dense = masked_mean(case.updates, blocks, counts=case.counts, statistics=False).mean
    means = torch.empty(count, blocks.parameters, dtype=torch.float64)
    if scheme.kind == "fixed":
        draw = partial(fixed_size_mask, kept=round(keep * blocks.count))
    else:
        draw = partial(bernoulli_mask, p=keep)
    for row in range(count):
        where = {"seed": seed, "round_": first_round + row, "blocks": blocks.count, "sharing": sharing}
        masks = np.stack([draw(client=client, **where) for client in range(clients)])
        scale = keep if scheme.rescaled else 1.0
        means[row] = masked_mean(case.updates, blocks, counts=case.counts, masks=masks, p=scale, statistics=False).mean
    values = case.form(means - dense).numpy() / 2
    # ‖δ‖_H ≤ Σ_kb |m/p − 1| ‖a_kΔ_k^(b)‖_H by the triangle inequality.
    a = np.array(case.counts) / sum(case.counts)
    norm = 0.0
    for b in range(case.blocks.count):
        part = torch.zeros_like(case.updates)
        end = int(np.cumsum(case.blocks.sizes)[b])
        cut = slice(end - int(case.blocks.sizes[b]), end)
        part[:, cut] = case.updates[:, cut]
        norm += float((torch.from_numpy(a) * case.form(part).sqrt()).sum())
    most = max(1.0, 1 / keep - 1) * norm
    return values, most**2 / 2
