"""Quadratic losses with exact rational numbers, and expectations over all masks as finite sums.

l(θ) = ½ θᵀHθ + gᵀθ with rational H and g; updates and probabilities are rational too, so that a claim about
an expectation is checked by ``==``.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from random import Random

__all__ = ["Instance", "Vector", "all_masks", "dot", "draw_instance", "expected", "masked_mean", "mean"]

Vector = list[Fraction]
Mask = tuple[tuple[int, ...], ...]  # [client][block]


@dataclass(frozen=True)
class Instance:
    """A quadratic problem: Hessian, gradient at 0, position, block of each coordinate, updates, weights, p."""

    hessian: list[Vector]
    gradient: Vector
    theta: Vector
    owner: tuple[int, ...]
    updates: list[Vector]
    weights: Vector
    p: Fraction

    @property
    def blocks(self) -> int:
        """B."""
        return max(self.owner) + 1

    @property
    def clients(self) -> int:
        """K_c."""
        return len(self.updates)

    def loss(self, theta: Vector) -> Fraction:
        """l(θ)."""
        return self.form(theta, theta) / 2 + dot(self.gradient, theta)

    def form(self, u: Vector, v: Vector) -> Fraction:
        """uᵀHv."""
        return sum((u[i] * dot(self.hessian[i], v) for i in range(len(u))), Fraction(0))

    def block_form(self, u: Vector, v: Vector) -> Fraction:
        """Σ_b u^(b)ᵀ H_bb v^(b)."""
        return sum((self.form(self.block(u, b), self.block(v, b)) for b in range(self.blocks)), Fraction(0))

    def block(self, u: Vector, b: int) -> Vector:
        """u with all coordinates outside block b set to zero."""
        return [x if owner == b else Fraction(0) for x, owner in zip(u, self.owner, strict=True)]

    def after(self, step: Vector) -> Fraction:
        """l(θ − step)."""
        return self.loss([t - s for t, s in zip(self.theta, step, strict=True)])


def draw_instance(
    random: Random,
    *,
    clients: int | None = None,
    definite: bool | None = None,
    uniform: bool = False,
    least_blocks: int = 1,
    owner: tuple[int, ...] | None = None,
) -> Instance:
    """A small instance of random integers over small denominators: one to three clients, one to three blocks.

    Args:
        random: the source, which may be hypothesis's, so that failures shrink.
        clients: K_c, if not drawn.
        definite: a positive definite Hessian (True), any symmetric one (None).
        uniform: equal weights.
        least_blocks: the fewest blocks.
        owner: the block of each coordinate, if not drawn.
    """
    blocks = random.randint(least_blocks, 3)
    k = random.randint(1, 3) if clients is None else clients
    drawn = tuple(b for b in range(blocks) for _ in range(random.randint(1, 2)))
    owner = drawn if owner is None else owner
    d = len(owner)

    def number() -> Fraction:
        return Fraction(random.randint(-6, 6), random.choice((1, 2, 3)))

    a = [[number() for _ in range(d)] for _ in range(d)]
    if definite:
        hessian = [[dot(a[i], a[j]) + (1 if i == j else 0) for j in range(d)] for i in range(d)]
    else:
        hessian = [[a[i][j] + a[j][i] for j in range(d)] for i in range(d)]
    counts = [Fraction(1) if uniform else Fraction(random.randint(1, 5)) for _ in range(k)]
    return Instance(
        hessian=hessian,
        gradient=[number() for _ in range(d)],
        theta=[number() for _ in range(d)],
        owner=owner,
        updates=[[number() for _ in range(d)] for _ in range(k)],
        weights=[count / sum(counts) for count in counts],
        p=Fraction(random.randint(1, 9), 10),
    )


def dot(u: Vector, v: Vector) -> Fraction:
    """⟨u, v⟩."""
    return sum((x * y for x, y in zip(u, v, strict=True)), Fraction(0))


def mean(instance: Instance) -> Vector:
    """Σ a_k Δ_k."""
    return [
        sum((a * u[i] for a, u in zip(instance.weights, instance.updates, strict=True)), Fraction(0))
        for i in range(len(instance.owner))
    ]


def masked_mean(instance: Instance, mask: Mask, scale: Fraction | None = None) -> Vector:
    """Σ a_k (m_k^(b)/p) Δ_k^(b); ``scale`` in place of 1/p for mutants."""
    factor = 1 / instance.p if scale is None else scale
    return [
        sum(
            (
                a * factor * u[i]
                for a, u, m in zip(instance.weights, instance.updates, mask, strict=True)
                if m[instance.owner[i]]
            ),
            Fraction(0),
        )
        for i in range(len(instance.owner))
    ]


def all_masks(instance: Instance, shared: bool) -> Iterator[tuple[Fraction, Mask]]:
    """Every mask of the cohort with its probability: B bits if shared, K_c·B if independent."""
    rows = 1 if shared else instance.clients
    for bits in itertools.product((0, 1), repeat=rows * instance.blocks):
        kept = sum(bits)
        probability = instance.p**kept * (1 - instance.p) ** (len(bits) - kept)
        table = tuple(bits[r * instance.blocks : (r + 1) * instance.blocks] for r in range(rows))
        yield probability, table * instance.clients if shared else table


def expected(masks: Iterator[tuple[Fraction, Mask]], value: Callable[[Mask], Fraction]) -> Fraction:
    """Σ probability · value: the expectation, exactly."""
    return sum((probability * value(mask) for probability, mask in masks), Fraction(0))
