"""What the paper's second-order expansion says on the real network, and how far it holds.

From a run's weights after some round the next round's cohort trains once. At the mean update's end point
θ − Δ̄ the updates' curvature Gram matrices, in the Hessian and in the generalized Gauss-Newton matrix of the
global loss (on a stated sample of the training images), give the exact recovery factor R_shr/R_ind beside the
Euclidean 1/Δ_S, block by block. Then the excess loss that masks really cause is measured with masks of the
production code, for the updates and for smaller multiples of them, and laid beside R_ind and R_shr.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from rich.progress import Progress
from scipy import special
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedmask import (
    GramMatrices,
    Independent,
    Synchronized,
    cohort_masks,
    masked_mean,
    recovery_factor,
    recovery_factor_interval,
    recovery_factor_per_block,
)
from fedmask.curvature import (
    Curvature,
    CurvatureGram,
    Objective,
    curvature_gram,
    independent_penalty,
    interval_over_draws,
    shared_penalty,
)
from fedmask.errors import FedmaskError
from fedmask.federated.training import initial_model, one_thread
from fedmask.randomness import Purpose, permutation
from validation.attribution import State, tracked, where

__all__ = ["CURVATURES", "SHARINGS", "measure_curvature"]

CURVATURES: tuple[Curvature, ...] = ("hessian", "ggn")
SHARINGS = {"independent": Independent(), "synchronized": Synchronized()}
P = 0.5
LEVEL = 0.95


def measure_curvature(
    state: State,
    *,
    images: int = 1000,
    draws: int = 4,
    pairs: int = 16,
    scales: Sequence[float] = (1.0, 0.5, 0.25),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Recovery factors in three norms, and the excess loss beside the penalties; JSON values.

    Args:
        state: weights of a run after a round.
        images: how many training images stand for the global objective.
        draws: random block signs for each curvature (:func:`fedmask.curvature.curvature_gram`).
        pairs: masks for each sharing, each with its complement, so that every odd term of the excess cancels.
        scales: multiples of the updates at which the excess is measured.
        progress: where to show how far it is.

    Raises:
        FedmaskError: if there are fewer training images, or fewer than two draws or pairs.
    """
    if not 1 <= images <= len(state.data.train_labels):
        raise FedmaskError(f"images is {images}; {state.data.name} has 1 to {len(state.data.train_labels)} to train on")
    if pairs < 2:
        raise FedmaskError(f"pairs is {pairs}; an interval needs two or more")
    if draws < 2:
        raise FedmaskError(f"draws is {draws}; an interval needs two or more")
    updates, counts = _train_cohort(state, progress)
    blocks, cohort = state.trainer.blocks, state.cohort
    dense = masked_mean(updates, blocks, counts=counts, clients=cohort)
    assert dense.gram is not None
    end = state.weights - dense.mean
    model = initial_model(state.config, state.data).to(end.device).eval()
    chosen = permutation(state.config.seed, Purpose.POOLED_SHARDS, len(state.data.train_labels), draw=2)[:images]
    inputs, labels = state.trainer.samples(chosen)
    grams = {"euclidean": dense.gram}
    objective = Objective(model, inputs, labels, batch_size=250)
    for name in CURVATURES:
        with _shown(progress, f"products with the {name}") as told:
            grams[name] = curvature_gram(
                objective,
                updates,
                blocks,
                curvature=name,
                method="signs",
                at=end,
                draws=draws,
                seed=state.config.seed,
                counts=counts,
                clients=cohort,
                on_progress=told,
            )
    return {
        "kind": "curvature",
        **where(state),
        "clients": len(cohort),
        "images": images,
        "draws": draws,
        "p": P,
        "blocks": list(blocks.block_names),
        "norms": {name: _norm(gram) for name, gram in grams.items()},
        "excess": _excess(state, model, updates, counts, dense.mean, (inputs, labels), pairs, scales, progress),
        "penalties": {
            name: {"independent": independent_penalty(grams[name], P), "synchronized": shared_penalty(grams[name], P)}
            for name in CURVATURES
        },
    }


