"""The thresholds and the token of a row: a program finds them among the listed entries (``ranges``).

Where the range holds more entries than the list, as with many equal ones, it reads them from the row instead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.linear_logp.triton_lib import ranges, rows


@triton.jit
def _items(source, start, listed, n, t, top):
    """Return logits, z, d and columns of rows.ITEMS entries of the list, or of the row; -inf for all others."""
    row_logits, row_listed, row_columns, lower, upper = source
    at = start + tl.arange(0, rows.ITEMS)
    of_row = tl.load(row_logits + at, mask=(at < n) & ~listed, other=-rows.INF)
    x = tl.load(row_listed + at, mask=(at < n) & listed, other=-rows.INF)
    columns = tl.load(row_columns + at, mask=(at < n) & listed, other=0)
    x = tl.where(listed, x, of_row)
    z = tl.div_rn(x, tl.zeros_like(x) + t)
    is_in = listed | ((top - z > lower) & (top - z <= upper))
    x, z = tl.where(is_in, x, -rows.INF), tl.where(is_in, z, -rows.INF)
    return x, z, top - z, tl.where(listed, columns, at)


@triton.jit
def _is_kept(z, d, least, far):
    return (z > -rows.INF) & (z >= least) & (d <= far)


@triton.jit
def _sum(items, mass, source, listed, n, t, top, least, far, column, WEIGHED: tl.constexpr):
    """Return the mass, or the number, of entries with z >= least, d <= far, and a smaller column.

    The first rows.ITEMS entries, and their masses, are in registers.
    """
    _, z, d, columns = items
    is_in = _is_kept(z, d, least, far) & (columns < column)
    total = tl.where(is_in, mass, 0) if WEIGHED else is_in.to(tl.int64)
    for start in range(rows.ITEMS, n, rows.ITEMS):
        _, z, d, columns = _items(source, start, listed, n, t, top)
        is_in = _is_kept(z, d, least, far) & (columns < column)
        total += tl.where(is_in, rows.mass_of(d), 0) if WEIGHED else is_in.to(tl.int64)
    return tl.sum(total, 0)


@triton.jit
def _bounds(z):
    return tl.min(tl.where(z > -rows.INF, z, rows.INF), 0), tl.max(z, 0)


@triton.jit
def _key(x):
    """Return the integer of a float, or the float of an integer, in the same order; it is its own inverse in bits."""
    return tl.where(x >= 0, x, x ^ 0x7FFFFFFF)


@triton.jit
def _threshold(items, mass, source, listed, n, t, top, above, target, WEIGHED: tl.constexpr):
    """Return the largest z at which what is above and the entries from it on reach the target; -inf if none does."""
    _, z, _, _ = items
    low, high = _bounds(z)
    for start in range(rows.ITEMS, n, rows.ITEMS):
        _, z, _, _ = _items(source, start, listed, n, t, top)
        low_of_these, high_of_these = _bounds(z)
        low, high = tl.minimum(low, low_of_these), tl.maximum(high, high_of_these)
    reached = above + _sum(items, mass, source, listed, n, t, top, -rows.INF, rows.INF, rows.ALL, WEIGHED) >= target
    first, last = _key(low.to(tl.int32, bitcast=True)).to(tl.int64), _key(high.to(tl.int32, bitcast=True)).to(tl.int64)
    while first < last:
        middle = first + (last - first + 1) // 2
        least = _key(middle.to(tl.int32)).to(tl.float32, bitcast=True)
        if above + _sum(items, mass, source, listed, n, t, top, least, rows.INF, rows.ALL, WEIGHED) >= target:
            first = middle
        else:
            last = middle - 1
    return tl.where(reached, _key(first.to(tl.int32)).to(tl.float32, bitcast=True), -rows.INF)


@triton.jit
def _summed(sums, end, WHICH: tl.constexpr):
    """Return the sum over the first segments."""
    total = tl.zeros((128,), tl.int64)
    for start in range(0, end, 128):
        at = start + tl.arange(0, 128)
        total += tl.load(sums + 2 * at + WHICH, mask=at < end, other=0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["V", "row_stride", "segments"])
def draw(
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
    uniform,
    ids,
    min_logit,
    scale,
    smallest_kept,
    V,
    row_stride,
    segments,
    T_ROWS: tl.constexpr,
    K_ROWS: tl.constexpr,
    P_ROWS: tl.constexpr,
    L_ROWS: tl.constexpr,
    HAS_K: tl.constexpr,
    HAS_P: tl.constexpr,
):
    """Write the token, the smallest kept z, the temperature and the smallest kept logit of a row. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    t, top, k, p, far, greedy = rows.request(
        norm, temperature, top_k, top_p, limit, row, V, T_ROWS, K_ROWS, P_ROWS, L_ROWS
    )
    stats += row * rows.STATS
    sums += row * segments * 2
    smallest += row * segments
    above, least = _summed(sums, segments, 0), tl.full((), -rows.INF, tl.float32)
    listed, n = tl.full((), True, tl.int1), tl.full((), 0, tl.int32)
    before = tl.full((), 0, tl.int32)
    lower, upper = far, far
    if HAS_K or HAS_P:
        lower, upper, before = ranges.kept_range(stats, masses + row * rows.STATS, k, p, far, HAS_K, HAS_P)
        if lower < upper:
            n = tl.load(stats + (rows.STATS - 1))
            listed = n <= rows.LISTED
            n = tl.where(listed, n, V)
        else:
            k, p = tl.zeros_like(k), tl.zeros_like(p) + 1.0
    source = logits + row * row_stride, listed_x + row * rows.LISTED, listed_columns + row * rows.LISTED, lower, upper
    items = _items(source, 0, listed, n, t, top)
    mass = rows.mass_of(items[2])
    if HAS_K and k > 0.0:
        count = k.to(tl.int64) - before
        least = _threshold(items, mass, source, listed, n, t, top, 0, count, False)
    if HAS_P and p < 1.0:
        whole = _summed(sums, segments, 1)
        if HAS_K and k > 0.0:
            whole = above + _sum(items, mass, source, listed, n, t, top, least, rows.INF, rows.ALL, True)
        target = tl.maximum(rows.share(whole, rows.fraction(p)), 1)
        least = tl.maximum(least, _threshold(items, mass, source, listed, n, t, top, above, target, True))
    kept = above + _sum(items, mass, source, listed, n, t, top, least, far, rows.ALL, True)
    if not listed:
        # Add them to their segments, and go on with an empty list.
        for start in range(0, n, rows.SEGMENT):
            x, z, d, _ = _items(source, start, listed, n, t, top)
            is_in, place = _is_kept(z, d, least, far), start // rows.SEGMENT
            weight = tl.sum(tl.where(is_in, rows.mass_of(d), 0), 0)
            tl.store(sums + 2 * place, tl.load(sums + 2 * place) + weight)
            low = tl.minimum(tl.load(smallest + place), tl.min(tl.where(is_in, x, rows.INF), 0))
            tl.store(smallest + place, low)
        tl.debug_barrier()
        n = tl.zeros_like(n)
        listed = n == 0
        items = _items(source, 0, listed, n, t, top)
    units = tl.where(greedy, 0, tl.minimum(rows.fraction(tl.load(uniform + row)), rows.LOW_BITS))
    wanted = rows.share(kept, units)
    first, last = tl.full((), 0, tl.int32), segments - 1
    while first < last:
        middle = (first + last) // 2
        reached = _summed(sums, middle + 1, 0)
        reached += _sum(items, mass, source, listed, n, t, top, least, far, (middle + 1) * rows.SEGMENT, True)
        if reached > wanted:
            last = middle
        else:
            first = middle + 1
    reached = _summed(sums, first, 0)
    reached += _sum(items, mass, source, listed, n, t, top, least, far, first * rows.SEGMENT, True)
    columns = first * rows.SEGMENT + tl.arange(0, rows.SEGMENT)
    x = tl.load(logits + row * row_stride + columns, mask=columns < V, other=-rows.INF)
    z = tl.div_rn(x, tl.zeros_like(x) + t)
    weights = tl.where(_is_kept(z, top - z, least, far), rows.mass_of(top - z), 0)
    token = tl.min(tl.where((weights > 0) & (reached + tl.cumsum(weights, 0) > wanted), columns, V), 0)

    keeps_all = greedy | ((least == -rows.INF) & (far == rows.INF))
    x, z, d, _ = items
    low = tl.min(tl.where(_is_kept(z, d, least, far), x, rows.INF), 0)
    for start in range(rows.ITEMS, n, rows.ITEMS):
        x, z, d, _ = _items(source, start, listed, n, t, top)
        low = tl.minimum(low, tl.min(tl.where(_is_kept(z, d, least, far), x, rows.INF), 0))
    for start in range(0, segments, 128):
        at = start + tl.arange(0, 128)
        of_segments = tl.load(smallest + at, mask=at < segments, other=rows.INF)
        low = tl.minimum(low, tl.min(of_segments, 0))
    # NaN if the norm is, or the largest z is infinite.
    known = top - top + tl.load(norm + 2 * row + 1)
    undefined = known != known
    tl.store(ids + row, tl.where(undefined | (token >= V), 0, token).to(tl.int64))
    low = tl.where(undefined, float("nan"), tl.where(keeps_all, -rows.INF, low))
    tl.store(smallest_kept + row, low)
    tl.store(min_logit + row, tl.div_rn(low, t))
    tl.store(scale + row, t)
