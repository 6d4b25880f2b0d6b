"""Several rounds on a quadratic: what masking does to the iterates' mean and covariance, and when it stays bounded."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from random import Random
from typing import Any

import numpy as np
import sympy as sp
import torch

from fedmask import Blocks, cohort_masks, masked_mean
from theory.checking import for_all, identical, sampled_outcome
from theory.quadratics import Instance, draw_instance, expected
from theory.quadratics import masked_mean as exact_masked_mean
from theory.registry import Claim, Context, Outcome, Step
from theory.schemes import Scheme, exact_masks
from theory.sequences import sampled_mean_equals

__all__ = ["CLAIMS"]

Array = Any  # of Fraction (dtype object) or float64: the same arithmetic serves both


@dataclass(frozen=True)
class Federation:
    """Clients with l_k(θ) = ½(θ − c_k)ᵀH(θ − c_k), one gradient step a round: Δ_k = ηH(θ − c_k)."""

    hessian: Array  # (d, d)
    minima: Array  # (clients, d), c_k
    weights: Array  # (clients,), a_k
    owner: Array  # (d,), block of each coordinate
    p: Any
    rate: Any  # η
    shared: bool  # one mask for all clients

    def updates(self, theta: Array) -> Array:
        """(…, clients, d), Δ_k at θ of (…, 1, d) or (d,)."""
        return self.rate * ((theta - self.minima) @ self.hessian)

    def excesses(self, thetas: Array, center: Array) -> Array:
        """(count,), ½(θ − θ̄)ᵀH(θ − θ̄) of each row: its expectation is E l(θ) − l(θ̄)."""
        gaps = thetas - center
        return ((gaps @ self.hessian) * gaps).sum(axis=-1) / 2


@dataclass(frozen=True)
class Recursion:
    """Σ_{t+1} from Σ_t: ``noise`` is the factor before the masked part, the rest what enters it."""

    noise: Callable[[Any], Any]
    mean_too: bool = True
    blockwise: bool = True
    power: int = 2  # of a_k

    def advance(self, f: Federation, center: Array, sigma: Array) -> tuple[Array, Array]:
        """(θ̄, Σ) after one more round."""
        h, step = f.hessian, np.array([[int(i == j) for j in range(len(center))] for i in range(len(center))])
        a = step - f.rate * h
        if f.shared:
            parts = [(1, center - f.weights @ f.minima)]
        else:
            parts = [(w**self.power, center - c) for w, c in zip(f.weights, f.minima, strict=True)]
        second = sum(w * (sigma + (np.outer(gap, gap) if self.mean_too else 0)) for w, gap in parts)
        masked = f.rate**2 * (h @ second @ h)
        same = (f.owner[:, None] == f.owner) if self.blockwise else np.ones_like(masked, dtype=bool)
        moved = a @ sigma @ a.T + self.noise(f.p) * np.where(same, masked, 0)
        return center - f.weights @ f.updates(center), moved


def rounds_exhaustive(formula: Recursion, context: Context) -> Outcome:
    """Two rounds of two clients, every sequence of masks, in rationals: mean, covariance and excess loss."""

    def draw(random: Random) -> tuple[Instance, Federation]:
        owner = random.choice(((0,), (0, 1), (0, 0, 1)))
        instance = draw_instance(random, definite=True, clients=2, owner=owner)
        f = Federation(
            np.array(instance.hessian, dtype=object),
            np.array(instance.updates, dtype=object),
            np.array(instance.weights, dtype=object),
            np.array(owner),
            instance.p,
            Fraction(1, random.randint(3, 9)),
            random.choice((True, False)),
        )
        return instance, replace(f, minima=f.minima + np.array([[5], [-1]]))

    def holds(case: tuple[Instance, Federation]) -> bool:
        instance, f = case
        center = np.array(instance.theta, dtype=object)
        sigma = 0 * np.outer(center, center)
        states: list[tuple[Fraction, Array]] = [(Fraction(1), center)]
        for _ in range(2):
            advanced = []
            for chance, theta in states:
                updates = [list(u) for u in f.updates(theta)]
                here = replace(instance, updates=updates, theta=list(theta))
                for weight, mask in exact_masks(Scheme("shared" if f.shared else "independent"), here):
                    step = np.array(exact_masked_mean(here, mask), dtype=object)
                    advanced.append((chance * weight, theta - step))
            states = advanced
            center, sigma = formula.advance(f, center, sigma)
        average = sum(c * theta for c, theta in states)
        covariance = sum(c * np.outer(theta - average, theta - average) for c, theta in states)
        excess = sum(c * f.excesses(theta, average) for c, theta in states)
        return bool(
            np.all(average == center)
            and np.all(covariance == sigma)
            and excess == np.trace(f.hessian @ sigma) / 2
        )  # fmt: skip

    return for_all(draw, holds, context, "rounds", count=8)


def rounds_monte_carlo(formula: Recursion, context: Context) -> Outcome:
    """Three rounds of two clients with masks of their own, by the production masks and mean, in 400 dimensions."""
    random = context.numpy("many rounds")
    seed, rounds, sizes = int(random.integers(2**62)), 3, (150, 250)
    d = sum(sizes)
    blocks = Blocks.of({f"tensor{i}": torch.zeros(size) for i, size in enumerate(sizes)})
    v = random.standard_normal(d) / np.sqrt(d)
    f = Federation(
        np.diag(0.5 + random.random(d)) + 0.5 * np.outer(v, v),
        random.standard_normal((2, d)),
        np.array([0.4, 0.6]),
        np.repeat(np.arange(len(sizes)), sizes),
        0.6,
        0.7,
        False,
    )
    start = center = random.standard_normal(d)
    sigma = np.zeros((d, d))
    for _ in range(rounds):
        center, sigma = formula.advance(f, center, sigma)
    claimed = float(np.trace(f.hessian @ sigma)) / 2
    dense, done = start, 0
    for _ in range(rounds):
        dense = dense - f.weights @ f.updates(dense)

    def draw(count: int) -> Array:
        nonlocal done
        thetas = _simulated(f, blocks, start, rounds, seed, done, count)
        done += count
        return f.excesses(thetas, dense)

    bound = float(f.excesses(_all_ends(f, start, rounds), dense).max()) * (1 + 1e-9)
    sampled = sampled_mean_equals(
        draw, claimed, bounds=(0.0, bound), tolerance=0.15 * abs(claimed), alpha=context.alpha, most=6000
    )
    return sampled_outcome(sampled, claimed)


def _simulated(f: Federation, blocks: Blocks, start: Array, rounds: int, seed: int, first: int, count: int) -> Array:
    """(count, d): where ``count`` simulations end, each round by the production masks and masked mean."""
    thetas, counts = np.tile(start, (count, 1)), (1000 * f.weights).tolist()
    for t in range(rounds):
        updates = torch.from_numpy(f.updates(thetas[:, None, :]))
        for row in range(count):
            masks = cohort_masks(
                seed=seed, round_=(first + row) * rounds + t, clients=range(len(counts)), blocks=blocks.count, p=f.p
            )
            step = masked_mean(updates[row], blocks, counts=counts, masks=masks, p=f.p, statistics="none").mean
            thetas[row] -= step.numpy()
    return thetas


def _all_ends(f: Federation, start: Array, rounds: int) -> Array:
    """Where every sequence of the clients' masks ends."""
    clients, blocks = len(f.weights), int(f.owner.max()) + 1
    bits = np.indices((2,) * (clients * blocks)).reshape(clients, blocks, -1).transpose(2, 0, 1) / f.p
    ends = start[None]
    for _ in range(rounds):
        weighted = f.weights[:, None] * f.updates(ends[:, None, :])  # (ends, clients, d)
        ends = np.concatenate([ends - np.einsum("ekd,kd->ed", weighted, mask[:, f.owner]) for mask in bits])
    return ends


