"""The range of distances d below the largest z in which the threshold of a row lies.

``survey`` narrows the range, up to three times where many entries lie in it. It adds FP32 masses in any order, and
allows for their error. ``collect`` lists the entries in the range, in any order, and sums the masses above it, as
integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.linear_logp.triton_lib import rows


@triton.jit
def _first_edge(j):
    """Return the edges of the first level: 1, 2, ... 8, then steps by the root of 2 to 128."""
    j = j.to(tl.float32)
    return tl.where(j < 8.0, j + 1.0, 8.0 * tl.exp2((j - 7.0) * 0.5))


@triton.jit
def _next_edge(j, lower, upper):
    """Return the edges of a further level, which cut the range from lower to upper; the last one is upper."""
    step = (j + 1).to(tl.float32)
    low = tl.maximum(lower, 0.0)
    linear = low + (upper - low) * (step * (1.0 / rows.EDGES))
    growing = tl.maximum(low, 1.0) * tl.exp2(step * 0.5)
    return tl.where(j == rows.EDGES - 1, upper, tl.where(upper < rows.INF, linear, growing))


@triton.jit
def _at(values, j, index, otherwise):
    """Return ``values[index]``, or ``otherwise`` if there is no such value."""
    value = tl.sum(tl.where(j == index, values, tl.zeros_like(values)), 0)
    return tl.where((index >= 0) & (index < rows.EDGES), value, otherwise)


@triton.jit
def _narrowed(stats, masses, k, p, edges, j, lower, before, lighter, whole, HAS_K: tl.constexpr, HAS_P: tl.constexpr):
    """Return (lower, upper, entries up to lower, their mass, bound of the entries in between) by the sums up to edges.

    The range begins at ``lower`` at least, up to which there are ``before`` entries of mass ``lighter``; ``whole`` is
    the mass of the row.
    """
    count, mass = tl.zeros_like(j), tl.zeros_like(edges)
    first, last = tl.full((), rows.EDGES, tl.int32), tl.full((), -1, tl.int32)
    low, high = whole, whole
    if HAS_K:
        count = tl.load(stats + rows.EDGES + j)
    if HAS_P:
        mass = tl.load(masses + j)
    if HAS_K and k > 0.0:
        first = tl.sum((count < k).to(tl.int32), 0)
        last = first
        low, high = tl.maximum(_at(mass, j, first - 1, lighter), 1.0), _at(mass, j, first, whole)
    if HAS_P and p < 1.0:
        first = tl.minimum(first, tl.sum((mass * (1.0 + rows.SLACK) < low * p).to(tl.int32), 0))
        last = tl.maximum(last, tl.sum((mass * (1.0 - rows.SLACK) < high * p).to(tl.int32), 0))
    lower, upper = _at(edges, j, first - 1, lower), _at(edges, j, last, rows.INF)
    before, lighter = _at(count, j, first - 1, before), _at(mass, j, first - 1, lighter)
    if HAS_K:
        inside = (_at(count, j, last, 1 << 30) - before).to(tl.float32)
    else:
        # An entry has at least the mass of one at the upper edge.
        inside = (_at(mass, j, last, rows.INF) - lighter) * tl.exp2(tl.minimum(upper * rows.LOG2E, 100.0))
    return lower, upper, before, lighter, inside


@triton.jit
def _range(stats, masses, k, p, LEVELS: tl.constexpr, HAS_K: tl.constexpr, HAS_P: tl.constexpr):
    """Return (lower, upper, entries up to lower, whether there may be too many in between) of a row."""
    j = tl.arange(0, rows.EDGES)
    edges, whole = _first_edge(j), tl.full((), 0.0, tl.float32)
    if HAS_P:
        whole = tl.load(masses + rows.EDGES - 1)
    lower, before, lighter = tl.full((), -1.0, tl.float32), tl.full((), 0, tl.int32), tl.full((), 0.0, tl.float32)
    lower, upper, before, lighter, inside = _narrowed(
        stats, masses, k, p, edges, j, lower, before, lighter, whole, HAS_K, HAS_P
    )
    for _ in tl.static_range(1, LEVELS):
        stats, masses = stats + 2 * rows.EDGES, masses + 2 * rows.EDGES
        if inside > rows.LISTED:
            edges = _next_edge(j, lower, upper)
            lower, upper, before, lighter, inside = _narrowed(
                stats, masses, k, p, edges, j, lower, before, lighter, whole, HAS_K, HAS_P
            )
    return lower, upper, before, inside > rows.LISTED


@triton.jit(do_not_specialize=["V", "row_stride"])
def survey(
    logits,
    norm,
    temperature,
    top_k,
    top_p,
    limit,
    stats,
    masses,
    V,
    row_stride,
    T_ROWS: tl.constexpr,
    K_ROWS: tl.constexpr,
    P_ROWS: tl.constexpr,
    L_ROWS: tl.constexpr,
    HAS_K: tl.constexpr,
    HAS_P: tl.constexpr,
    LEVEL: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Add the masses and counts of WIDTH columns up to each edge of a level. Grid: rows, parts of the vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    t, top, k, p, _, _ = rows.request(norm, temperature, top_k, top_p, limit, row, V, T_ROWS, K_ROWS, P_ROWS, L_ROWS)
    stats += row * rows.STATS
    masses += row * rows.STATS
    j = tl.arange(0, rows.EDGES)
    active = (k > 0.0) | (p < 1.0)
    edges = _first_edge(j)
    if LEVEL > 1:
        lower, upper, _, is_wide = _range(stats, masses, k, p, LEVEL - 1, HAS_K, HAS_P)
        edges = _next_edge(j, lower, upper)
        active = active & is_wide
    if active:
        # As many columns at a time as leave registers for the sums.
        STRIDE: tl.constexpr = 256 if HAS_K and HAS_P else 512
        UNROLLED: tl.constexpr = 1 if HAS_K and HAS_P else 2
        mass = tl.zeros((rows.EDGES, STRIDE), tl.float32)
        count = tl.zeros((rows.EDGES, STRIDE), tl.int32)
        begin = tl.program_id(1) * WIDTH
        for start in tl.range(begin, tl.minimum(begin + WIDTH, V), STRIDE, loop_unroll_factor=UNROLLED):
            columns = start + tl.arange(0, STRIDE)
            x = tl.load(logits + row * row_stride + columns, mask=columns < V, other=-rows.INF)
            d = top - tl.div_rn(x, tl.zeros_like(x) + t)
            # No edge is above NaN.
            is_up_to = tl.where(d < rows.INF, d, float("nan"))[None, :] <= edges[:, None]
            if HAS_P:
                mass += tl.where(is_up_to, tl.exp2(-d * rows.LOG2E)[None, :], 0.0)
            if HAS_K:
                count += is_up_to.to(tl.int32)
        place = (LEVEL - 1) * 2 * rows.EDGES + j
        if HAS_P:
            tl.atomic_add(masses + place, tl.sum(mass, 1), sem="relaxed")
        if HAS_K:
            tl.atomic_add(stats + place + rows.EDGES, tl.sum(count, 1), sem="relaxed")


@triton.jit(do_not_specialize=["V", "row_stride", "segments"])
def collect(
    logits,
    norm,
    temperature,
    top_k,
    top_p,
    limit,
    stats,
    masses,
    sums,
    smallest,
    listed_x,
    listed_columns,
    V,
    row_stride,
    segments,
    T_ROWS: tl.constexpr,
    K_ROWS: tl.constexpr,
    P_ROWS: tl.constexpr,
    L_ROWS: tl.constexpr,
    HAS_K: tl.constexpr,
    HAS_P: tl.constexpr,
    EACH: tl.constexpr,
):
    """List the entries of EACH segments in the range, in any order; sum the masses above it, and all, for each segment.

    Grid: rows, groups of segments.
    """
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * EACH
    t, top, k, p, far, _ = rows.request(norm, temperature, top_k, top_p, limit, row, V, T_ROWS, K_ROWS, P_ROWS, L_ROWS)
    lower, upper, _ = kept_range(stats + row * rows.STATS, masses + row * rows.STATS, k, p, far, HAS_K, HAS_P)
    # Top-p without top-k takes its share of the whole row.
    needs_all = (p < 1.0) & (k == 0.0)
    for segment in range(first, tl.minimum(first + EACH, segments)):
        columns = segment * rows.SEGMENT + tl.arange(0, rows.SEGMENT)
        x = tl.load(logits + row * row_stride + columns, mask=columns < V, other=-rows.INF)
        z = tl.div_rn(x, tl.zeros_like(x) + t)
        d = top - z
        is_above = (z > -rows.INF) & (d <= lower)
        nearest = tl.min(tl.where(z > -rows.INF, d, rows.INF), 0)
        above, whole = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
        if needs_all | (nearest <= lower):
            mass = tl.where(z > -rows.INF, rows.mass_of(d), 0)
            above, whole = tl.sum(tl.where(is_above, mass, 0), 0), tl.sum(mass, 0)
        place = row * segments + segment
        tl.store(sums + 2 * place, above)
        if HAS_P:
            tl.store(sums + 2 * place + 1, whole)
        tl.store(smallest + place, tl.min(tl.where(is_above, x, rows.INF), 0))
        if HAS_K or HAS_P:
            is_in = (z > -rows.INF) & (d > lower) & (d <= upper)
            found = tl.sum(is_in.to(tl.int32), 0)
            if found > 0:
                start = tl.atomic_add(stats + row * rows.STATS + (rows.STATS - 1), found, sem="relaxed")
                at = start + tl.cumsum(is_in.to(tl.int32), 0) - 1
                inside = is_in & (at < rows.LISTED)
                tl.store(listed_x + row * rows.LISTED + at, x, mask=inside)
                tl.store(listed_columns + row * rows.LISTED + at, columns, mask=inside)


@triton.jit
def kept_range(stats, masses, k, p, far, HAS_K: tl.constexpr, HAS_P: tl.constexpr):
    """Return lower, upper and the entries up to lower; both are the limit of min-p if that alone decides."""
    lower, upper, before = far, far, tl.full((), 0, tl.int32)
    if (HAS_K or HAS_P) and (k > 0.0) | (p < 1.0):
        low, high, entries, _ = _range(stats, masses, k, p, rows.LEVELS, HAS_K, HAS_P)
        if low < far:
            lower, upper, before = low, high, entries
    return lower, upper, before
