"""Gram matrices of a cohort's updates, block by block: all that the statistics need.

For block b, G_b[k, l] = ⟨Δ_k^(b), Δ_l^(b)⟩, accumulated in float64 whatever the updates' type. Sign, here
and everywhere: **an update is Δ_k = θ − θ_k**, global weights minus the client's, and the server steps by
subtracting (paper, Definitions).

Where K_c² products are too many, :class:`CohortSums` keeps the few sums per block from which every
statistic without a pairwise product follows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64
from torch import Tensor

from fedmask.blocks import Blocks
from fedmask.errors import BlockError, FedmaskError
from fedmask.passes import one_pass

__all__ = ["CohortSums", "GramMatrices", "check_counts", "gram_matrices"]


@dataclass(frozen=True)
class CohortSums:
    """Per-block sums over a cohort; a_k = n_k / Σn.

    Attributes:
        clients: K_c.
        effective_clients: 1/Σa_k².
        squared_norms: Σ_k ‖Δ_k^(b)‖².
        squared_norm_of_sum: ‖Σ_k Δ_k^(b)‖².
        weighted_squared_norms: Σ_k a_k² ‖Δ_k^(b)‖².
        squared_norm_of_weighted_sum: ‖Σ_k a_k Δ_k^(b)‖².
    """

    clients: int
    effective_clients: float
    squared_norms: Float64[np.ndarray, " blocks"]
    squared_norm_of_sum: Float64[np.ndarray, " blocks"]
    weighted_squared_norms: Float64[np.ndarray, " blocks"]
    squared_norm_of_weighted_sum: Float64[np.ndarray, " blocks"]


@dataclass(frozen=True)
class GramMatrices:
    """G_b for every block of a cohort.

    Attributes:
        values: float64, (blocks, clients, clients), symmetric.
        counts: n_k, the sample counts that weight the server's mean.
        clients: the clients' ids, in the order of rows.
        definite: whether the inner product is positive semidefinite, so that what is below zero is rounding.
    """

    values: Float64[np.ndarray, "blocks clients clients"]
    counts: Float64[np.ndarray, " clients"]
    clients: tuple[int, ...]
    definite: bool = True

    @property
    def total(self) -> Float64[np.ndarray, "clients clients"]:
        """Σ_b G_b, the Gram matrix of the whole updates."""
        return np.asarray(self.values.sum(axis=0))

    def sums(self) -> CohortSums:
        """The sums per block that statistics without pairwise products need."""
        a = self.counts / self.counts.sum()
        norms = np.einsum("bkk->bk", self.values)
        # Then a squared norm is never negative; its rounding can be, where updates cancel.
        least = 0.0 if self.definite else -np.inf
        return CohortSums(
            clients=len(self.clients),
            effective_clients=float(1 / np.sum(a**2)),
            squared_norms=norms.sum(axis=1),
            squared_norm_of_sum=np.maximum(self.values.sum(axis=(1, 2)), least),
            weighted_squared_norms=norms @ a**2,
            squared_norm_of_weighted_sum=np.maximum(np.einsum("k,bkl,l->b", a, self.values, a), least),
        )

    def subcohort(self, clients: Sequence[int]) -> "GramMatrices":
        """The Gram matrices of some of the clients, by id, without touching an update again.

        Raises:
            FedmaskError: if a client is not of this cohort, or its count alone leaves no weight.
        """
        if unknown := [client for client in clients if client not in self.clients]:
            raise FedmaskError(f"client {unknown[0]} is not of this cohort; it has {list(self.clients)}")
        rows = [self.clients.index(client) for client in clients]
        counts = check_counts(self.counts[rows].tolist(), clients)
        return GramMatrices(self.values[:, rows][:, :, rows], counts, tuple(clients), self.definite)


def gram_matrices(
    updates: Float[Tensor, "clients parameters"],
    blocks: Blocks,
    *,
    counts: Sequence[int | float] | None = None,
    clients: Sequence[int] | None = None,
) -> GramMatrices:
    """The Gram matrices of updates Δ_k, one row a client, in one pass.

    Args:
        updates: (K_c, d), any floating type, any device.
        blocks: the cut of the d columns, no finer than rows.
        counts: n_k; all equal if None.
        clients: ids; 0 … K_c−1 if None.

    Raises:
        FedmaskError: if the cohort is empty, counts are negative, not finite or all zero.
        BlockError: if the shapes do not fit or the blocks are single elements.
    """
    ids = tuple(range(len(updates))) if clients is None else tuple(clients)
    checked = check_counts([1] * len(ids) if counts is None else counts, ids)
    check_updates(updates, blocks, ids)
    check_statistics_blocks(blocks)
    found = one_pass(updates, blocks, checked, statistics="gram")
    assert found.gram is not None
    return GramMatrices(found.gram, checked, ids)


def check_counts(counts: Sequence[int | float], clients: Sequence[int]) -> Float64[np.ndarray, " clients"]:
    """Sample counts as float64, one a client.

    Raises:
        FedmaskError: if the cohort is empty, a count is missing, negative or not finite, or all are zero.
    """
    if len(clients) == 0:
        raise FedmaskError("the cohort is empty: there is no update to average; the model is unchanged")
    if len(counts) != len(clients):
        raise FedmaskError(f"{len(counts)} weights were given for {len(clients)} clients; give one sample count each")
    n = np.asarray(counts, dtype=np.float64)
    for client, value in zip(clients, n, strict=True):
        if not 0 <= value < np.inf:
            raise FedmaskError(
                f"client {client} has weight {value}; a weight is a sample count, finite and not negative"
            )
    if not n.sum() > 0:
        raise FedmaskError(
            f"the weights of all {len(n)} clients are zero: their mean is undefined; the model is unchanged"
        )
    return n


def check_updates(updates: Tensor, blocks: Blocks, clients: Sequence[int]) -> None:
    """Raise BlockError unless ``updates`` is (clients, parameters) of a floating type."""
    if tuple(updates.shape) != (len(clients), blocks.parameters) or not updates.is_floating_point():
        raise BlockError(
            f"updates have shape {tuple(updates.shape)} and type {updates.dtype}; "
            f"({len(clients)}, {blocks.parameters}) of a floating type was expected"
        )


def check_statistics_blocks(blocks: Blocks) -> None:
    """Raise BlockError where blocks are too fine for statistics."""
    if blocks.granularity == "element":
        raise BlockError('statistics are never finer than rows; pass blocks.at("tensor") or blocks.at("row")')