# How large the learning rate may be.


def stability_exhaustive(formula: Callable[[Any, Any], Any], context: Context) -> Outcome:
    """Over all masks, in rationals: below the claimed ηλ the expected loss falls on any blocks; at it, it stays.

    λ is a bound of H's largest eigenvalue, its largest absolute row sum. At the claimed value the expected loss
    of H = λI with one block is what it was: no larger rate will do.
    """

    def holds(instance: Instance) -> bool:
        kappa = sum((a**2 for a in instance.weights), Fraction(0))
        limit = Fraction(formula(instance.p, kappa))
        bound = max(sum(abs(x) for x in row) for row in instance.hessian)
        flat = replace(
            instance,
            owner=(0,) * len(instance.owner),
            hessian=[
                [bound if i == j else Fraction(0) for j in range(len(row))] for i, row in enumerate(instance.hessian)
            ],
        )
        return _after_step(instance, limit * Fraction(99, 100) / bound) < _loss(instance) and (
            _after_step(flat, limit / bound) == _loss(flat)
        )

    def draw(random: Random) -> Instance:
        instance = draw_instance(random, definite=True, clients=random.randint(1, 3))
        return replace(instance, gradient=[Fraction(0)] * len(instance.owner), theta=[x + 7 for x in instance.theta])

    return for_all(draw, holds, context, "stability")


def _loss(instance: Instance) -> Fraction:
    return instance.loss(instance.theta)


def _after_step(instance: Instance, rate: Fraction) -> Fraction:
    """E l after one masked gradient step of every client, with independent masks."""
    h, theta = np.array(instance.hessian, dtype=object), np.array(instance.theta, dtype=object)
    here = replace(instance, updates=[list(rate * (h @ theta))] * instance.clients)
    return expected(exact_masks(Scheme("independent"), here), lambda mask: here.after(exact_masked_mean(here, mask)))


