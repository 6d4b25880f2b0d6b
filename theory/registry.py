"""What a claim is: a statement, a right formula, checks at some levels, and wrong formulas that they must reject.

A check takes the formula that it is to test, so the same code that confirms the right one is seen to reject
each mutant.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, TypeAlias

import numpy as np

__all__ = ["LEVELS", "Claim", "Context", "Level", "Outcome", "Step"]

Level: TypeAlias = Literal["symbolic", "exhaustive", "monte carlo", "network"]
LEVELS: tuple[Level, ...] = ("symbolic", "exhaustive", "monte carlo", "network")

# All statistical checks together raise a false alarm with at most this probability.
ERROR_BUDGET = 1e-6
_STATISTICAL_CHECKS = 64


@dataclass(frozen=True)
class Context:
    """What a check may draw on: a seed that replays it, and its share of the suite's error budget."""

    seed: int
    alpha: float = ERROR_BUDGET / _STATISTICAL_CHECKS

    def random(self, name: str) -> Random:
        """Python randomness for exact rational instances, a stream of its own for each name."""
        return Random(f"{self.seed} {name}")

    def numpy(self, name: str) -> np.random.Generator:
        """NumPy randomness, a stream of its own for each name."""
        return np.random.default_rng([self.seed, *name.encode()])


@dataclass(frozen=True)
class Outcome:
    """What a check found.

    Attributes:
        passed: whether the formula it was given agrees with what it found.
        found: in words or numbers, for the table.
        interval: for a sampled quantity, the confidence interval relative to the claimed value.
        samples: masks, instances or points looked at.
    """

    passed: bool
    found: str
    interval: tuple[float, float] | None = None
    samples: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain values for strict JSON."""
        return {
            "verdict": "pass" if self.passed else "fail",
            "found": self.found,
            "interval": None if self.interval is None else [x if math.isfinite(x) else None for x in self.interval],
            "samples": self.samples,
        }


@dataclass(frozen=True)
class Step:
    """One line of a derivation: what is done, and the expression that it gives (sympy, or text)."""

    text: str
    expression: Any = None


Check: TypeAlias = Callable[[Any, Context], Outcome]


@dataclass(frozen=True)
class Claim:
    """A claim with its checks and its mutants.

    Attributes:
        id: short name for the command line.
        title: one line.
        place: where the paper has it (equation), or "beyond the paper".
        statement: the formula in plain mathematics.
        assumptions: what it needs.
        formula: the right version, in whatever form the checks take.
        checks: level → check.
        mutants: name → a wrong version of ``formula``.
        derivation: the steps of the proof, for ``python -m theory show``.
        note: what to know beside, such as where the paper's wording is not enough.
    """

    id: str
    title: str
    place: str
    statement: str
    formula: Any
    checks: Mapping[Level, Check]
    mutants: Mapping[str, Any]
    assumptions: tuple[str, ...] = ()
    derivation: Callable[[], list[Step]] | None = None
    note: str = ""

    def verify(self, seed: int) -> Iterator[tuple[Level, Outcome]]:
        """Run each check on the right formula."""
        for level, check in self.checks.items():
            yield level, check(self.formula, Context(seed))

    def kills(self, seed: int) -> dict[str, list[Level]]:
        """For each mutant, the levels that reject it."""
        return {
            name: [level for level, check in self.checks.items() if not check(mutant, Context(seed)).passed]
            for name, mutant in self.mutants.items()
        }
