"""The formulas of a token's terms of a loss; element by element, so there are no sums.

A product with an addend is an explicit ``fma``, so that all compiled variants of a kernel round alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib.arithmetic import fma

LOG2E = tl.constexpr(1.4426950408889634)
SMALL = tl.constexpr(0.5)
"""|e| below which exp(e) - 1 and k3 are computed by a series, since the differences lose bits there."""
LOG_LEAST, LOG_MOST = tl.constexpr(-18.420680743952367), tl.constexpr(20.0)
"""Bounds of the log-weight of a sequence in vespo."""


@triton.jit
def constant(value):
    """Return a number as FP32."""
    return tl.full((), value, tl.float32)


@triton.jit
def exp(x):
    """Return e^x."""
    return tl.exp2(x * LOG2E)


@triton.jit
def k3_of(e):
    """Return exp(e) - e - 1, never negative and accurate for small e, and exp(e) - 1."""
    series = fma(e, constant(1 / 362880), constant(1 / 40320))
    series = fma(e, series, constant(1 / 5040))
    series = fma(e, series, constant(1 / 720))
    series = fma(e, series, constant(1 / 120))
    series = fma(e, series, constant(1 / 24))
    series = fma(e, series, constant(1 / 6))
    series = fma(e, series, constant(1 / 2))
    small = tl.abs(e) < SMALL
    square = e * e
    expm1 = tl.where(small, fma(square, series, e), exp(e) - 1.0)
    return tl.where(small, square * series, expm1 - e), expm1


@triton.jit
def bounded(x, least, most):
    """Return x clamped to bounds; NaN stays NaN."""
    return tl.where(x < least, least, tl.where(x > most, most, x))


@triton.jit
def on_policy_ratio(x, here):
    """Return 1, or NaN where a log-probability is not finite, so that the loss shows it."""
    return tl.where(here, 1.0 + (x - x), 1.0)


@triton.jit
def rollout_weight(w, least, most, MODE: tl.constexpr):
    """Return a rollout ratio as it is given, truncated or masked."""
    if MODE == "truncate":
        w = bounded(w, least, most)
    if MODE == "mask":
        w = tl.where((w < least) | (w > most), 0.0, w)
    return w


@triton.jit
def clipped(ratio, a, n, BOUNDS: tl.constexpr):
    """Return -min(ratio A, clamp(ratio) A) with delta or a dual clip, and its slope; a tie is not clipped."""
    low, high, delta, dual = n[0], n[1], n[3], n[4]
    slope = -(ratio * a)
    unclipped = slope
    if BOUNDS == "delta":
        unclipped = -(tl.where(ratio > delta, delta, ratio) * a)
    limited = -(bounded(ratio, low, high) * a)
    is_limited = limited > unclipped
    term = tl.where(is_limited, limited, unclipped)
    is_flat = is_limited
    if BOUNDS == "delta":
        # Between delta and the upper bound the clipped branch is the ratio itself.
        is_flat = tl.where(is_limited, (ratio < low) | (ratio > high), ratio > delta)
    if BOUNDS == "dual":
        ceiling = -(dual * a)
        is_above = (a < 0.0) & (term > ceiling)
        term = tl.where(is_above, ceiling, term)
        is_flat = is_flat | is_above
    return term, tl.where(is_flat, 0.0, slope)


@triton.jit
def gated(ratio, a, n):
    """Return -(4 / tau) sigmoid(tau (ratio - 1)) A, and its slope."""
    four = constant(4.0)
    tau, factor = tl.where(a > 0.0, n[7], n[8]), tl.where(a > 0.0, tl.div_rn(four, n[7]), tl.div_rn(four, n[8]))
    x = fma(tau, ratio, -tau)
    q = exp(-tl.abs(x))
    part = tl.div_rn(tl.full(q.shape, 1.0, tl.float32), 1.0 + q)
    gate = tl.where(x >= 0.0, part, q * part)
    # The gate is flat where q is 0, also for an infinite ratio: 0 * inf would be NaN.
    slope = tl.where(q == 0.0, 0.0, q * part * part * ratio)
    return -(factor * gate * a), -(4.0 * slope * a)


@triton.jit
def policy_of(x, ratio, a, w, log_weight, n, KIND: tl.constexpr, BOUNDS: tl.constexpr, HAS_W: tl.constexpr):
    """Return the policy term and its slope: by the log of the ratio, or by x for kinds with a weight."""
    if KIND == "clip":
        term, slope = clipped(ratio, a, n, BOUNDS)
    elif KIND == "sapo":
        term, slope = gated(ratio, a, n)
    else:
        if KIND == "cispo":
            weight = bounded(ratio, n[5], n[6])
        elif KIND == "vespo":
            k, decay = tl.where(a >= 0.0, n[9], n[11]), tl.where(a >= 0.0, n[10], n[12])
            logs = tl.full(a.shape, 0.0, tl.float32) + log_weight
            weight = exp(fma(-decay, exp(logs), fma(k, logs, decay)))
        else:
            weight = tl.full(a.shape, 1.0, tl.float32)
        slope = -(weight * a)
        term = slope * x
    if HAS_W and KIND != "vespo":
        term, slope = term * w, slope * w
    return term, slope


@triton.jit
def kl_of(e, ratio, KL: tl.constexpr, CORRECTED: tl.constexpr, SEQ: tl.constexpr):
    """Return the KL estimate, its slope by x, and by the log of a ratio that a sequence shares."""
    if KL == "k3":
        k, expm1 = k3_of(e)
        token_slope = -expm1
    elif KL == "k2":
        k, token_slope = e * (0.5 * e), -e
    else:
        k, token_slope = -e, tl.full(e.shape, 1.0, tl.float32)
    ratio_slope = tl.zeros(e.shape, tl.float32)
    if CORRECTED:
        if SEQ:
            token_slope = token_slope * ratio
            ratio_slope = k * ratio
        elif KL == "k3":
            # Estimate plus slope in closed form: their sum would cancel.
            token_slope = -(e * ratio)
        elif KL == "k2":
            token_slope = fma(e, 0.5 * e, -e) * ratio
        else:
            token_slope = (1.0 - e) * ratio
        k = k * ratio
    return k, token_slope, ratio_slope
