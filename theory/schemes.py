"""Ways of masking a cohort, each known by its moments, by all its masks, and through the production code."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Literal

import numpy as np
import sympy as sp
import torch

from fedmask import (
    Blocks,
    Correlated,
    Groups,
    Independent,
    Sharing,
    Synchronized,
    cohort_masks,
    fixed_size_mask,
    masked_mean,
)
from theory.algebra import Moments, expectation, p
from theory.quadratics import Instance, Mask

__all__ = [
    "Problem",
    "Scheme",
    "exact_masks",
    "group_of",
    "largest_excess",
    "moments",
    "production_excess",
    "rho",
    "symbolic_blocks",
]

rho = sp.Symbol("rho", nonnegative=True)
symbolic_blocks = sp.Symbol("B", positive=True)

Kind = Literal["independent", "shared", "correlated", "groups", "random groups", "fixed", "one bit", "one bit shared"]


@dataclass(frozen=True)
class Scheme:
    """How bits are drawn, and whether kept blocks are scaled by 1/p.

    "one bit" gives a client a single bit for all its blocks, which is masking at granularity model. "groups"
    are of two clients, in the order of :func:`group_of`; "random groups" are groups of two of a random order.
    """

    kind: Kind = "independent"
    rescaled: bool = True
    rho: Fraction = Fraction(1, 4)  # for exact instances; √ρ must be rational


def group_of(client: int) -> int:
    """The group of a client in the scheme "groups": pairs, and a last one alone if their number is odd."""
    return client // 2


def moments(scheme: Scheme) -> Moments:
    """E[m_kb m_lc]/p² in each case, from the definition of the scheme."""
    scale = p if scheme.rescaled else sp.Integer(1)
    if scheme.kind == "fixed":
        # p = m/B, so that m = pB blocks are kept: P(b and c both kept) = p(pB − 1)/(B − 1).
        other = p * (p * symbolic_blocks - 1) / (symbolic_blocks - 1)
        cases = [p**2, other, p**2, p]
        return Moments(*(sp.simplify(case / scale**2) for case in cases))
    if scheme.kind == "random groups":
        # K_c/g groups have g(g − 1) ordered pairs each, of K_c(K_c − 1): how often two clients share a mask.
        clients, group = sp.symbols("K_c g", positive=True)
        together = clients / group * group * (group - 1) / (clients * (clients - 1))
        cases = [p**2, p**2, together * p + (1 - together) * p**2, p]
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
            case "groups":
                return bernoulli(f"g{group_of(client)}{block}", p)
            case "one bit":
                return bernoulli(f"y{client}", p)
            case "one bit shared":
                return bernoulli("y", p)
            case _:
                select = bernoulli(f"s{client}{block}", sp.sqrt(rho))
                return select * shared + (1 - select) * own

    # Clients 0 and 1 are of one group, 2 of another; the last two cases matter for groups alone.
    stranger = 2 if scheme.kind == "groups" else 1
    pairs = [((0, 0), (stranger, 1)), ((0, 0), (0, 1)), ((0, 0), (stranger, 0)), ((0, 0), (0, 0))]
    if scheme.kind == "groups":
        pairs += [((0, 0), (1, 1)), ((0, 0), (1, 0))]
    return Moments(*(expectation(bit(*one) * bit(*other), probabilities) / scale**2 for one, other in pairs))


def exact_masks(scheme: Scheme, instance: Instance) -> Iterator[tuple[Fraction, Mask]]:
    """Every mask of the cohort that has a probability, with it: at most 2^12 masks of clients and blocks."""
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
        case "groups" | "random groups":
            count = group_of(clients - 1) + 1
            orders = list(itertools.permutations(range(clients))) if scheme.kind == "random groups" else [None]
            for order in orders:
                group = [group_of(k if order is None else order[k]) for k in range(clients)]
                for chance, row in bits(count * blocks, keep):
                    table = tuple(row[g * blocks : (g + 1) * blocks] for g in group)
                    yield chance / len(orders), table
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

    def parts(self) -> np.ndarray:
        """(clients·B, clients·B): (a_kΔ_k^(b))ᵀ H (a_lΔ_l^(c)) of every two parts of the cohort, in float64."""
        a = torch.tensor(self.counts, dtype=torch.float64) / sum(self.counts)
        owner = torch.repeat_interleave(torch.arange(self.blocks.count), torch.from_numpy(self.blocks.sizes))
        own = torch.nn.functional.one_hot(owner).T.double()
        vectors = (self.updates * a[:, None])[:, None, :] * own  # (clients, B, d)
        flat = vectors.reshape(-1, vectors.shape[-1])
        along = flat @ self.coupling
        return ((flat * self.scale) @ flat.T + torch.outer(along, along)).numpy()

    def sums(self) -> dict[str, float]:
        """The sums of :mod:`theory.algebra`."""
        clients, blocks = len(self.counts), self.blocks.count
        form = self.parts().reshape(clients, blocks, clients, blocks)
        groups = np.array([group_of(k) for k in range(clients)])
        by_block = np.einsum("kblb->kl", form)
        return {
            "all": float(form.sum()),
            "own": float(np.einsum("kbkc->", form)),
            "shared": float(by_block.sum()),
            "both": float(np.trace(by_block)),
            "grouped": float(by_block[groups[:, None] == groups].sum()),
        }


@cache
def problem(clients: int, seed: int) -> Problem:
    """A problem of 2,000 dimensions with updates that share a common part; at most 2^15 masks of its blocks."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (200, 300, 400, 500, 600) if clients <= 3 else (500, 600, 900)
    blocks = Blocks.of({f"tensor{i}": torch.zeros(size) for i, size in enumerate(sizes)})
    common = torch.randn(2000, generator=generator, dtype=torch.float64)
    updates = common + 1.5 * torch.randn(clients, 2000, generator=generator, dtype=torch.float64)
    scale = torch.rand(2000, generator=generator, dtype=torch.float64) + 0.5
    coupling = 0.03 * common  # along the updates, so that what is between blocks is not small beside what is within
    counts = [3 + k for k in range(clients)]
    return Problem(blocks, updates, counts, scale, coupling)


