"""Ways of checking that many claims share: symbolic identity, exact instances, sampled means."""

from collections.abc import Callable
from random import Random
from typing import Any, TypeVar

import sympy as sp

from theory.registry import Context, Outcome
from theory.sequences import Sampled

__all__ = ["INSTANCES", "for_all", "identical", "sampled_outcome"]

T = TypeVar("T")
INSTANCES = 25


def identical(difference: sp.Expr | list[sp.Expr], what: str) -> Outcome:
    """Pass if an expression (or each of several) simplifies to zero."""
    differences = difference if isinstance(difference, list) else [difference]
    for expression in differences:
        rest = sp.simplify(sp.factor(sp.together(sp.expand(expression))))
        if rest != 0:
            return Outcome(False, f"differs by {_short(rest)}")
    return Outcome(True, what)


def for_all(
    draw: Callable[[Random], T], holds: Callable[[T], bool], context: Context, name: str, *, count: int = INSTANCES
) -> Outcome:
    """Pass if ``holds`` on every one of ``count`` random exact instances."""
    random = context.random(name)
    for tried in range(1, count + 1):
        instance = draw(random)
        if not holds(instance):
            return Outcome(False, f"fails at instance {tried}", samples=tried)
    return Outcome(True, "equal in exact rationals", samples=count)


def sampled_outcome(sampled: Sampled, claimed: float) -> Outcome:
    """A sampled mean as an outcome, its interval relative to the claimed value."""
    scale = abs(claimed) if claimed else 1.0
    low, high = (1 + x / scale for x in sampled.interval)
    words = f"ratio to claim in [{low:.3f}, {high:.3f}]"
    return Outcome(sampled.equal, words, (low, high), sampled.samples)


def _short(expression: Any) -> str:
    text = str(expression)
    return text if len(text) <= 60 else text[:57] + "..."
