"""Softmax statistics of rows in base 2, for every Triton kernel over a vocabulary: states, their merge, the gradient.

A state (top, total, weighted) stands for some raw values x of a row, whose logits are ``z = x * inv``: the largest x,
the sum of ``2^t``, and the sum of ``2^t t``. Here ``t = x c - r``, ``c = inv log2(e)``, and r is ``top c`` rounded to
FP32. One fma per element forms t from r; ``finish`` corrects once per row for the rounding of r. In memory states are
``parts[part, 3, row]``.

Order of the sums: Triton's reduction within a block (``add_block``, ``rows_state``); states are merged in ascending
order. Roundings are explicit (``fma``, ``product``), so that no compiler may fuse in one kernel and not in another. The
one exception is the terms of a block's weighted sum, which all kernels of an operator compute by the same code.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib.arithmetic import fma, product

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LEAST = tl.constexpr(-1.0e30)
"""Replaces an exponent of -inf where it is multiplied by its power, which is 0: -inf * 0 would be NaN."""
FAR = tl.constexpr(2147483648.0)
"""2^31. From this magnitude on a reference is too coarse for exponents, or infinite. Neighboring values of x are then
so far apart that only those equal to the largest count."""
LEAST_SHIFT = tl.constexpr(-256.0)
"""Lower bound of the shift of a state's exponents: 2^-256 is 0 in FP32, and a product with it is finite."""
LOW_EXPONENT, HIGH_EXPONENT = tl.constexpr(30 << 23), tl.constexpr(254 << 23)
"""Bits of 2^-97, below which |r| >= FAR does not occur, and of 2^127."""


@triton.jit
def empty():
    """Return the state of no values, as scalars."""
    return tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)


@triton.jit
def exponents_of(top, c):
    """Return (factor, r): the exponent of x is ``x factor - r``, normally ``x c - r``.

    Where ``|r| >= FAR`` the factor is a power of two, so its products are exact: the exponent is 0 where x is the
    largest value, and too small to count elsewhere.
    """
    r = product(top, c)
    is_far = tl.abs(r) >= FAR
    # The power of two that scales the largest value to a magnitude of 2^30 .. 2^31.
    exponent = tl.maximum(top.to(tl.int32, bitcast=True) & 0x7F800000, LOW_EXPONENT)
    exact = (-(exponent - LOW_EXPONENT) + HIGH_EXPONENT).to(tl.float32, bitcast=True)
    # If all values are -inf, all powers are 0.
    far = tl.where(top == float("-inf"), 0.0, product(top, exact))
    return tl.where(is_far, exact, c), tl.where(is_far, far, r)


@triton.jit
def add_block(x, c, top, total, weighted, ENTROPY: tl.constexpr):
    """Return a running state with a block of raw values added."""
    return add_block_up_to(x, tl.max(x, 0), c, top, total, weighted, ENTROPY)


@triton.jit
def add_block_up_to(x, most, c, top, total, weighted, ENTROPY: tl.constexpr):
    """Return what ``add_block`` returns, of a block whose largest value is ``most``; that may be NaN if one is."""
    new = tl.maximum(top, most)
    factor, r = exponents_of(new, c)
    exponent = fma(x, factor, -r)
    power = tl.exp2(exponent)
    shift, scale = _shift(top, new, c)
    if ENTROPY:
        block = tl.sum(power * tl.maximum(exponent, LEAST), 0)
        weighted = fma(fma(shift, total, weighted), scale, block)
    return new, fma(total, scale, tl.sum(power, 0)), weighted


@triton.jit
def rows_state(x, c, ENTROPY: tl.constexpr):
    """Return the states of the rows of ``x[rows, columns]``, whose factors are ``c[rows]``."""
    top = tl.max(x, 1)
    factor, r = exponents_of(top, c)
    exponent = fma(x, factor[:, None], -r[:, None])
    power = tl.exp2(exponent)
    weighted = tl.zeros_like(top)
    if ENTROPY:
        weighted = tl.sum(power * tl.maximum(exponent, LEAST), 1)
    return top, tl.sum(power, 1), weighted


@triton.jit
def _shift(top, new, c):
    """Return how far a state's exponents shift when its largest value becomes ``new``, and two to that power.

    With infinite numbers the difference may be NaN. The bound then takes its place, and the state is too small to
    count.
    """
    shift = product(top, c) - product(new, c)
    shift = tl.where(shift > LEAST_SHIFT, shift, LEAST_SHIFT)
    shift = tl.where(top == new, 0.0, shift)
    return shift, tl.exp2(shift)


@triton.jit
def merge(top, total, weighted, other_top, other_total, other_weighted, c, ENTROPY: tl.constexpr):
    """Return the merged state of two; not associative in the last bit, so always merge in ascending order."""
    new = tl.maximum(top, other_top)
    shift, scale = _shift(top, new, c)
    other_shift, other_scale = _shift(other_top, new, c)
    if ENTROPY:
        other = fma(other_shift, other_total, other_weighted) * other_scale
        weighted = fma(fma(shift, total, weighted), scale, other)
    return new, fma(total, scale, other_total * other_scale), weighted


@triton.jit
def finish(top, total, weighted, inv):
    """Return (max x, log of the sum of e^(z - max z), logsumexp, entropy) of a whole row; NaN if it is all -inf.

    No rounding takes the entropy below 0.
    """
    factor, r = exponents_of(top, inv * LOG2E)
    top = tl.where(top == float("-inf"), float("nan"), top)
    log_total = LN2 * (tl.log2(total) - fma(top, factor, -r))
    entropy = product(tl.log2(total) - weighted / total, tl.zeros_like(total) + LN2) - below_0(log_total)
    # Not tl.maximum, which drops NaN.
    return top, log_total, fma(top, inv, log_total), tl.where(entropy < 0.0, 0.0, entropy)


