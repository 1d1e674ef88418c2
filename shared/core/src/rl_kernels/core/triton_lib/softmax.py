"""Softmax statistics of a row in base 2, as every Triton kernel over a vocabulary forms and merges them.

A state is (top, total, weighted) of a stretch of raw values x, whose logits are ``z = x * inv``: the largest x, the sum
of ``2^(x c - r)`` and of ``2^(x c - r) (x c - r)``, where ``c = inv log2(e)`` and the reference ``r = round(top c)``.
One fused multiply-add an element forms the exponent without an error of its own; what rounding r took away is put back
once a row. The arithmetic is explicit, so that no compiler may fuse it one way in one kernel and another in the next.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib.arithmetic import fma, product

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LEAST = tl.constexpr(-1.0e30)
"""Stands for an exponent of -inf where it is multiplied by its power, 0."""


@triton.jit
def empty():
    """Return the state of nothing, a scalar each."""
    return tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)


@triton.jit
def reference_of(top, c):
    """Return r of a state; 0 for a stretch of -inf alone."""
    return tl.where(top == float("-inf"), 0.0, product(top, c))


@triton.jit
def add_block(x, c, top, total, weighted, ENTROPY: tl.constexpr):
    """Take a block of raw values into a running state."""
    new = tl.maximum(top, tl.max(x, 0))
    r = reference_of(new, c)
    exponent = fma(x, c, -r)
    power = tl.exp2(exponent)
    shift, scale = _shift(top, c, r)
    if ENTROPY:
        block = tl.sum(power * tl.maximum(exponent, LEAST), 0)
        weighted = fma(fma(shift, total, weighted), scale, block)
    return new, fma(total, scale, tl.sum(power, 0)), weighted


@triton.jit
def _shift(top, c, r):
    """Return what exponents move by when a state's reference becomes ``r``, and the power of two that is."""
    shift = tl.where(top == float("-inf"), 0.0, reference_of(top, c) - r)
    return shift, tl.exp2(shift)


@triton.jit
def merge(top, total, weighted, other_top, other_total, other_weighted, c, ENTROPY: tl.constexpr):
    """Return the state of two stretches; not associative in the last bit, so always merge in ascending order."""
    new = tl.maximum(top, other_top)
    r = reference_of(new, c)
    shift, scale = _shift(top, c, r)
    other_shift, other_scale = _shift(other_top, c, r)
    if ENTROPY:
        other = fma(other_shift, other_total, other_weighted) * other_scale
        weighted = fma(fma(shift, total, weighted), scale, other)
    return new, fma(total, scale, other_total * other_scale), weighted


@triton.jit
def finish(top, total, weighted, inv):
    """Return (log of the sum of e^(z - max z), logsumexp, entropy) of a whole row; NaN for a row that is all -inf."""
    c = inv * LOG2E
    r = reference_of(top, c)
    top = tl.where(top == float("-inf"), float("nan"), top)
    log_total = LN2 * (tl.log2(total) - fma(top, c, -r))
    entropy = LN2 * (tl.log2(total) - weighted / total)
    return log_total, fma(top, inv, log_total), entropy
