"""The server's step: a masked, weighted mean of updates, and what one pass over them tells.

The mean is Σ_k a_k (m_k^(b)/p_b) Δ_k^(b) with a_k = n_k/Σn (paper, eq. 2, weighted). Dropped blocks are
selected away, never multiplied by zero, so what is in them cannot reach the mean. All sums are float64;
the mean comes back in the updates' type, at least float32.

:func:`masked_mean` takes the whole cohort as one (K_c, d) buffer. :class:`StreamingAggregator` takes one
client at a time and needs memory for d, whatever the cohort.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from fedmask.blocks import Blocks
from fedmask.errors import FedmaskError, NonFiniteUpdateError
from fedmask.gram import CohortSums, GramMatrices, check_counts, check_statistics_blocks, check_updates
from fedmask.masks import Probability, keep_probabilities
from fedmask.passes import (
    Found,
    MeanOf,
    Statistics,
    add_to_stream,
    chunks,
    fresh,
    mean_type,
    one_pass,
    scaled,
    squared_norms,
)

__all__ = ["Aggregate", "OnNonfinite", "StreamingAggregator", "masked_mean"]

OnNonfinite: TypeAlias = Literal["error", "skip"]


@dataclass(frozen=True)
class Aggregate:
    """The outcome of one pass.

    Attributes:
        mean: (d,), the masked weighted mean of the updates; the server's step is θ − mean.
        gram: Gram matrices of the unmasked updates (batch), or None if not asked for or streamed.
        sums: per-block sums of the unmasked updates, or None if statistics were not asked for.
        skipped: ids of clients left out for a non-finite update, the rest reweighted.
    """

    mean: Float[Tensor, " parameters"]
    gram: GramMatrices | None
    sums: CohortSums | None
    skipped: tuple[int, ...] = ()


def masked_mean(
    updates: Float[Tensor, "clients parameters"],
    blocks: Blocks,
    *,
    counts: Sequence[int | float] | None = None,
    clients: Sequence[int] | None = None,
    masks: Bool[np.ndarray, "clients blocks"] | None = None,
    p: Probability = 1.0,
    statistics_blocks: Blocks | None = None,
    statistics: Statistics = "gram",
    on_nonfinite: OnNonfinite = "error",
    out: Tensor | None = None,
) -> Aggregate:
    """Masked weighted mean and statistics of a cohort, each update read once and none changed.

    Args:
        updates: (K_c, d) updates Δ_k = θ − θ_k, any floating type, any device.
        blocks: the blocks that masks are over.
        counts: sample counts n_k; all equal if None.
        clients: ids for messages and results; 0 … K_c−1 if None.
        masks: True where a client keeps a block; everything is kept if None.
        p: the probability with which a block is kept, above 0; kept blocks are scaled by 1/p.
        statistics_blocks: another cut of the same parameters for the statistics; if None, ``blocks``,
            or tensors where ``blocks`` are single elements.
        statistics: "gram" for Gram matrices, from which every statistic follows; "sums" for the sums per block
            that those without pairwise products need, in less time; with "none", dropped blocks are not even
            read, and NaN in them goes unseen.
        on_nonfinite: "error", or "skip" to leave the client out and reweight the rest.
        out: where to write the mean, contiguous and of its type; a new vector if None. A server that keeps
            one saves a model's size of fresh memory a round. After an error its values are undefined.

    Raises:
        NonFiniteUpdateError: naming client and block.
        FedmaskError: on an empty cohort, bad or all-zero counts, p outside (0, 1], or masks that do not fit.
        BlockError: if the updates' shape does not fit the blocks.
    """
    ids = tuple(range(len(updates))) if clients is None else tuple(clients)
    n = check_counts([1] * len(ids) if counts is None else counts, ids)
    check_updates(updates, blocks, ids)
    scale = _rescale(p, blocks.count)
    if masks is not None and masks.shape != (len(ids), blocks.count):
        raise FedmaskError(f"masks have shape {masks.shape}; ({len(ids)}, {blocks.count}) was expected")
    _check_choice("on_nonfinite", on_nonfinite, OnNonfinite)
    _check_choice("statistics", statistics, Statistics)
    if statistics_blocks is None:
        statistics_blocks = _statistics_blocks(blocks)
    check_statistics_blocks(statistics_blocks)
    if out is not None:
        _check_out(out, updates)
    mean = MeanOf(blocks, masks, 1 / (n.sum() * scale), out)
    found = one_pass(updates, statistics_blocks, n, statistics=statistics, mean=mean)
    assert found.mean is not None
    gram = None if found.gram is None else GramMatrices(found.gram, n, ids)
    norms = found.squared_norms if found.gram is None else np.einsum("bkk->bk", found.gram)
    if norms is not None:
        bad = _nonfinite(norms, statistics_blocks, ids)
    else:
        bad = {} if found.finite else _nonfinite_kept(updates, blocks, ids, masks)
    if not bad:
        return Aggregate(found.mean, gram, _sums(found, n) if gram is None else gram.sums())
    if on_nonfinite == "error":
        raise NonFiniteUpdateError(*next(iter(bad.items())))
    rows = [row for row, client in enumerate(ids) if client not in bad]
    if not rows:
        raise NonFiniteUpdateError(*next(iter(bad.items())), "NaN or infinity, as did all other clients,")
    rest = masked_mean(
        updates[rows],
        blocks,
        counts=n[rows].tolist(),
        clients=[ids[row] for row in rows],
        masks=None if masks is None else masks[rows],
        p=p,
        statistics_blocks=statistics_blocks,
        statistics=statistics,
        on_nonfinite=on_nonfinite,
        out=out,
    )
    return Aggregate(rest.mean, rest.gram, rest.sums, tuple(sorted({*bad, *rest.skipped})))


class StreamingAggregator:
    """The same mean and statistics, one client at a time, in O(d) memory whatever the cohort.

    The accumulators are float64: the same order gives the same bytes, and any order the same mean to one
    rounding of its type plus K_c·2⁻⁵²·Σ|a_kΔ_k|.

    >>> import torch
    >>> from fedmask.blocks import Blocks
    >>> stream = StreamingAggregator(Blocks.of({"weight": torch.zeros(2)}))
    >>> stream.add(torch.tensor([1.0, 0.0]), count=10, client=3)
    True
    >>> stream.add(torch.tensor([0.0, 1.0]), count=30, client=8)
    True
    >>> stream.result().mean
    tensor([0.2500, 0.7500])
    """

    def __init__(self, blocks: Blocks, *, p: Probability = 1.0, on_nonfinite: OnNonfinite = "error") -> None:
        """An empty cohort over ``blocks``; p and on_nonfinite as in :func:`masked_mean`."""
        _check_choice("on_nonfinite", on_nonfinite, OnNonfinite)
        self._blocks, self._statistics_blocks = blocks, _statistics_blocks(blocks)
        self._scale = _rescale(p, blocks.count)
        self._on_nonfinite = on_nonfinite
        self._masked: Tensor | None = None  # Σ n_k m_k Δ_k, until the first mask the same tensor as _weighted
        self._weighted: Tensor | None = None  # Σ n_k Δ_k
        self._plain: Tensor | None = None  # Σ Δ_k
        self._norms = np.zeros(self._statistics_blocks.count)
        self._weighted_norms = np.zeros(self._statistics_blocks.count)
        self._clients, self._total, self._total_squares = 0, 0.0, 0.0
        self._type = torch.float32
        self._skipped: list[int] = []

    def add(
        self,
        update: Float[Tensor, " parameters"] | Mapping[str, Tensor],
        *,
        count: int | float = 1,
        client: int | None = None,
        mask: Bool[np.ndarray, " blocks"] | None = None,
    ) -> bool:
        """Add one client's update, flat or by tensor name; the update is not changed.

        Returns:
            True if it was taken, False if it was skipped as non-finite.

        Raises:
            NonFiniteUpdateError, BlockError, FedmaskError: as :func:`masked_mean`; nothing was then added.
        """
        name = self._clients + len(self._skipped) if client is None else client
        flat = update if isinstance(update, Tensor) else self._blocks.flatten(update)
        check_updates(flat[None] if flat.ndim == 1 else flat, self._blocks, [name])
        if not 0 <= count < np.inf:
            raise FedmaskError(f"client {name} has weight {count}; a weight is a sample count, finite and not negative")
        if mask is not None and mask.shape != (self._blocks.count,):
            raise FedmaskError(f"client {name}'s mask has shape {mask.shape}; ({self._blocks.count},) was expected")
        norms = squared_norms(flat, self._statistics_blocks)
        if bad := _nonfinite(norms[:, None], self._statistics_blocks, (name,)):
            if self._on_nonfinite == "error":
                raise NonFiniteUpdateError(name, bad[name])
            self._skipped.append(name)
            return False
        self._accumulate(flat, float(count), mask)
        self._norms += norms
        self._weighted_norms += count**2 * norms
        self._clients += 1
        self._total += count
        self._total_squares += count**2
        self._type = torch.promote_types(self._type, flat.dtype)
        return True

    def result(self) -> Aggregate:
        """The mean and statistics of the clients so far; more may be added after.

        Raises:
            FedmaskError: if no client was taken or all weights are zero.
        """
        if self._clients == 0 or self._masked is None or self._weighted is None or self._plain is None:
            raise FedmaskError("the cohort is empty: there is no update to average; the model is unchanged")
        if not self._total > 0:
            raise FedmaskError(
                f"the weights of all {self._clients} clients are zero: their mean is undefined; the model is unchanged"
            )
        factors = 1 / (self._total * self._scale)
        mean = fresh(self._blocks.parameters, mean_type(self._type), self._masked.device)
        for chunk in chunks(self._masked[None], self._blocks):
            mean[chunk.start : chunk.stop] = scaled(chunk.values[0], chunk.place(self._blocks), factors)
        sums = CohortSums(
            clients=self._clients,
            effective_clients=self._total**2 / self._total_squares,
            squared_norms=self._norms.copy(),
            squared_norm_of_sum=squared_norms(self._plain, self._statistics_blocks),
            weighted_squared_norms=self._weighted_norms / self._total**2,
            squared_norm_of_weighted_sum=squared_norms(self._weighted, self._statistics_blocks) / self._total**2,
        )
        return Aggregate(mean, None, sums, tuple(self._skipped))

    def _accumulate(self, flat: Tensor, count: float, mask: Bool[np.ndarray, " blocks"] | None) -> None:
        if self._weighted is None or self._plain is None or self._masked is None:
            self._weighted, self._plain = (
                fresh(self._blocks.parameters, torch.float64, flat.device).zero_() for _ in range(2)
            )
            self._masked = self._weighted
        if mask is not None and self._masked is self._weighted:
            self._masked = fresh(self._blocks.parameters, torch.float64, flat.device).copy_(self._weighted)
        masked = None if self._masked is self._weighted else self._masked
        add_to_stream(flat, count, self._blocks, mask, self._plain, self._weighted, masked)


def _sums(found: Found, n: Float64[np.ndarray, " clients"]) -> CohortSums | None:
    if found.squared_norms is None or found.squared_norm_of_sum is None or found.squared_norm_of_weighted_sum is None:
        return None
    return CohortSums(
        clients=len(n),
        effective_clients=float(n.sum() ** 2 / np.sum(n**2)),
        squared_norms=found.squared_norms.sum(axis=1),
        squared_norm_of_sum=found.squared_norm_of_sum,
        weighted_squared_norms=found.squared_norms @ (n / n.sum()) ** 2,
        squared_norm_of_weighted_sum=found.squared_norm_of_weighted_sum / n.sum() ** 2,
    )


def _rescale(p: Probability, blocks: int) -> Float64[np.ndarray, " probabilities"]:
    probabilities = keep_probabilities(p, blocks)
    if not np.all(probabilities > 0):
        block = int(np.flatnonzero(probabilities == 0)[0])
        where = f" for block {block}" if probabilities.size > 1 else ""
        raise FedmaskError(f"p is 0{where}, and kept blocks are scaled by 1/p; p must lie in (0, 1]")
    return probabilities


def _statistics_blocks(blocks: Blocks) -> Blocks:
    return blocks.at("tensor") if blocks.granularity == "element" else blocks


def _nonfinite(
    squared_norms: Float64[np.ndarray, "blocks clients"], blocks: Blocks, ids: tuple[int, ...]
) -> dict[int, str]:
    """Client id → name of its first block whose squared norm is not finite."""
    bad = ~np.isfinite(squared_norms)
    return {ids[k]: blocks.block_name(int(np.argmax(bad[:, k]))) for k in np.flatnonzero(bad.any(axis=0))}


def _nonfinite_kept(
    updates: Float[Tensor, "clients parameters"],
    blocks: Blocks,
    ids: tuple[int, ...],
    masks: Bool[np.ndarray, "clients blocks"] | None,
) -> dict[int, str]:
    """Client id → name of its first kept block with a non-finite value."""
    bad: dict[int, str] = {}
    for chunk in chunks(updates, blocks):
        first, rows = chunk.place(blocks)
        wrong = ~chunk.raw.isfinite().view(len(ids), rows, -1).all(dim=2).cpu().numpy()
        if masks is not None:
            wrong &= masks[:, first : first + rows]
        for k in np.flatnonzero(wrong.any(axis=1)):
            bad.setdefault(ids[k], blocks.block_name(first + int(np.argmax(wrong[k]))))
    return bad


def _check_out(out: Tensor, updates: Tensor) -> None:
    wanted = (updates.shape[1],), mean_type(updates.dtype), updates.device
    if (tuple(out.shape), out.dtype, out.device) != wanted or not out.is_contiguous():
        raise FedmaskError(
            f"out has shape {tuple(out.shape)}, type {out.dtype} and is on {out.device}; "
            f"the mean is contiguous with shape {wanted[0]}, type {wanted[1]} and on {wanted[2]}"
        )


def _check_choice(name: str, given: str, choices: object) -> None:
    if given not in get_args(choices):
        allowed = " or ".join(f'"{choice}"' for choice in get_args(choices))
        raise FedmaskError(f"{name} is {given!r}; use {allowed}")
