"""Gram matrices of a cohort's updates, block by block: all that the statistics need.

For block b, G_b[k, l] = ⟨Δ_k^(b), Δ_l^(b)⟩, accumulated in float64 whatever the updates' type. Sign, here
and everywhere: **an update is Δ_k = θ − θ_k**, global weights minus the client's, and the server steps by
subtracting (paper, Definitions).

Where K_c² products are too many, :class:`CohortSums` keeps the few sums per block from which every
statistic without a pairwise product follows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from fedmask.blocks import Blocks
from fedmask.errors import BlockError, FedmaskError

__all__ = ["CohortSums", "GramMatrices", "check_counts", "gram_matrices"]

# Columns × clients of one float64 chunk: 2 MB, which stays in a core's cache between its uses.
_CHUNK_ELEMENTS = 2**18


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
    """

    values: Float64[np.ndarray, "blocks clients clients"]
    counts: Float64[np.ndarray, " clients"]
    clients: tuple[int, ...]

    @property
    def total(self) -> Float64[np.ndarray, "clients clients"]:
        """Σ_b G_b, the Gram matrix of the whole updates."""
        return np.asarray(self.values.sum(axis=0))

    def sums(self) -> CohortSums:
        """The sums per block that statistics without pairwise products need."""
        a = self.counts / self.counts.sum()
        norms = np.einsum("bkk->bk", self.values)
        # A squared norm is never negative; its rounding can be, where updates cancel.
        return CohortSums(
            clients=len(self.clients),
            effective_clients=float(1 / np.sum(a**2)),
            squared_norms=norms.sum(axis=1),
            squared_norm_of_sum=np.maximum(self.values.sum(axis=(1, 2)), 0.0),
            weighted_squared_norms=norms @ a**2,
            squared_norm_of_weighted_sum=np.maximum(np.einsum("k,bkl,l->b", a, self.values, a), 0.0),
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
        return GramMatrices(self.values[:, rows][:, :, rows], counts, tuple(clients))


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
    sums = GramAccumulator(blocks, updates)
    for chunk in chunks(updates, blocks):
        sums.add(chunk)
    return sums.result(checked, ids)


@dataclass(frozen=True)
class Chunk:
    """Some columns of one tensor of the updates.

    Attributes:
        start: the first column; ``stop`` the one after the last.
        tensor: index of the tensor they belong to.
        raw: (clients, columns), a view of the updates in their own type.
    """

    start: int
    stop: int
    tensor: int
    raw: Float[Tensor, "clients columns"]

    @cached_property
    def values(self) -> Float64[Tensor, "clients columns"]:
        """The columns in float64, converted once."""
        return self.raw.double()

    def place(self, blocks: Blocks) -> tuple[int, int]:
        """(first block, number of blocks that these columns cut evenly into)."""
        piece = blocks.pieces[self.tensor]
        if piece.rows == 1:
            return piece.first_block, 1
        first = piece.first_block + (self.start - piece.start) // piece.width
        return first, (self.stop - self.start) // piece.width


def chunks(updates: Float[Tensor, "clients parameters"], *cuts: Blocks) -> Iterator[Chunk]:
    """The updates' columns, a cache-sized piece at a time, in flat order.

    Every chunk holds whole blocks of each of ``cuts`` that is finer than tensors.
    """
    columns = max(1, _CHUNK_ELEMENTS // max(1, len(updates)))
    # Rows must stay whole; single elements always do, and tensors are summed over their chunks.
    cut = next((blocks for blocks in cuts if blocks.granularity == "row"), cuts[0])
    for tensor, piece in enumerate(cut.pieces):
        step = columns if piece.rows == 1 else max(1, columns // max(1, piece.width)) * piece.width
        for start in range(piece.start, piece.stop, max(1, step)):
            stop = min(start + step, piece.stop)
            yield Chunk(start, stop, tensor, updates[:, start:stop])


class GramAccumulator:
    """Gram matrices growing chunk by chunk, on the updates' device."""

    def __init__(self, blocks: Blocks, updates: Float[Tensor, "clients parameters"]) -> None:
        """Zero matrices for a cohort of ``len(updates)`` clients."""
        if blocks.granularity == "element":
            raise BlockError('statistics are never finer than rows; pass blocks.at("tensor") or blocks.at("row")')
        clients = len(updates)
        self._blocks = blocks
        self._values = torch.zeros(blocks.count, clients, clients, dtype=torch.float64, device=updates.device)

    def add(self, chunk: Chunk) -> None:
        """Add one chunk's inner products."""
        first, rows = chunk.place(self._blocks)
        by_row = chunk.values.view(len(chunk.values), rows, -1).transpose(0, 1)
        self._values[first : first + rows] += by_row @ by_row.mT

    def result(self, counts: Float64[np.ndarray, " clients"], clients: tuple[int, ...]) -> GramMatrices:
        """The matrices so far."""
        values = ((self._values + self._values.mT) / 2).cpu().numpy()
        return GramMatrices(values, counts, clients)


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
