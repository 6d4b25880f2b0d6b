"""The one pass on CUDA, as one Triton kernel; :mod:`fedmask.passes` says when it is used.

Each program takes a run of columns that lies in one block of every cut, a tile at a time: the tile is read once,
for the mean and for the products alike. Products and sums are float64. Programs write their parts to places of
their own, which are added in order afterwards, so that the same device gives the same bits every time.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float64, Int64
from torch import Tensor

__all__ = ["COLUMNS", "LARGEST_COHORT", "TILE", "launch", "one_pass_kernel"]

TILE = 128
COLUMNS = 4096  # of a segment, at most
LARGEST_COHORT = 64

_STATISTICS = {"none": 0, "sums": 1, "gram": 2}


@triton.jit
def one_pass_kernel(
    updates,
    row_stride,
    segments,
    weights,
    factors,
    counts,
    mean,
    gram,
    plain_norms,
    weighted_norms,
    clients,
    one_factor: tl.constexpr,
    with_mean: tl.constexpr,
    statistics: tl.constexpr,  # 0 none, 1 sums, 2 Gram matrices
    rows: tl.constexpr,
    tile: tl.constexpr,
):
    """One segment: masked mean, and with statistics its part of the sums.

    Shapes: updates (clients, ·) with unit column stride; segments (programs, 3): first column, columns, mask's
    block; weights (blocks, clients), n_k where the block is kept and 0 where not; gram (programs, rows, rows) or,
    for sums, (programs, rows), squared norms; plain_norms, weighted_norms (programs,).
    """
    program = tl.program_id(0).to(tl.int64)
    start = tl.load(segments + 3 * program)
    length = tl.load(segments + 3 * program + 1)
    block = tl.load(segments + 3 * program + 2)
    client = tl.arange(0, rows)
    there = client < clients
    kept = tl.load(weights + block * clients + client, mask=there, other=0.0)
    read = there
    if statistics == 0:
        read = there & (kept != 0.0)
    n = tl.load(counts + client, mask=there, other=0.0)
    factor = tl.load(factors) if one_factor else tl.load(factors + block)
    products = tl.zeros((rows, rows), dtype=tl.float64)
    norms = tl.zeros((rows,), dtype=tl.float64)
    plain = tl.zeros((tile,), dtype=tl.float64)
    weighted = tl.zeros((tile,), dtype=tl.float64)
    for offset in range(0, length, tile):
        column = offset + tl.arange(0, tile)
        inside = column < length
        place = updates + client[:, None] * row_stride + (start + column)[None, :]
        x = tl.load(place, mask=read[:, None] & inside[None, :], other=0.0).to(tl.float64)
        if with_mean:
            total = tl.sum(x * kept[:, None], axis=0) * factor
            tl.store(mean + start + column, total.to(mean.dtype.element_ty), mask=inside)
        if statistics == 1:
            norms += tl.sum(x * x, axis=1)
            one = tl.sum(x, axis=0)
            other = tl.sum(x * n[:, None], axis=0)
            plain += one * one
            weighted += other * other
        if statistics == 2:
            products += tl.dot(x, tl.trans(x), out_dtype=tl.float64)
    if statistics == 1:
        tl.store(gram + program * rows + client, norms)
        tl.store(plain_norms + program, tl.sum(plain, axis=0))
        tl.store(weighted_norms + program, tl.sum(weighted, axis=0))
    if statistics == 2:
        where = gram + program * rows * rows + client[:, None] * rows + client[None, :]
        tl.store(where, products)


def launch(
    updates: Float[Tensor, "clients parameters"],
    segments: Int64[Tensor, "segments 3"],
    kept: Float64[Tensor, "blocks clients"],
    factors: Float64[Tensor, " factors"],
    counts: Float64[Tensor, " clients"],
    statistics: str,
    mean: Float[Tensor, " parameters"] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the kernel, one program a segment.

    Returns:
        Each segment's Gram matrix (segments, clients, clients), or for sums its clients' squared norms
        (segments, clients); then its parts of ‖ΣΔ_k‖² and ‖Σ n_k Δ_k‖² (segments,). What was not asked for has
        no elements.
    """
    clients, programs = len(updates), len(segments)
    rows = max(16, triton.next_power_of_2(clients))
    shape = {"none": (0,), "sums": (programs, rows), "gram": (programs, rows, rows)}[statistics]
    parts = torch.empty(shape, dtype=torch.float64, device=updates.device)
    norms = torch.empty(2, programs if statistics == "sums" else 0, dtype=torch.float64, device=updates.device)
    one_pass_kernel[(programs,)](
        updates,
        updates.stride(0),
        segments,
        kept,
        factors,
        counts,
        updates if mean is None else mean,
        parts,
        norms[0],
        norms[1],
        clients,
        one_factor=len(factors) == 1,
        with_mean=mean is not None,
        statistics=_STATISTICS[statistics],
        rows=rows,
        tile=TILE,
    )
    chosen = (slice(None), *[slice(clients)] * (len(shape) - 1))
    return parts[chosen], norms[0], norms[1]