def sharing_of(scheme: Scheme, clients: int, order: np.ndarray) -> Sharing:
    """The production code's name for a scheme; ``order`` is the random order of the round."""
    match scheme.kind:
        case "shared" | "one bit shared":
            return Synchronized()
        case "correlated":
            return Correlated(float(scheme.rho))
        case "groups":
            return Groups({client: 70 + group_of(client) for client in range(clients)})
        case "random groups":
            return Groups({client: 70 + group_of(int(place)) for client, place in enumerate(order)})
        case _:
            return Independent()


def production_excess(
    scheme: Scheme, case: Problem, keep: float, seed: int, first_round: int, count: int
) -> np.ndarray:
    """½ δᵀHδ for δ = masked − dense mean, over ``count`` rounds of the production masks and mean.

    E l(θ − masked) − l(θ − dense) is the expectation of this, for the first-order term has mean zero.
    """
    clients = range(len(case.updates))
    blocks = case.blocks.at("model") if scheme.kind.startswith("one bit") else case.blocks
    dense = masked_mean(case.updates, blocks, counts=case.counts, statistics="none").mean
    means = torch.empty(count, blocks.parameters, dtype=torch.float64)
    scale = keep if scheme.rescaled else 1.0
    random = np.random.default_rng([seed, first_round])
    for row in range(count):
        sharing = sharing_of(scheme, len(clients), random.permutation(len(clients)))
        if scheme.kind == "fixed":
            where = {"seed": seed, "round_": first_round + row, "blocks": blocks.count}
            masks = np.stack(
                [fixed_size_mask(client=k, kept=round(keep * blocks.count), sharing=sharing, **where) for k in clients]
            )
        else:
            masks = cohort_masks(
                seed=seed, round_=first_round + row, clients=clients, blocks=blocks.count, p=keep, sharing=sharing
            )
        means[row] = masked_mean(case.updates, blocks, counts=case.counts, masks=masks, p=scale, statistics="none").mean
    return case.form(means - dense).numpy() / 2


def largest_excess(scheme: Scheme, case: Problem, keep: float) -> float:
    """The largest value that :func:`production_excess` can take, over all 2^(clients·B) masks; a hair above it."""
    form = case.parts()
    bits = np.indices((2,) * len(form), dtype=np.int8).reshape(len(form), -1).T
    offsets = bits / (keep if scheme.rescaled else 1.0) - 1
    return float(np.einsum("mi,mi->m", offsets @ form, offsets).max()) / 2 * (1 + 1e-9)
