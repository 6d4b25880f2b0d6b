"""One pass over a cohort's updates: masked mean, Gram matrices or sums, each value read once.

Three ways, one outcome. On the CPU the loops of :mod:`fedmask.kernels`, threads over columns; on CUDA the kernel
of :mod:`fedmask.triton_kernels`; where these are not installed or do not fit (element-wise masks or large cohorts
on CUDA, another device), PyTorch on cache-sized chunks, which is also the twin that tests hold the others to. All
sums are float64. The result doesn't depend on the number of threads.
"""

import importlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from types import ModuleType
from typing import Literal, TypeAlias, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from fedmask.blocks import Blocks

__all__ = ["Found", "Statistics", "add_to_stream", "one_pass", "squared_norms"]

Statistics: TypeAlias = Literal["gram", "sums", "none"]
Outcome = TypeVar("Outcome")
Masks: TypeAlias = Bool[np.ndarray, "clients blocks"]

# Values of a segment, which stays in a core's own cache, and of a task, which one thread does without a break.
_SEGMENT_VALUES, _SEGMENT_COLUMNS = 2**16, 4096
_TASK_VALUES = 2**22
# Values of one float64 chunk of the PyTorch way: 2 MB.
_CHUNK_VALUES = 2**18


@dataclass(frozen=True)
class Found:
    """What one pass found; a part that was not asked for is None.

    Attributes:
        mean: (d,), Σ_k n_k (m_k^(b)) Δ_k^(b) times the block's factor.
        finite: without statistics, False if the mean is not finite.
        gram: (blocks, clients, clients), Gram matrices of the unmasked updates.
        squared_norms: (blocks, clients), ‖Δ_k^(b)‖².
        squared_norm_of_sum: (blocks,), ‖Σ_k Δ_k^(b)‖².
        squared_norm_of_weighted_sum: (blocks,), ‖Σ_k n_k Δ_k^(b)‖².
    """

    mean: Float[Tensor, " parameters"] | None = None
    finite: bool | None = None
    gram: Float64[np.ndarray, "blocks clients clients"] | None = None
    squared_norms: Float64[np.ndarray, "blocks clients"] | None = None
    squared_norm_of_sum: Float64[np.ndarray, " blocks"] | None = None
    squared_norm_of_weighted_sum: Float64[np.ndarray, " blocks"] | None = None


@dataclass(frozen=True)
class MeanOf:
    """Which mean a pass makes.

    Attributes:
        blocks: what masks and factors are over.
        masks: True where a client keeps a block; None keeps everything.
        factors: one for all blocks or one a block: 1/(p_b Σn).
        out: where to write it; a new vector if None.
    """

    blocks: Blocks
    masks: Masks | None
    factors: Float64[np.ndarray, " factors"]
    out: Float[Tensor, " parameters"] | None = None


@dataclass(frozen=True)
class _Task:
    """Segments that one thread goes through.

    Attributes:
        segments: (segments, 4): first column, columns, mask's block, statistics' block.
        base: the flat column that is column 0 of the values given with the task.
    """

    segments: Int64[np.ndarray, "segments 4"]
    base: int

    @property
    def start(self) -> int:
        """The first flat column."""
        return int(self.segments[0, 0])

    @property
    def stop(self) -> int:
        """The flat column after the last."""
        return int(self.segments[-1, 0] + self.segments[-1, 1])

    @property
    def longest(self) -> int:
        """The most columns of a segment."""
        return int(self.segments[:, 1].max())

    @property
    def first(self) -> int:
        """The first of the statistics' blocks."""
        return int(self.segments[0, 3])

    @property
    def rows(self) -> int:
        """How many of the statistics' blocks there are."""
        return int(self.segments[-1, 3]) + 1 - self.first


def one_pass(
    updates: Float[Tensor, "clients parameters"],
    cut: Blocks,
    weights: Float64[np.ndarray, " clients"],
    *,
    statistics: Statistics,
    mean: MeanOf | None = None,
) -> Found:
    """Read the updates once.

    Args:
        updates: any floating type, strides and device.
        cut: blocks of the statistics, no finer than rows.
        weights: n_k.
        statistics: Gram matrices, sums, or nothing.
        mean: the mean to make, if one is wanted.
    """
    if updates.device.type == "cpu" and (kernels := compiled_kernels()) is not None:
        return _threaded_pass(kernels, updates, cut, weights, statistics, mean)
    if updates.device.type == "cuda" and (kernels := triton_kernels()) is not None:
        whole = mean is None or mean.blocks.granularity != "element"
        if whole and len(updates) <= kernels.LARGEST_COHORT and updates.stride(1) == 1:
            return triton_pass(kernels, updates, cut, weights, statistics, mean)
    return chunked_pass(updates, cut, weights, statistics=statistics, mean=mean)


