"""A row to sample from, in Triton: its request, and the masses of its entries, as ``drawing`` defines them."""

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
LEVELS = tl.constexpr(3)
"""Surveys, each of the range that the one before it left."""
STATS = tl.constexpr(3 * 2 * 16 + 1)
"""Numbers of a row in ``stats``: for each level masses and counts up to the edges, then the length of the list."""
SEGMENT = tl.constexpr(1024)
"""Columns whose masses are summed together; the token is sought in one of them."""
LISTED = tl.constexpr(8192)
"""Entries of a row for which the list has room."""
ITEMS = tl.constexpr(1024)
"""Entries that draw takes at a time; a segment, where it takes them from the row."""
SLACK = tl.constexpr(1e-4)
"""More than the relative error of a mass in FP32: of at most 32 + 9 + 1024 additions in a chain, and of a power."""
ALL = tl.constexpr(1 << 30)
"""More than all columns."""
INF = tl.constexpr(float("inf"))


@triton.jit
def _constant(like, value: tl.constexpr):
    return tl.zeros_like(like) + value


@triton.jit
def mass_of(d):
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
def share(mass, units):
    """Return ``mass units / 2^31``, rounded down."""
    low = mass & LOW_BITS
    return (mass >> FRACTION_BITS) * units + ((low * units) >> FRACTION_BITS)


@triton.jit
def fraction(x):
    """Return a number of 0 to 1 in units of 2^-31, rounded down."""
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
def request(
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
    """Return (temperature, largest z, k or 0 for all, p or 1 for all, limit, whether it is greedy) of a row.

    A greedy row keeps its largest entries, by a limit of 0.
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
