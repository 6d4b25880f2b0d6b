"""The hot path's loops on the CPU, compiled by Numba; :mod:`fedmask.passes` says when they are used.

A segment is a run of columns in one block of every cut, short enough that its rows stay in a core's cache
while they are used again. Sums are float64. The mean adds clients in their order; n_k·Δ_k is exact in float64
for sample counts below 2²⁹ and float32 updates, so the mean has the same bits as any other float64 sum in that
order. Inner products are summed over columns in the order that the processor's vectors give.

Clients are taken five at a time: 15 or 25 running sums fill a vector unit's registers and use each value read
five times. A last group that is not full repeats the last client; what that gives is never used.
"""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numba import njit

__all__ = [
    "GROUP",
    "NO_MASK",
    "PER_BLOCK",
    "PER_ELEMENT",
    "gram_pass",
    "mean_pass",
    "square_pass",
    "stream_pass",
    "sums_pass",
    "widen",
]

GROUP = 5
NO_MASK, PER_BLOCK, PER_ELEMENT = 0, 1, 2

F = TypeVar("F", bound=Callable[..., Any])

# Sums over columns may be reordered into vectors; NaN, infinity and division keep their meaning.
_REORDER = {"reassoc", "contract", "nsz"}


def _compiled(fastmath: set[str]) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        function = inspect.unwrap(function)  # a type checker may have wrapped it
        try:
            return njit(function, nogil=True, fastmath=fastmath, cache=True)  # type: ignore[no-any-return]
        except RuntimeError:  # there is no folder to keep compiled code in
            return njit(function, nogil=True, fastmath=fastmath)  # type: ignore[no-any-return]

    return decorate


@_compiled(_REORDER)
def _times(x, y):
    return x * y[0], x * y[1], x * y[2], x * y[3], x * y[4]


@_compiled(_REORDER)
def _plus(r, s):
    return r[0] + s[0], r[1] + s[1], r[2] + s[2], r[3] + s[3], r[4] + s[4]


@_compiled(_REORDER)
def _rows(u, k, lo, n):
    """Five clients' columns, from client k on."""
    last = u.shape[0] - 1
    return (
        u[k, lo : lo + n],
        u[min(k + 1, last), lo : lo + n],
        u[min(k + 2, last), lo : lo + n],
        u[min(k + 3, last), lo : lo + n],
        u[min(k + 4, last), lo : lo + n],
    )


@_compiled(_REORDER)
def _at(rows, j):
    a, b, c, d, e = rows
    return np.float64(a[j]), np.float64(b[j]), np.float64(c[j]), np.float64(d[j]), np.float64(e[j])


@_compiled(_REORDER)
def _five(values, k):
    return values[k], values[k + 1], values[k + 2], values[k + 3], values[k + 4]


@_compiled({"contract"})
def _dot(start, w, x):
    return ((((start + w[0] * x[0]) + w[1] * x[1]) + w[2] * x[2]) + w[3] * x[3]) + w[4] * x[4]


@_compiled(_REORDER)
def _within(u, k, lo, n, w, m, g):
    """Inner products among five clients, and their part of the weighted sum m."""
    rows, weights = _rows(u, k, lo, n), _five(w, k)
    r0, r1 = (0.0, 0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0)
    r2, r3, r4 = (0.0, 0.0, 0.0), (0.0, 0.0), 0.0
    for j in range(n):
        x = _at(rows, j)
        a, b, c, d, e = x
        m[j] = _dot(m[j], weights, x)
        r0 = r0[0] + a * a, r0[1] + a * b, r0[2] + a * c, r0[3] + a * d, r0[4] + a * e
        r1 = r1[0] + b * b, r1[1] + b * c, r1[2] + b * d, r1[3] + b * e
        r2 = r2[0] + c * c, r2[1] + c * d, r2[2] + c * e
        r3 = r3[0] + d * d, r3[1] + d * e
        r4 += e * e
    for i in range(GROUP):
        g[k, k + i] += r0[i]
    for i in range(GROUP - 1):
        g[k + 1, k + 1 + i] += r1[i]
    for i in range(GROUP - 2):
        g[k + 2, k + 2 + i] += r2[i]
    for i in range(GROUP - 3):
        g[k + 3, k + 3 + i] += r3[i]
    g[k + 4, k + 4] += r4