@triton.jit
def below_0(log_total):
    """Return how far a log of a sum was rounded below 0, in a row whose largest value is nearly certain.

    Its entropy was rounded as far.
    """
    return tl.minimum(log_total, 0.0)


@triton.jit
def inverse(temperature, rows, here, PER_ROW: tl.constexpr):
    """Return one over the temperature of rows, a vector or a scalar; ``temperature`` is a number, or one per row."""
    if PER_ROW:
        return 1.0 / tl.load(temperature + rows, mask=here, other=1.0)
    else:
        return tl.where(here, 1.0 / tl.full((), temperature, tl.float32), 1.0)


@triton.jit
def store_part(parts, part, count, rows, here, top, total, weighted, ENTROPY: tl.constexpr):
    """Write the states of rows to ``parts[part, 3, count]``."""
    count = tl.full((), count, tl.int64)
    place = parts + part * 3 * count + rows
    tl.store(place, top, mask=here)
    tl.store(place + count, total, mask=here)
    if ENTROPY:
        tl.store(place + 2 * count, weighted, mask=here)


@triton.jit
def merge_parts(parts, begin, end, count, rows, here, c, ENTROPY: tl.constexpr):
    """Return the states of rows over the parts from begin to end, merged in ascending order."""
    total, weighted = tl.zeros_like(c), tl.zeros_like(c)
    top = total + float("-inf")
    count = tl.full((), count, tl.int64)
    # Unrolled, so that several parts load at once.
    for part in tl.range(begin, end, loop_unroll_factor=8):
        place = parts + part * 3 * count + rows
        part_top = tl.load(place, mask=here, other=float("-inf"))
        part_total = tl.load(place + count, mask=here, other=0.0)
        part_weighted = part_total
        if ENTROPY:
            part_weighted = tl.load(place + 2 * count, mask=here, other=0.0)
        top, total, weighted = merge(top, total, weighted, part_top, part_total, part_weighted, c, ENTROPY)
    return top, total, weighted


@triton.jit
def store_statistics(x, top, total, weighted, inv, logp, norm, lse, entropy, rows, here, active, ENTROPY: tl.constexpr):
    """Write the statistics of rows whose selected raw value is x; 0 where a row is not active.

    No rounding takes the log-probability above 0.

    ``load_norm`` reads ``norm[row, 2]``. The logsumexp, computed from both, has too few digits where x is large.
    """
    top, log_total, row_lse, row_entropy = finish(top, total, weighted, inv)
    log_p = fma(x - top, inv, -log_total)
    tl.store(logp + rows, tl.where(active & ~(log_p > 0.0), log_p, 0.0), mask=here)
    place = norm + 2 * rows.to(tl.int64)
    tl.store(place, tl.where(active, top, 0.0), mask=here)
    tl.store(place + 1, tl.where(active, log_total, 0.0), mask=here)
    if ENTROPY:
        tl.store(lse + rows, tl.where(active, row_lse, 0.0), mask=here)
        tl.store(entropy + rows, tl.where(active, row_entropy, 0.0), mask=here)


@triton.jit
def load_norm(norm, rows, here):
    """Return the largest raw value of rows, and the log of the sum of e^(z - max z)."""
    place = norm + 2 * rows.to(tl.int64)
    return tl.load(place, mask=here, other=0.0), tl.load(place + 1, mask=here, other=0.0)


@triton.jit
def upstream_of(
    grad_logp,
    grad_logsumexp,
    grad_entropy,
    rows,
    here,
    inv,
    HAS_LOGP: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
):
    """Return (g_logp, g_lse - g_logp, g_H) of rows, over the temperature; 0 for a gradient that is missing."""
    chosen, slope, curve = tl.zeros_like(inv), tl.zeros_like(inv), tl.zeros_like(inv)
    if HAS_LOGP:
        chosen = tl.load(grad_logp + rows, mask=here, other=0.0)
    if HAS_LSE:
        slope = tl.load(grad_logsumexp + rows, mask=here, other=0.0)
    if HAS_ENTROPY:
        curve = tl.load(grad_entropy + rows, mask=here, other=0.0)
    return chosen * inv, (slope - chosen) * inv, curve * inv


@triton.jit
def dlogits(x, selected, zero_or_nan, c, top, log_total, entropy, chosen, slope, curve, HAS_ENTROPY: tl.constexpr):
    """Return dx_j = (g_logp (1[j is selected] - p_j) + g_lse p_j - g_H p_j (log p_j + H)) / temperature.

    ``zero_or_nan`` is 0, or NaN for a row whose id is not a column: its gradient is NaN.
    """
    # x - top is exact for the values that count, however large they are.
    log_p = fma(x - top, c, -(log_total * LOG2E))
    p = tl.exp2(log_p)
    if HAS_ENTROPY:
        # Where p is 0 its factor may be infinite, and the product NaN.
        target = tl.where(selected, chosen, zero_or_nan)
        # The entropy is rounded as log p is, which keeps their sum exact near 0.
        surprise = log_p + product(entropy + below_0(log_total), tl.zeros_like(entropy) + LOG2E)
        return tl.where(p == 0.0, target, fma(p, fma(surprise, -(curve * LN2), slope), target))
    else:
        return fma(p, slope + zero_or_nan, tl.where(selected, chosen, 0.0))


@triton.jit
def zero_or_nan(id, V):
    """Return 0, or NaN for ids that are not a column."""
    return tl.where((id >= 0) & (id < V), 0.0, float("nan"))
