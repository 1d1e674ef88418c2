"""Logits ``z = x / t``, rounded to FP32, that are below a number m of their row count as -inf.

Kernels compare raw values x: division is monotonic, so ``x / t < m`` holds exactly below some x, which each row finds
once.
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITY, BEYOND, SIGN = tl.constexpr(float("inf")), tl.constexpr(2.0**128), tl.constexpr(-(1 << 31))
"""BEYOND is the power of two after the largest FP32 number; SIGN holds the bits of -0."""


@triton.jit
def _next(x, up: tl.constexpr):
    """Return the FP32 number after x, or before it; infinity has none."""
    step = 1 if up else -1
    bits = x.to(tl.int32, bitcast=True)
    moved = tl.where(x > 0.0, bits + step, bits - step).to(tl.float32, bitcast=True)
    smallest = (tl.zeros_like(bits) + (1 if up else SIGN + 1)).to(tl.float32, bitcast=True)
    return tl.where(x == 0.0, smallest, tl.where(x == (INFINITY if up else -INFINITY), x, moved))


@triton.jit
def least_kept(min_logit, temperature, rows, here, PER_ROW: tl.constexpr, MIN_LOGIT: tl.constexpr):
    """Return of rows the smallest x whose quotient ``x / t`` rounds to at least m; infinity if m is NaN.

    ``temperature`` is a number, or one per row. Without MIN_LOGIT the result is not read.
    """
    if not MIN_LOGIT:
        return 0.0
    else:
        m = tl.load(min_logit + rows, mask=here, other=-INFINITY)
        t = _temperature(m, temperature, rows, here, PER_ROW)
        # Between m and the number before it a quotient rounds to the nearer one, from the middle to the even one. In
        # FP64 the middle is exact, and so is its product with t. To infinity a quotient rounds as to 2^128.
        before = tl.maximum(_next(m, False).to(tl.float64), -BEYOND)
        middle = (before + tl.minimum(m.to(tl.float64), BEYOND)) * 0.5 * t.to(tl.float64)
        least = middle.to(tl.float32)
        rounded, is_odd = least.to(tl.float64), (m.to(tl.int32, bitcast=True) & 1) != 0
        least = tl.where((rounded < middle) | (is_odd & (rounded == middle)), _next(least, True), least)
        return tl.where(m == m, tl.where(m == -INFINITY, m, least), INFINITY)


@triton.jit
def load_least(leasts, rows, here, MIN_LOGIT: tl.constexpr):
    """Return what ``least_kept`` found for rows. Without MIN_LOGIT the result is not read."""
    if MIN_LOGIT:
        return tl.load(leasts + rows, mask=here, other=-INFINITY)
    else:
        return 0.0


@triton.jit
def _temperature(like, temperature, rows, here, PER_ROW: tl.constexpr):
    if PER_ROW:
        return tl.load(temperature + rows, mask=here, other=1.0)
    else:
        return tl.zeros_like(like) + temperature


@triton.jit
def _beside(least, x):
    """Return numbers of rows in the dims of ``x``."""
    if len(least.shape) < len(x.shape) and len(least.shape) > 0:
        return least[:, None]
    else:
        return least


@triton.jit
def or_lowest(x, least, MIN_LOGIT: tl.constexpr):
    """Return values x of rows, maybe in several columns, with -inf in place of those below ``least``; a NaN stays."""
    if MIN_LOGIT:
        return tl.where(x < _beside(least, x), -INFINITY, x)
    else:
        return x


@triton.jit
def _larger_or_nan(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_or_nan(x):
    """Return the largest of the values ``x[n]``, NaN if one is: where it is below ``least``, nothing counts."""
    return tl.reduce(x, 0, _larger_or_nan)


@triton.jit
def or_0(gradient, x, least, MIN_LOGIT: tl.constexpr):
    """Return the gradient of values x with 0 in place of those below ``least``."""
    if MIN_LOGIT:
        return tl.where(x < _beside(least, x), 0.0, gradient)
    else:
        return gradient