@_compiled(_REORDER)
def _between(u, k, other, lo, n, g):
    """Inner products of five clients from k on with five from a later one on."""
    left, right = _rows(u, k, lo, n), _rows(u, other, lo, n)
    zero = (0.0, 0.0, 0.0, 0.0, 0.0)
    r0 = r1 = r2 = r3 = r4 = zero
    for j in range(n):
        x, y = _at(left, j), _at(right, j)
        r0 = _plus(r0, _times(x[0], y))
        r1 = _plus(r1, _times(x[1], y))
        r2 = _plus(r2, _times(x[2], y))
        r3 = _plus(r3, _times(x[3], y))
        r4 = _plus(r4, _times(x[4], y))
    for i in range(GROUP):
        g[k, other + i] += r0[i]
        g[k + 1, other + i] += r1[i]
        g[k + 2, other + i] += r2[i]
        g[k + 3, other + i] += r3[i]
        g[k + 4, other + i] += r4[i]


@_compiled(_REORDER)
def _three_sums(u, k, lo, n, kept, ones, w, m, plain, weighted, norms):
    """Five clients' part of Σ m_k n_k Δ_k, ΣΔ_k and Σ n_k Δ_k, and their squared norms."""
    rows = _rows(u, k, lo, n)
    kept_weights, present, weights = _five(kept, k), _five(ones, k), _five(w, k)
    squares = (0.0, 0.0, 0.0, 0.0, 0.0)
    for j in range(n):
        x = _at(rows, j)
        m[j] = _dot(m[j], kept_weights, x)
        plain[j] = _dot(plain[j], present, x)
        weighted[j] = _dot(weighted[j], weights, x)
        squares = _plus(squares, (x[0] * x[0], x[1] * x[1], x[2] * x[2], x[3] * x[3], x[4] * x[4]))
    for i in range(GROUP):
        norms[k + i] += squares[i]


@_compiled(_REORDER)
def _square_sum(x):
    total = 0.0
    for j in range(x.size):
        total += np.float64(x[j]) * np.float64(x[j])
    return total


@_compiled({"contract"})
def _add(x, n, w, m):
    for j in range(n):
        m[j] += w * np.float64(x[j])


@_compiled({"contract"})
def _add_twice(x, n, w, plain, weighted):
    for j in range(n):
        value = np.float64(x[j])
        plain[j] += value
        weighted[j] += w * value


@_compiled({"contract"})
def _add_two(rows, n, w, m):
    a, b = rows
    for j in range(n):
        m[j] = (m[j] + w[0] * np.float64(a[j])) + w[1] * np.float64(b[j])


@_compiled({"contract"})
def _add_five(rows, n, w, m):
    for j in range(n):
        m[j] = _dot(m[j], w, _at(rows, j))


@_compiled({"contract"})
def _add_selected(x, kept, n, w, m):
    for j in range(n):
        if kept[j]:
            m[j] += w * np.float64(x[j])


@_compiled({"contract"})
def _mean_of_kept(u, lo, at, n, block, w, masks, masking, chosen, m):
    """m = Σ m_k n_k Δ_k, selecting: what is dropped is not read."""
    m[:n] = 0.0
    if masking == PER_ELEMENT:
        for k in range(u.shape[0]):
            _add_selected(u[k, lo : lo + n], masks[k, at : at + n], n, w[k], m)
        return
    count = 0
    for k in range(u.shape[0]):
        if masking == NO_MASK or masks[k, block]:
            chosen[count] = k
            count += 1
    i = 0
    while i + 5 <= count:
        a, b, c, d, e = _five(chosen, i)
        rows = (u[a, lo : lo + n], u[b, lo : lo + n], u[c, lo : lo + n], u[d, lo : lo + n], u[e, lo : lo + n])
        _add_five(rows, n, (w[a], w[b], w[c], w[d], w[e]), m)
        i += 5
    while i + 2 <= count:
        a, b = chosen[i], chosen[i + 1]
        _add_two((u[a, lo : lo + n], u[b, lo : lo + n]), n, (w[a], w[b]), m)
        i += 2
    if i < count:
        _add(u[chosen[i], lo : lo + n], n, w[chosen[i]], m)


@_compiled({"contract"})
def _kept_weights(block, clients, w, masks, masking, kept):
    """Weights of the clients that keep the block and 0 of the others; all 0 where elements are chosen singly."""
    for k in range(clients):
        kept[k] = w[k] if masking == NO_MASK or (masking == PER_BLOCK and masks[k, block]) else 0.0


@_compiled(_REORDER)
def _write(m, at, n, block, factors, masking, out):
    """The mean's columns, scaled by 1/(p_b Σn); returns their sum, which is finite only if all are."""
    total, here = 0.0, out[at : at + n]
    if masking == PER_ELEMENT and factors.size > 1:
        by_element = factors[at : at + n]
        for j in range(n):
            here[j] = m[j] * by_element[j]
            total += m[j]
    else:
        factor = factors[block] if factors.size > 1 else factors[0]
        for j in range(n):
            here[j] = m[j] * factor
            total += m[j]
    return total