@cache
def compiled_kernels() -> ModuleType | None:
    """The compiled loops, or None where Numba is not installed."""
    try:
        return importlib.import_module("fedmask.kernels")
    except ImportError:
        return None


@cache
def triton_kernels() -> ModuleType | None:
    """The CUDA kernel, or None where Triton is not installed."""
    try:
        return importlib.import_module("fedmask.triton_kernels")
    except ImportError:
        return None


def mean_type(dtype: torch.dtype) -> torch.dtype:
    """The type of the mean of updates of a type: the same, at least float32."""
    return torch.promote_types(dtype, torch.float32)


def fresh(size: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, " size"]:
    """A new vector of float32 or float64, its values undefined.

    On the CPU NumPy makes it, which asks for large pages: the first touch of small ones can cost more than a
    pass over the updates.
    """
    if device.type == "cpu":
        return torch.from_numpy(np.empty(size, dtype=_numpy_type(dtype)))
    return torch.empty(size, dtype=dtype, device=device)


def squared_norms(vector: Float[Tensor, " parameters"], blocks: Blocks) -> Float64[np.ndarray, " blocks"]:
    """‖v^(b)‖² for every block of one vector."""
    kernels = compiled_kernels() if vector.device.type == "cpu" else None
    if kernels is None:
        norms = torch.zeros(blocks.count, dtype=torch.float64, device=vector.device)
        for chunk in chunks(vector[None], blocks):
            first, rows = chunk.place(blocks)
            norms[first : first + rows] += chunk.values.view(rows, -1).square().sum(dim=1)
        return np.asarray(norms.cpu().numpy())
    result = np.zeros(blocks.count)

    def square(task: _Task, values: np.ndarray) -> Float64[np.ndarray, " rows"]:
        norms = np.zeros(task.rows)
        kernels.square_pass(values[0], task.base, task.segments, task.first, norms)
        return norms

    for task, squares in _over_columns(kernels, vector[None], blocks, blocks, square):
        result[task.first : task.first + task.rows] += squares
    return result


def add_to_stream(
    update: Float[Tensor, " parameters"],
    count: float,
    blocks: Blocks,
    mask: Bool[np.ndarray, " blocks"] | None,
    plain: Float64[Tensor, " parameters"],
    weighted: Float64[Tensor, " parameters"],
    masked: Float64[Tensor, " parameters"] | None,
) -> None:
    """Add one client to ΣΔ_k, Σ n_k Δ_k and Σ m_k n_k Δ_k, in place."""
    kernels = compiled_kernels() if update.device.type == "cpu" else None
    if kernels is None:
        n = np.array([count])
        for chunk in chunks(update[None], blocks):
            columns = slice(chunk.start, chunk.stop)
            plain[columns] += chunk.values[0]
            weighted[columns] += count * chunk.values[0]
            if masked is not None:
                kept = None if mask is None else mask[None]
                masked[columns] += _kept_sum(chunk.values, chunk.place(blocks), n, kept)
        return
    masking, bits = _masking(kernels, blocks, mask, axes=1)
    third = np.empty(0) if masked is None else masked.numpy()

    def add(task: _Task, values: np.ndarray) -> None:
        kernels.stream_pass(
            values[0], task.base, task.segments, count, bits, masking, plain.numpy(), weighted.numpy(), third
        )

    for _ in _over_columns(kernels, update[None], blocks, blocks.at("tensor"), add):
        pass


