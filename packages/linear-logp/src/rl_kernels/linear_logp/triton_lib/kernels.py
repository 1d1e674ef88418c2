"""Kernels that draw tokens: ``drawing`` defines what they compute.

A threshold lies in a range of distances ``d`` below the largest z of its row. ``survey`` narrows the range, twice where
many entries lie in it; ``collect`` lists the entries in it and sums the masses above it; ``draw`` finds the threshold
among those listed, and the token.

Survey adds FP32 masses in any order, and allows for their error. Where the range holds more entries than the list, as
with many equal ones, ``draw`` reads the whole row instead. All that reaches a result is a sum of integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib.arithmetic import product
from rl_kernels.linear_logp import drawing

LOG2E = tl.constexpr(drawing.LOG2E)
C0, C1, C2, C3, C4, C5 = (tl.constexpr(x) for x in drawing.POWERS)
LONGEST_SHIFT = tl.constexpr(drawing.LONGEST_SHIFT)
SHIFT = tl.constexpr(drawing.MASS_BITS - 24)
ONE = tl.constexpr(float(1 << 24))
FRACTION_BITS = tl.constexpr(drawing.FRACTION_BITS)
UNITS, LOW_BITS = tl.constexpr(float(1 << drawing.FRACTION_BITS)), tl.constexpr((1 << drawing.FRACTION_BITS) - 1)
EDGES = tl.constexpr(16)
"""Distances at which survey counts."""
STATS = tl.constexpr(2 * 2 * 16 + 1)
"""Numbers of a row in ``stats``: for both levels masses and counts up to the edges, then the length of the list."""
SEGMENT = tl.constexpr(1024)
"""Columns whose masses are summed together; the token is sought in one of them."""
LISTED = tl.constexpr(8192)
"""Entries of a row for which the list has room."""
ITEMS = tl.constexpr(1024)
"""Entries that draw takes at a time."""
SLACK = tl.constexpr(1e-4)
"""More than the relative error of a mass in FP32: of at most 16 + 1024 additions, and of a power."""
ALL = tl.constexpr(1 << 30)
"""More than all columns."""
INF = tl.constexpr(float("inf"))


@triton.jit
def _constant(like, value: tl.constexpr):
    return tl.zeros_like(like) + value


@triton.jit
def _mass(d):
    """Return the masses of entries at distances ``d``, as int64."""
    t = tl.minimum(product(d, _constant(d, LOG2E)), LONGEST_SHIFT)
    whole = tl.floor(t)
    f = t - whole
    power = product(_constant(f, C5), f) + C4
    power = product(power, f) + C3
    power = product(power, f) + C2
    power = product(power, f) + C1
    power = product(power, f) + C0
    return ((power * ONE).to(tl.int32).to(tl.int64) << SHIFT) >> whole.to(tl.int32).to(tl.int64)


@triton.jit
def _share(mass, units):
    low = mass & LOW_BITS
    return (mass >> FRACTION_BITS) * units + ((low * units) >> FRACTION_BITS)


@triton.jit
def _fraction(x):
    units = x.to(tl.float64) * UNITS
    return tl.minimum(tl.where(units >= 0.0, units, 0.0), UNITS).to(tl.int64)


@triton.jit
def _number(value, row, PER_ROW: tl.constexpr):
    """Return a parameter, which is a number or one per row."""
    if PER_ROW:
        return tl.load(value + row)
    else:
        return tl.full((), value, tl.float32)


@triton.jit
def _request(
    norm,
    temperature,
    top_k,
    top_p,
    limit,
    row,
    V,
    T_ROWS: tl.constexpr,
    K_ROWS: tl.constexpr,
    P_ROWS: tl.constexpr,
    L_ROWS: tl.constexpr,
):
    """Return the temperature, the largest z, k (0 for all), p (1 for all) and the limit of a row, and if it is greedy.

    A greedy row is one with a limit of 0.
    """
    t = _number(temperature, row, T_ROWS)
    greedy = t == 0.0
    t = tl.where(greedy, 1.0, t)
    k = _number(top_k, row, K_ROWS)
    k = tl.where((k > 0.0) & (k < V) & ~greedy, k, 0.0)
    p = _number(top_p, row, P_ROWS)
    p = tl.where((p < 1.0) & ~greedy, p, 1.0)
    far = tl.where(greedy, 0.0, _number(limit, row, L_ROWS))
    return t, tl.div_rn(tl.load(norm + 2 * row), t), k, p, far, greedy


@triton.jit
def _first_edge(j):
    """Return the edges of the first level: 1, 2, ... 8, then steps by the root of 2 to 128."""
    j = j.to(tl.float32)
    return tl.where(j < 8.0, j + 1.0, 8.0 * tl.exp2((j - 7.0) * 0.5))


@triton.jit
def _second_edge(j, lower, upper):
    """Return the edges of the second level, which cut the range from lower to upper; the last one is upper."""
    step = (j + 1).to(tl.float32)
    low = tl.maximum(lower, 0.0)
    linear = low + (upper - low) * (step * (1.0 / EDGES))
    growing = tl.maximum(low, 1.0) * tl.exp2(step * 0.5)
    return tl.where(j == EDGES - 1, upper, tl.where(upper < INF, linear, growing))


@triton.jit
def _at(values, j, index, otherwise):
    """Return ``values[index]``, or ``otherwise`` if there is no such value."""
    value = tl.sum(tl.where(j == index, values, tl.zeros_like(values)), 0)
    return tl.where((index >= 0) & (index < EDGES), value, otherwise)


@triton.jit
def _narrowed(stats, masses, k, p, edges, j, lower, before, lighter, whole, HAS_K: tl.constexpr, HAS_P: tl.constexpr):
    """Return (lower, upper, entries up to lower, their mass, bound of the entries in between) by the sums up to edges.

    The range begins at ``lower`` at least, up to which there are ``before`` entries of mass ``lighter``; ``whole`` is
    the mass of the row.
    """
    count, mass = tl.zeros_like(j), tl.zeros_like(edges)
    first, last = tl.full((), EDGES, tl.int32), tl.full((), -1, tl.int32)
    low, high = whole, whole
    if HAS_K:
        count = tl.load(stats + EDGES + j)
    if HAS_P:
        mass = tl.load(masses + j)
    if HAS_K and k > 0.0:
        first = tl.sum((count < k).to(tl.int32), 0)
        last = first
        low, high = tl.maximum(_at(mass, j, first - 1, lighter), 1.0), _at(mass, j, first, whole)
    if HAS_P and p < 1.0:
        first = tl.minimum(first, tl.sum((mass * (1.0 + SLACK) < low * p).to(tl.int32), 0))
        last = tl.maximum(last, tl.sum((mass * (1.0 - SLACK) < high * p).to(tl.int32), 0))
    lower, upper = _at(edges, j, first - 1, lower), _at(edges, j, last, INF)
    before, lighter = _at(count, j, first - 1, before), _at(mass, j, first - 1, lighter)
    if HAS_K:
        inside = (_at(count, j, last, 1 << 30) - before).to(tl.float32)
    else:
        # An entry has at least the mass of one at the upper edge.
        inside = (_at(mass, j, last, INF) - lighter) * tl.exp2(tl.minimum(upper * LOG2E, 100.0))
    return lower, upper, before, lighter, inside


@triton.jit
def _range(stats, masses, k, p, LEVELS: tl.constexpr, HAS_K: tl.constexpr, HAS_P: tl.constexpr):
    """Return (lower, upper, entries up to lower, whether there may be too many in between) of a row."""
    j = tl.arange(0, EDGES)
    edges, whole = _first_edge(j), tl.full((), 0.0, tl.float32)
    if HAS_P:
        whole = tl.load(masses + EDGES - 1)
    lower, before, lighter = tl.full((), -1.0, tl.float32), tl.full((), 0, tl.int32), tl.full((), 0.0, tl.float32)
    lower, upper, before, lighter, inside = _narrowed(
        stats, masses, k, p, edges, j, lower, before, lighter, whole, HAS_K, HAS_P
    )
    is_wide = inside > LISTED
    if LEVELS == 2 and is_wide:
        edges, stats, masses = _second_edge(j, lower, upper), stats + 2 * EDGES, masses + 2 * EDGES
        lower, upper, before, lighter, inside = _narrowed(
            stats, masses, k, p, edges, j, lower, before, lighter, whole, HAS_K, HAS_P
        )
    return lower, upper, before, is_wide


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
    t, top, k, p, _, _ = _request(norm, temperature, top_k, top_p, limit, row, V, T_ROWS, K_ROWS, P_ROWS, L_ROWS)
    stats += row * STATS
    masses += row * STATS
    j = tl.arange(0, EDGES)
    active = (k > 0.0) | (p < 1.0)
    edges = _first_edge(j)
    if LEVEL == 2:
        lower, upper, _, is_wide = _range(stats, masses, k, p, 1, HAS_K, HAS_P)
        edges = _second_edge(j, lower, upper)
        active = active & is_wide
    if active:
        # As many columns at a time as leave registers for the sums.
        STRIDE: tl.constexpr = 256 if HAS_K and HAS_P else 512
        UNROLLED: tl.constexpr = 1 if HAS_K and HAS_P else 2
        mass = tl.zeros((EDGES, STRIDE), tl.float32)
        count = tl.zeros((EDGES, STRIDE), tl.int32)
        begin = tl.program_id(1) * WIDTH
        for start in tl.range(begin, tl.minimum(begin + WIDTH, V), STRIDE, loop_unroll_factor=UNROLLED):
            columns = start + tl.arange(0, STRIDE)
            x = tl.load(logits + row * row_stride + columns, mask=columns < V, other=-INF)
            d = top - tl.div_rn(x, tl.zeros_like(x) + t)
            # No edge is above NaN.
            is_up_to = tl.where(d < INF, d, float("nan"))[None, :] <= edges[:, None]
            if HAS_P:
                mass += tl.where(is_up_to, tl.exp2(-d * LOG2E)[None, :], 0.0)
            if HAS_K:
                count += is_up_to.to(tl.int32)
        place = (LEVEL - 1) * 2 * EDGES + j
        if HAS_P:
            tl.atomic_add(masses + place, tl.sum(mass, 1), sem="relaxed")
        if HAS_K:
            tl.atomic_add(stats + place + EDGES, tl.sum(count, 1), sem="relaxed")


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
    t, top, k, p, far, _ = _request(norm, temperature, top_k, top_p, limit, row, V, T_ROWS, K_ROWS, P_ROWS, L_ROWS)
    lower, upper, _ = _kept_range(stats + row * STATS, masses + row * STATS, k, p, far, HAS_K, HAS_P)
    # Top-p without top-k takes its share of the whole row.
    needs_all = (p < 1.0) & (k == 0.0)
    for segment in range(first, tl.minimum(first + EACH, segments)):
        columns = segment * SEGMENT + tl.arange(0, SEGMENT)
        x = tl.load(logits + row * row_stride + columns, mask=columns < V, other=-INF)
        z = tl.div_rn(x, tl.zeros_like(x) + t)
        d = top - z
        is_above = (z > -INF) & (d <= lower)
        nearest = tl.min(tl.where(z > -INF, d, INF), 0)
        above, whole = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
        if needs_all | (nearest <= lower):
            mass = tl.where(z > -INF, _mass(d), 0)
            above, whole = tl.sum(tl.where(is_above, mass, 0), 0), tl.sum(mass, 0)
        place = row * segments + segment
        tl.store(sums + 2 * place, above)
        if HAS_P:
            tl.store(sums + 2 * place + 1, whole)
        tl.store(smallest + place, tl.min(tl.where(is_above, x, INF), 0))
        if HAS_K or HAS_P:
            is_in = (z > -INF) & (d > lower) & (d <= upper)
            found = tl.sum(is_in.to(tl.int32), 0)
            if found > 0:
                start = tl.atomic_add(stats + row * STATS + (STATS - 1), found, sem="relaxed")
                at = start + tl.cumsum(is_in.to(tl.int32), 0) - 1
                inside = is_in & (at < LISTED)
                tl.store(listed_x + row * LISTED + at, x, mask=inside)
                tl.store(listed_columns + row * LISTED + at, columns, mask=inside)


@triton.jit
def _kept_range(stats, masses, k, p, far, HAS_K: tl.constexpr, HAS_P: tl.constexpr):
    """Return lower, upper and the entries up to lower; both are the limit of min-p if that alone decides."""
    lower, upper, before = far, far, tl.full((), 0, tl.int32)
    if (HAS_K or HAS_P) and (k > 0.0) | (p < 1.0):
        low, high, entries, _ = _range(stats, masses, k, p, 2, HAS_K, HAS_P)
        if low < far:
            lower, upper, before = low, high, entries
    return lower, upper, before


@triton.jit
def _items(source, start, listed, n, t, top):
    """Return logits, z, d and columns of ITEMS entries, of the list or of the row; -inf beyond the last."""
    row_logits, row_listed, row_columns = source
    at = start + tl.arange(0, ITEMS)
    of_row = tl.load(row_logits + at, mask=(at < n) & ~listed, other=-INF)
    x = tl.load(row_listed + at, mask=(at < n) & listed, other=-INF)
    columns = tl.load(row_columns + at, mask=(at < n) & listed, other=0)
    x = tl.where(listed, x, of_row)
    z = tl.div_rn(x, tl.zeros_like(x) + t)
    return x, z, top - z, tl.where(listed, columns, at)


@triton.jit
def _is_kept(z, d, least, far):
    return (z > -INF) & (z >= least) & (d <= far)


@triton.jit
def _sum(items, mass, source, listed, n, t, top, least, far, column, WEIGHED: tl.constexpr):
    """Return the mass, or the number, of entries with z >= least, d <= far, and a smaller column.

    The first ITEMS entries, and their masses, are in registers.
    """
    _, z, d, columns = items
    is_in = _is_kept(z, d, least, far) & (columns < column)
    total = tl.where(is_in, mass, 0) if WEIGHED else is_in.to(tl.int64)
    for start in range(ITEMS, n, ITEMS):
        _, z, d, columns = _items(source, start, listed, n, t, top)
        is_in = _is_kept(z, d, least, far) & (columns < column)
        total += tl.where(is_in, _mass(d), 0) if WEIGHED else is_in.to(tl.int64)
    return tl.sum(total, 0)


@triton.jit
def _bounds(z):
    return tl.min(tl.where(z > -INF, z, INF), 0), tl.max(z, 0)


@triton.jit
def _key(x):
    """Return the integer of a float, or the float of an integer, in the same order; it is its own inverse in bits."""
    return tl.where(x >= 0, x, x ^ 0x7FFFFFFF)


@triton.jit
def _threshold(items, mass, source, listed, n, t, top, above, target, WEIGHED: tl.constexpr):
    """Return the largest z at which what is above and the entries from it on reach the target; -inf if none does."""
    _, z, _, _ = items
    low, high = _bounds(z)
    for start in range(ITEMS, n, ITEMS):
        _, z, _, _ = _items(source, start, listed, n, t, top)
        low_of_these, high_of_these = _bounds(z)
        low, high = tl.minimum(low, low_of_these), tl.maximum(high, high_of_these)
    reached = above + _sum(items, mass, source, listed, n, t, top, -INF, INF, ALL, WEIGHED) >= target
    first, last = _key(low.to(tl.int32, bitcast=True)).to(tl.int64), _key(high.to(tl.int32, bitcast=True)).to(tl.int64)
    while first < last:
        middle = first + (last - first + 1) // 2
        least = _key(middle.to(tl.int32)).to(tl.float32, bitcast=True)
        if above + _sum(items, mass, source, listed, n, t, top, least, INF, ALL, WEIGHED) >= target:
            first = middle
        else:
            last = middle - 1
    return tl.where(reached, _key(first.to(tl.int32)).to(tl.float32, bitcast=True), -INF)


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
    t, top, k, p, far, greedy = _request(norm, temperature, top_k, top_p, limit, row, V, T_ROWS, K_ROWS, P_ROWS, L_ROWS)
    sums += row * segments * 2
    source = (logits + row * row_stride, listed_x + row * LISTED, listed_columns + row * LISTED)
    above, least = _summed(sums, segments, 0), tl.full((), -INF, tl.float32)
    listed, n = tl.full((), True, tl.int1), tl.full((), 0, tl.int32)
    before = tl.full((), 0, tl.int32)
    if HAS_K or HAS_P:
        lower, upper, before = _kept_range(stats + row * STATS, masses + row * STATS, k, p, far, HAS_K, HAS_P)
        if lower < upper:
            n = tl.load(stats + row * STATS + (STATS - 1))
            listed = n <= LISTED
            if not listed:
                n, above, before = V, tl.zeros_like(above), tl.zeros_like(before)
        else:
            k, p = tl.zeros_like(k), tl.zeros_like(p) + 1.0
    items = _items(source, 0, listed, n, t, top)
    mass = _mass(items[2])
    if HAS_K and k > 0.0:
        count = k.to(tl.int64) - before
        least = _threshold(items, mass, source, listed, n, t, top, 0, count, False)
    if HAS_P and p < 1.0:
        whole = _summed(sums, segments, 1)
        if HAS_K and k > 0.0:
            whole = above + _sum(items, mass, source, listed, n, t, top, least, INF, ALL, True)
        target = tl.maximum(_share(whole, _fraction(p)), 1)
        least = tl.maximum(least, _threshold(items, mass, source, listed, n, t, top, above, target, True))
    kept = above + _sum(items, mass, source, listed, n, t, top, least, far, ALL, True)
    units = tl.where(greedy, 0, tl.minimum(_fraction(tl.load(uniform + row)), LOW_BITS))
    wanted = _share(kept, units)
    first, last = tl.full((), 0, tl.int32), segments - 1
    while first < last:
        middle = (first + last) // 2
        reached = _sum(items, mass, source, listed, n, t, top, least, far, (middle + 1) * SEGMENT, True)
        if listed:
            reached += _summed(sums, middle + 1, 0)
        if reached > wanted:
            last = middle
        else:
            first = middle + 1
    reached = _sum(items, mass, source, listed, n, t, top, least, far, first * SEGMENT, True)
    if listed:
        reached += _summed(sums, first, 0)
    columns = first * SEGMENT + tl.arange(0, SEGMENT)
    x = tl.load(logits + row * row_stride + columns, mask=columns < V, other=-INF)
    z = tl.div_rn(x, tl.zeros_like(x) + t)
    weights = tl.where(_is_kept(z, top - z, least, far), _mass(top - z), 0)
    token = tl.min(tl.where((weights > 0) & (reached + tl.cumsum(weights, 0) > wanted), columns, V), 0)

    keeps_all = greedy | ((least == -INF) & (far == INF))
    x, z, d, _ = items
    low = tl.min(tl.where(_is_kept(z, d, least, far), x, INF), 0)
    for start in range(ITEMS, n, ITEMS):
        x, z, d, _ = _items(source, start, listed, n, t, top)
        low = tl.minimum(low, tl.min(tl.where(_is_kept(z, d, least, far), x, INF), 0))
    if listed:
        for start in range(0, segments, 128):
            at = start + tl.arange(0, 128)
            low = tl.minimum(low, tl.min(tl.load(smallest + row * segments + at, mask=at < segments, other=INF), 0))
    # NaN if the norm is, or the largest z is infinite.
    known = top - top + tl.load(norm + 2 * row + 1)
    undefined = known != known
    tl.store(ids + row, tl.where(undefined | (token >= V), 0, token).to(tl.int64))
    low = tl.where(undefined, float("nan"), tl.where(keeps_all, -INF, low))
    tl.store(smallest_kept + row, low)
    tl.store(min_logit + row, tl.div_rn(low, t))
    tl.store(scale + row, t)