@_compiled({"contract"})
def mean_pass(u, base, segments, longest, w, masks, masking, factors, out):
    """The masked mean alone, and a sum that is finite only if every value is.

    Column c of the flat vector is column c − base of u, in every pass.
    """
    m, chosen, total = np.empty(longest), np.empty(u.shape[0], np.int64), 0.0
    for i in range(segments.shape[0]):
        at, n, block = segments[i, 0], segments[i, 1], segments[i, 2]
        _mean_of_kept(u, at - base, at, n, block, w, masks, masking, chosen, m)
        total += _write(m, at, n, block, factors, masking, out)
    return total


@_compiled({"contract"})
def sums_pass(
    u, base, segments, longest, w, ones, masks, masking, factors, out, first, norms, plain_norm, weighted_norm
):
    """The masked mean, each client's squared norm per block, ‖ΣΔ_k‖² and ‖Σ n_k Δ_k‖² per block.

    ``first`` is the statistics' block that row 0 of the results belongs to, in every pass.
    """
    m, plain, weighted, kept = np.empty(longest), np.empty(longest), np.empty(longest), np.zeros(w.size)
    for i in range(segments.shape[0]):
        at, n, block, row = segments[i, 0], segments[i, 1], segments[i, 2], segments[i, 3] - first
        _kept_weights(block, u.shape[0], w, masks, masking, kept)
        m[:n] = 0.0
        plain[:n] = 0.0
        weighted[:n] = 0.0
        for k in range(0, u.shape[0], GROUP):
            _three_sums(u, k, at - base, n, kept, ones, w, m, plain, weighted, norms[row])
        if masking == PER_ELEMENT:
            for k in range(u.shape[0]):
                _add_selected(u[k, at - base : at - base + n], masks[k, at : at + n], n, w[k], m)
        _write(m, at, n, block, factors, masking, out)
        plain_norm[row] += _square_sum(plain[:n])
        weighted_norm[row] += _square_sum(weighted[:n])


@_compiled({"contract"})
def gram_pass(u, base, segments, longest, w, masks, masking, factors, out, first, gram):
    """The upper triangles of the Gram matrices per block and, unless ``out`` is empty, the masked mean."""
    m, kept = np.empty(longest), np.zeros(w.size)
    for i in range(segments.shape[0]):
        at, n, block, row = segments[i, 0], segments[i, 1], segments[i, 2], segments[i, 3] - first
        _kept_weights(block, u.shape[0], w, masks, masking, kept)
        m[:n] = 0.0
        for k in range(0, u.shape[0], GROUP):
            _within(u, k, at - base, n, kept, m, gram[row])
            for other in range(k + GROUP, u.shape[0], GROUP):
                _between(u, k, other, at - base, n, gram[row])
        if masking == PER_ELEMENT:
            for k in range(u.shape[0]):
                _add_selected(u[k, at - base : at - base + n], masks[k, at : at + n], n, w[k], m)
        if out.size:
            _write(m, at, n, block, factors, masking, out)


@_compiled({"contract"})
def square_pass(x, base, segments, first, norms):
    """The squared norm of each block of one vector."""
    for i in range(segments.shape[0]):
        lo, n = segments[i, 0] - base, segments[i, 1]
        norms[segments[i, 3] - first] += _square_sum(x[lo : lo + n])


@_compiled({"contract"})
def stream_pass(x, base, segments, count, mask, masking, plain, weighted, masked):
    """Add one client to ΣΔ_k, Σ n_k Δ_k and, unless it is empty, Σ m_k n_k Δ_k."""
    for i in range(segments.shape[0]):
        at, n = segments[i, 0], segments[i, 1]
        lo = at - base
        _add_twice(x[lo : lo + n], n, count, plain[at : at + n], weighted[at : at + n])
        if masked.size:
            if masking == PER_ELEMENT:
                _add_selected(x[lo : lo + n], mask[at : at + n], n, count, masked[at : at + n])
            elif masking == NO_MASK or mask[segments[i, 2]]:
                _add(x[lo : lo + n], n, count, masked[at : at + n])


@_compiled({"contract"})
def widen(halves, lo, n, words):
    """The bits of float32 values from those of bfloat16 ones, at the start of each row of ``words``."""
    for k in range(halves.shape[0]):
        row, target = halves[k, lo : lo + n], words[k, :n]
        for j in range(n):
            target[j] = np.uint32(row[j]) << np.uint32(16)