def _threaded_pass(
    kernels: ModuleType,
    updates: Float[Tensor, "clients parameters"],
    cut: Blocks,
    weights: Float64[np.ndarray, " clients"],
    statistics: Statistics,
    mean: MeanOf | None,
) -> Found:
    clients = len(updates)
    padded = -(-clients // kernels.GROUP) * kernels.GROUP
    w, ones = np.zeros(padded), np.zeros(padded)
    if mean is not None or statistics == "sums":
        w[:clients] = weights
    ones[:clients] = 1
    factors = mean.factors if mean else np.ones(1)
    masking, masks = _masking(kernels, mean.blocks if mean else cut, mean.masks if mean else None, axes=2)
    if mean is not None and mean.blocks.granularity == "element" and factors.size > 1 and mean.masks is None:
        masking, masks = kernels.PER_ELEMENT, np.ones((clients, factors.size), dtype=np.bool_)
    made = _target(updates, mean)
    out = np.empty(0, dtype=_numpy_type(mean_type(updates.dtype))) if made is None else made.numpy()
    common = (w, masks, masking, factors, out)

    def mean_only(task: _Task, values: np.ndarray) -> tuple[np.ndarray, ...]:
        return (np.asarray(kernels.mean_pass(values, task.base, task.segments, task.longest, *common)),)

    def gram_too(task: _Task, values: np.ndarray) -> tuple[np.ndarray, ...]:
        gram = np.zeros((task.rows, padded, padded))
        kernels.gram_pass(values, task.base, task.segments, task.longest, *common, task.first, gram)
        return (gram,)

    def sums_too(task: _Task, values: np.ndarray) -> tuple[np.ndarray, ...]:
        sums = np.zeros((task.rows, padded)), np.zeros(task.rows), np.zeros(task.rows)
        target = out if mean else np.empty(updates.shape[1], dtype=out.dtype)
        kernels.sums_pass(
            values, task.base, task.segments, task.longest, w, ones, masks, masking, factors, target, task.first, *sums
        )
        return sums

    work: Callable[[_Task, np.ndarray], tuple[np.ndarray, ...]]
    result: list[np.ndarray]
    match statistics:
        case "none":
            work, result = mean_only, [np.zeros(())]
        case "gram":
            work, result = gram_too, [np.zeros((cut.count, padded, padded))]
        case "sums":
            work, result = sums_too, [np.zeros((cut.count, padded)), np.zeros(cut.count), np.zeros(cut.count)]
    for task, parts in _over_columns(kernels, updates, mean.blocks if mean else cut, cut, work):
        for whole, part in zip(result, parts, strict=True):
            whole[... if part.ndim == 0 else slice(task.first, task.first + task.rows)] += part
    if statistics == "none":
        return Found(made, finite=bool(np.isfinite(result[0])))
    if statistics == "gram":
        upper = np.triu(result[0][:, :clients, :clients])
        return Found(made, gram=upper + np.triu(upper, 1).transpose(0, 2, 1))
    return Found(
        made,
        squared_norms=np.ascontiguousarray(result[0][:, :clients]),
        squared_norm_of_sum=result[1],
        squared_norm_of_weighted_sum=result[2],
    )


def _masking(
    kernels: ModuleType, blocks: Blocks, masks: Bool[np.ndarray, "..."] | None, axes: int
) -> tuple[int, Bool[np.ndarray, "..."]]:
    """How the kernels read masks, and the masks: an empty array of as many axes where there are none."""
    if masks is None:
        return kernels.NO_MASK, np.empty((0,) * axes, dtype=np.bool_)
    masking = kernels.PER_ELEMENT if blocks.granularity == "element" else kernels.PER_BLOCK
    return masking, np.ascontiguousarray(masks)


def _over_columns(
    kernels: ModuleType,
    updates: Float[Tensor, "clients parameters"],
    blocks: Blocks,
    cut: Blocks,
    work: Callable[[_Task, np.ndarray], Outcome],
) -> Iterator[tuple[_Task, Outcome]]:
    """Do ``work`` on every task, in as many threads as PyTorch may use; outcomes in the columns' order."""
    clients = len(updates)
    segments = _segments(blocks, cut, max(1, min(_SEGMENT_COLUMNS, _SEGMENT_VALUES // clients)))
    if not len(segments):
        return
    # A task's results are added to the whole: with many clients its columns must outnumber them.
    direct = _as_numpy(updates)
    columns = max(_TASK_VALUES // clients, 64 * clients)
    ends = np.searchsorted(segments[:, 0], np.arange(columns, updates.shape[1], columns))
    pieces = [piece for piece in np.split(segments, ends) if len(piece)]
    tasks = [_Task(piece, 0 if direct is not None else int(piece[0, 0])) for piece in pieces]
    room, source = threading.local(), updates.detach()

    def run(task: _Task) -> Outcome:
        if direct is not None:
            return work(task, direct)
        if not hasattr(room, "values"):
            most = max(task.stop - task.start for task in tasks)
            room.values = np.empty((clients, most), dtype=_numpy_type(mean_type(updates.dtype)))
        _decode(kernels, source, task, room.values)
        return work(task, room.values)

    threads = min(torch.get_num_threads(), len(tasks))
    if threads == 1:
        for task in tasks:
            yield task, run(task)
        return
    with ThreadPoolExecutor(threads) as pool:
        yield from zip(tasks, pool.map(run, tasks), strict=True)


def _segments(blocks: Blocks, cut: Blocks, longest: int) -> Int64[np.ndarray, "segments 4"]:
    """Runs of at most ``longest`` columns that lie in one block of each cut (single elements are no cut)."""
    parts = []
    for masked, counted in zip(blocks.pieces, cut.pieces, strict=True):
        by_row = masked.rows > 1 and blocks.granularity == "row"
        rows = masked.rows if by_row else counted.rows
        size = counted.rows * counted.width
        if size == 0:
            continue
        row = np.arange(rows, dtype=np.int64)[:, None]
        offset = np.arange(0, size // rows, longest, dtype=np.int64)[None]
        part = np.empty((rows, offset.size, 4), dtype=np.int64)
        part[..., 0] = counted.start + row * (size // rows) + offset
        part[..., 1] = np.minimum(longest, size // rows - offset)
        part[..., 2] = masked.first_block + (row if by_row else 0)
        part[..., 3] = counted.first_block + (row if counted.rows > 1 else 0)
        parts.append(part.reshape(-1, 4))
    return np.concatenate(parts) if parts else np.empty((0, 4), dtype=np.int64)


def _as_numpy(updates: Float[Tensor, "clients parameters"]) -> np.ndarray | None:
    """The updates where the kernels can read them in place, else None."""
    readable = updates.dtype in (torch.float32, torch.float64) and updates.is_contiguous()
    return updates.detach().numpy() if readable else None


def _decode(kernels: ModuleType, updates: Float[Tensor, "clients parameters"], task: _Task, values: np.ndarray) -> None:
    """A task's columns as float32 or float64, at the start of each row of ``values``."""
    columns = task.stop - task.start
    if updates.dtype == torch.bfloat16:
        kernels.widen(updates.view(torch.uint16).numpy(), task.start, columns, values.view(np.uint32))
    else:
        np.copyto(values[:, :columns], updates[:, task.start : task.stop].numpy())


def _target(updates: Float[Tensor, "clients parameters"], mean: MeanOf | None) -> Float[Tensor, " parameters"] | None:
    if mean is None or mean.out is not None:
        return None if mean is None else mean.out
    return fresh(updates.shape[1], mean_type(updates.dtype), updates.device)


def _numpy_type(dtype: torch.dtype) -> type[np.floating]:
    return np.float64 if dtype == torch.float64 else np.float32


def triton_pass(
    kernels: ModuleType,
    updates: Float[Tensor, "clients parameters"],
    cut: Blocks,
    weights: Float64[np.ndarray, " clients"],
    statistics: Statistics,
    mean: MeanOf | None = None,
) -> Found:
    """:func:`one_pass` by the Triton kernel, on the updates' device; blocks no finer than rows."""
    device = updates.device
    masked = cut if mean is None else mean.blocks
    segments = _segments(masked, cut, kernels.COLUMNS)
    factors = np.ones(1) if mean is None else mean.factors
    kept = np.zeros((1, len(updates))) if mean is None else weights[None]
    if mean is not None and mean.masks is not None:
        kept = np.where(mean.masks, weights[:, None], 0.0).T
    elif factors.size > 1:
        kept = np.repeat(kept, factors.size, axis=0)
    places = segments[:, :3].copy()
    if len(kept) == 1:
        places[:, 2] = 0
    made = _target(updates, mean)
    on_device = (torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in (places, kept, factors, weights))
    parts, plain, weighted = kernels.launch(updates.detach(), *on_device, statistics, made)
    if statistics == "none":
        return Found(made, finite=made is None or bool(made.isfinite().all()))

    def by_block(part: Tensor) -> np.ndarray:
        whole = np.zeros((cut.count, *part.shape[1:]))
        np.add.at(whole, segments[:, 3], part.cpu().numpy())
        return whole

    if statistics == "gram":
        return Found(made, gram=by_block(parts))
    return Found(
        made,
        squared_norms=by_block(parts),
        squared_norm_of_sum=by_block(plain),
        squared_norm_of_weighted_sum=by_block(weighted),
    )


def chunked_pass(
    updates: Float[Tensor, "clients parameters"],
    cut: Blocks,
    weights: Float64[np.ndarray, " clients"],
    *,
    statistics: Statistics,
    mean: MeanOf | None = None,
) -> Found:
    """:func:`one_pass` in PyTorch, on any device; the twin of the compiled loops."""
    clients, device = len(updates), updates.device
    out = _target(updates, mean)
    gram = torch.zeros(cut.count, clients, clients, dtype=torch.float64, device=device)
    norms = torch.zeros(cut.count, clients, dtype=torch.float64, device=device)
    plain, weighted = torch.zeros(2, cut.count, dtype=torch.float64, device=device)
    for chunk in chunks(updates, cut, *([mean.blocks] if mean else [])):
        first, rows = chunk.place(cut)
        where = slice(first, first + rows)
        if statistics == "gram":
            by_row = chunk.values.view(clients, rows, -1).transpose(0, 1)
            gram[where] += by_row @ by_row.mT
        elif statistics == "sums":
            norms[where] += chunk.values.view(clients, rows, -1).square().sum(dim=2).T
            for squares, n in ((plain, np.ones(clients)), (weighted, weights)):
                squares[where] += _kept_sum(chunk.values, (0, 1), n, None).view(rows, -1).square().sum(dim=1)
        if mean is not None and out is not None:
            place = chunk.place(mean.blocks)
            kept = _kept_sum(chunk.raw if statistics == "none" else chunk.values, place, weights, mean.masks)
            out[chunk.start : chunk.stop] = scaled(kept, place, mean.factors)
    if statistics == "none":
        return Found(out, finite=out is None or bool(out.isfinite().all()))
    if statistics == "gram":
        return Found(out, gram=((gram + gram.mT) / 2).cpu().numpy())
    return Found(
        out,
        squared_norms=norms.cpu().numpy(),
        squared_norm_of_sum=plain.cpu().numpy(),
        squared_norm_of_weighted_sum=weighted.cpu().numpy(),
    )


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
    columns = max(1, _CHUNK_VALUES // max(1, len(updates)))
    # Rows must stay whole; single elements always do, and tensors are summed over their chunks.
    cut = next((blocks for blocks in cuts if blocks.granularity == "row"), cuts[0])
    for tensor, piece in enumerate(cut.pieces):
        step = columns if piece.rows == 1 else max(1, columns // max(1, piece.width)) * piece.width
        for start in range(piece.start, piece.stop, max(1, step)):
            stop = min(start + step, piece.stop)
            yield Chunk(start, stop, tensor, updates[:, start:stop])


def scaled(
    sums: Float64[Tensor, " columns"], place: tuple[int, int], factors: Float64[np.ndarray, " factors"]
) -> Float64[Tensor, " columns"]:
    """Columns that lie at ``place`` times their blocks' factors."""
    if factors.size == 1:
        return sums * float(factors[0])
    first, rows = place
    by_block = torch.from_numpy(factors[first : first + rows, None]).to(sums.device)
    return (sums.view(rows, -1) * by_block).view(-1)


def _kept_sum(
    values: Float[Tensor, "clients columns"],
    place: tuple[int, int],
    weights: Float64[np.ndarray, " clients"],
    masks: Masks | None,
) -> Float64[Tensor, " columns"]:
    """Σ n_k Δ_k in the clients' order, over those that kept the block, for columns that lie at ``place``."""
    first, rows = place
    total = torch.zeros(values.shape[1], dtype=torch.float64, device=values.device)
    for k, n in enumerate(weights.tolist()):
        kept = None if masks is None else masks[k, first : first + rows]
        if kept is None or kept.all():
            total += n * values[k].double()
        elif kept.any():
            chosen = torch.from_numpy(kept[:, None]).to(values.device)
            part = (n * values[k].double()).view(rows, -1)
            total += torch.where(chosen, part, torch.zeros((), dtype=part.dtype, device=part.device)).view(-1)
    return total