def stability_symbolic(formula: Callable[[Any, Any], Any], context: Context) -> Outcome:
    """For one block E θ'² = θ²·[(1−x)² + κ(1−p)/p x²], x = ηλ: less than θ² just for x between 0 and the limit."""
    x, p, kappa = sp.symbols("x p kappa", positive=True)
    growth = (1 - x) ** 2 + kappa * (1 - p) / p * x**2
    slope = 1 + kappa * (1 - p) / p
    return identical(growth - 1 + x * slope * (formula(p, kappa) - x), "identity in x, p and κ")


def rounds_steps() -> list[Step]:
    """Mean and covariance of one round."""
    p = sp.Symbol("p", positive=True)
    return [
        Step("θ' = θ − Σ_k a_k Σ_b (m_kb/p) P_b u_k with u_k = ηH(θ − c_k); E m/p = 1, so E θ' is the dense iterate"),
        Step("Given θ, the covariance of θ' is (Var m)/p² Σ_k a_k² Σ_b P_b u_k u_kᵀ P_b, with (Var m)/p²", (1 - p) / p),
        Step("E (θ − c_k)(θ − c_k)ᵀ = Σ + (θ̄ − c_k)(θ̄ − c_k)ᵀ; the dense part moves Σ to AΣAᵀ: the recursion"),
        Step("l is quadratic: E l(θ_T) − l(θ̄_T) = ½ tr(HΣ_T)"),
    ]


def stability_steps() -> list[Step]:
    """The loss as a Lyapunov function."""
    x, p, kappa = sp.symbols("x p kappa", positive=True)
    growth = (1 - x) ** 2 + kappa * (1 - p) / p * x**2
    return [
        Step("At a common minimum 0 all clients step ηHθ; M = Σ_k a_k m_k/p has E M = I and"),
        Step("E MHM = H + κ(1−p)/p · blockdiag(H), and each of the two is at most λI, for H ⪰ 0 and any blocks"),
        Step("So E θ'ᵀHθ' ≤ θᵀHθ − 2η‖Hθ‖² + η²λ(1 + κ(1−p)/p)‖Hθ‖², less than θᵀHθ below the limit"),
        Step("One block and H = λI, x = ηλ: E θ'²/θ²", growth),
        Step("is one at", sp.factor(sp.solve(growth - 1, x)[0])),
    ]


RECURSION = Recursion(lambda p: (1 - p) / p)


def _limit(p: Any, kappa: Any) -> Any:
    return 2 / (1 + kappa * (1 - p) / p)


CLAIMS = (
    Claim(
        "many-rounds",
        "On a quadratic the mean iterate is the dense one and only the covariance grows",
        "beyond the paper",
        "Σ' = AΣAᵀ + (1−p)/p η² Σ_k a_k² Σ_b P_bH(Σ + (θ̄−c_k)(θ̄−c_k)ᵀ)HP_b, A = I − ηH; E l(θ_T) − l(θ̄_T) = ½tr(HΣ_T)",
        RECURSION,
        {"exhaustive": rounds_exhaustive, "monte carlo": rounds_monte_carlo},
        {
            "coefficient (1−p)/(2p)": replace(RECURSION, noise=lambda p: (1 - p) / (2 * p)),
            "without the mean": replace(RECURSION, mean_too=False),
            "not block by block": replace(RECURSION, blockwise=False),
            "weights not squared": replace(RECURSION, power=1),
        },
        ("l_k = ½(θ−c_k)ᵀH(θ−c_k), one masked gradient step a round", "shared mask: one term, of Σa_kc_k"),
        rounds_steps,
        "Σ_T stays bounded just if Σ → AΣAᵀ + κ(1−p)/p η² Σ_b P_bHΣHP_b has spectral radius below one, "
        "κ = Σa_k², or 1 with a shared mask; see learning-rate.",
    ),
    Claim(
        "learning-rate",
        "Masked steps stay bounded below a learning rate that masking lowers, and a shared mask lowers most",
        "beyond the paper",
        "ηλ < 2/(1 + κ(1−p)/p) suffices for any blocks, λ the largest eigenvalue of H ⪰ 0; sharp for one block. "
        "κ = Σa_k² for independent masks, 1 for a shared one: then ηλ < 2p",
        _limit,
        {"symbolic": stability_symbolic, "exhaustive": stability_exhaustive},
        {
            "2, as without masks": lambda p, kappa: 2 + 0 * p,
            "2p whatever the cohort": lambda p, kappa: 2 * p,
            "coefficient (1−p)/(2p)": lambda p, kappa: 2 / (1 + kappa * (1 - p) / (2 * p)),
        },
        ("one masked gradient step a round", "a common minimum; otherwise the covariance tends to a finite one"),
        stability_steps,
    ),
)