def _train_cohort(state: State, progress: Progress | None) -> tuple[Float[Tensor, "clients parameters"], list[int]]:
    updates = torch.empty(len(state.cohort), len(state.weights), dtype=state.weights.dtype, device=state.weights.device)
    counts = []
    for row, client in enumerate(tracked(state.cohort, progress, "the cohort trains")):
        with one_thread():
            report = state.trainer.train(state.round + 1, client, state.weights, state.buffers, updates[row])
        counts.append(report.samples)
    return updates, counts


def _norm(gram: GramMatrices) -> dict[str, Any]:
    """Factors of the whole and of each block, weighted, and each block's share of R_ind."""
    shares = gram.sums().weighted_squared_norms
    if isinstance(gram, CurvatureGram):
        interval = interval_over_draws(gram, _weighted_factor, level=LEVEL)
        penalties = [interval_over_draws(gram, lambda g, f=f: f(g, P)) for f in (independent_penalty, shared_penalty)]
        signs = {
            "independent_interval": (penalties[0].low, penalties[0].high),
            "shared_interval": (penalties[1].low, penalties[1].high),
        }
    else:
        interval, signs = recovery_factor_interval(gram, weighted=True, level=LEVEL), {}
    factors = recovery_factor_per_block(gram, weighted=True)
    return {
        "factor": _weighted_factor(gram),
        "factor_unweighted": float(recovery_factor(gram)),
        "interval": (interval.low, interval.high),
        "block_shares": [float(x) for x in shares / shares.sum()],
        "block_factors": [None if np.isnan(x) else float(x) for x in factors],
        **signs,
    }


def _weighted_factor(gram: GramMatrices) -> float:
    return float(recovery_factor(gram, weighted=True))


@contextmanager
def _shown(progress: Progress | None, title: str) -> Iterator[Callable[[int, int], None] | None]:
    if progress is None:
        yield None
        return
    task = progress.add_task(title)
    yield lambda done, all_: progress.update(task, completed=done, total=all_)


def _excess(
    state: State,
    model: nn.Module,
    updates: Float[Tensor, "clients parameters"],
    counts: Sequence[int],
    mean: Float[Tensor, " parameters"],
    sample: tuple[Tensor, Int64[Tensor, " samples"]],
    pairs: int,
    scales: Sequence[float],
    progress: Progress | None,
) -> list[dict[str, Any]]:
    """E l(θ − sΔ̃) − l(θ − sΔ̄) for each sharing and scale s, with asymptotic intervals over pairs of masks."""
    blocks, cohort = state.trainer.blocks, state.cohort

    def loss(step: Tensor) -> float:
        return _loss(model, blocks.views(state.weights - step), sample)

    dense = [loss(scale * mean) for scale in scales]
    found = {(name, scale): np.empty(pairs) for name in SHARINGS for scale in scales}
    masked = torch.empty_like(mean)
    for pair in tracked(range(pairs), progress, "masks"):
        for name, sharing in SHARINGS.items():
            masks = cohort_masks(
                seed=state.config.seed, round_=pair, clients=cohort, blocks=blocks.count, p=P, sharing=sharing
            )
            masked_mean(updates, blocks, counts=counts, clients=cohort, masks=masks, p=P, statistics="none", out=masked)
            # At p = ½ the complementary masks' mean is 2Δ̄ less this one.
            for scale, without in zip(scales, dense, strict=True):
                both = loss(scale * masked) + loss(scale * (2 * mean - masked))
                found[name, scale][pair] = both / 2 - without
    return [
        {"sharing": name, "scale": scale, "excess": float(values.mean()), "interval": _asymptotic(values)}
        for (name, scale), values in found.items()
    ]


def _loss(model: nn.Module, parameters: dict[str, Tensor], sample: tuple[Tensor, Tensor]) -> float:
    """The mean loss over the sample, summed in float64."""
    total = 0.0
    inputs, labels = sample
    with torch.no_grad():
        for part, wanted in zip(inputs.split(250), labels.split(250), strict=True):
            scores = torch.func.functional_call(model, parameters, (part,))
            total += float(cross_entropy(scores, wanted, reduction="none").double().sum())
    return total / len(labels)


def _asymptotic(values: Float64[np.ndarray, " pairs"]) -> tuple[float, float]:
    reach = special.stdtrit(len(values) - 1, (1 + LEVEL) / 2) * values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean() - reach), float(values.mean() + reach)
