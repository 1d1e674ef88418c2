"""Per-token code of the kernel for objectives beyond the plain loss: loads, and the terms and slopes of a token."""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib.arithmetic import fma
from rl_kernels.grpo_loss.backends.triton.terms import (
    LOG_LEAST,
    LOG_MOST,
    SAPO,
    VESPO,
    bounded,
    exp,
    kl_of,
    on_policy_ratio,
    policy_of,
    rollout_weight,
)


@triton.jit
def load(
    current, old, ref, mask, scores, w, columns, here, a, weight, PER_TOKEN: tl.constexpr, W_PER_TOKEN: tl.constexpr
):
    """Return each token's log-probabilities, whether it is active, advantage and rollout ratio, in their own dtypes.

    Tensors that are None are not read.
    """
    is_active = tl.load(mask + columns, mask=here, other=0) != 0
    x = tl.load(current + columns, mask=here, other=0.0)
    old_x, ref_x = x, x
    if old is not None:
        old_x = tl.load(old + columns, mask=here, other=0.0)
    if ref is not None:
        ref_x = tl.load(ref + columns, mask=here, other=0.0)
    if PER_TOKEN:
        a = tl.load(scores + columns, mask=here, other=0.0)
    if W_PER_TOKEN:
        weight = tl.load(w + columns, mask=here, other=0.0)
    return x, old_x, ref_x, is_active, a, weight


@triton.jit
def ratio_of(
    token,
    n,
    KIND: tl.constexpr,
    MODE: tl.constexpr,
    KL: tl.constexpr,
    SUM_KL: tl.constexpr,
    W_PER_TOKEN: tl.constexpr,
):
    """Return a token's terms of its sequence's sums: 1, log-ratio, log-weight and KL estimate; all are 0 if masked."""
    is_active = token[3]
    x, old_x, ref_x = token[0].to(tl.float32), token[1].to(tl.float32), token[2].to(tl.float32)
    d = tl.where(is_active, x - old_x, 0.0)
    weight, k = tl.zeros(x.shape, tl.float32), tl.zeros(x.shape, tl.float32)
    if KIND == VESPO:
        weight = bounded(d, -LOG_MOST, LOG_MOST)
        if W_PER_TOKEN:
            w = rollout_weight(token[5].to(tl.float32), n[13], n[14], MODE)
            weight += tl.where(is_active, bounded(tl.log(w), LOG_LEAST, LOG_MOST), 0.0)
    if SUM_KL:
        k, _, _ = kl_of(tl.where(is_active, ref_x - x, 0.0), x, KL, False, False)
        k = tl.where(is_active, k, 0.0)
    return is_active.to(tl.int32), d, weight, k


@triton.jit
def count_active(mask, size, LANES: tl.constexpr):
    """Return the number of active tokens of a sequence; integers, so in wide loads and in any order."""
    counts = tl.zeros((4 * LANES,), tl.int32)
    for first in range(0, size, 4 * LANES):
        columns = first + tl.arange(0, 4 * LANES)
        counts += (tl.load(mask + columns, mask=columns < size, other=0) != 0).to(tl.int32)
    return tl.sum(counts, 0)


@triton.jit
def terms_of(
    token,
    shared_ratio,
    log_weight,
    n,
    KIND: tl.constexpr,
    SEQ: tl.constexpr,
    BOUNDS: tl.constexpr,
    MODE: tl.constexpr,
    KL: tl.constexpr,
    CORRECTED: tl.constexpr,
    HAS_OLD: tl.constexpr,
    HAS_REF: tl.constexpr,
    HAS_W: tl.constexpr,
):
    """Return policy term, KL estimate, slope by x, slope by the ratio of the sequence, the ratio and e; 0 if masked."""
    is_active = token[3]
    x, old_x, ref_x = token[0].to(tl.float32), token[1].to(tl.float32), token[2].to(tl.float32)
    a, w = token[4].to(tl.float32), token[5].to(tl.float32)
    # A = 0 is replaced after the product with the ratio: 0 * inf is NaN.
    counted = is_active & (a != 0.0)
    if SEQ:
        ratio = shared_ratio
    elif HAS_OLD:
        ratio = exp(tl.where(is_active, x - old_x, 0.0))
    else:
        ratio = on_policy_ratio(x, is_active)
    if HAS_W:
        w = rollout_weight(w, n[13], n[14], MODE)
    term, slope = policy_of(x, ratio, a, w, log_weight, n, KIND, BOUNDS, HAS_W)
    term, slope = tl.where(counted, term, 0.0), tl.where(counted, slope, 0.0)
    shared = tl.zeros(x.shape, tl.float32)
    if SEQ and KIND <= SAPO:
        shared = slope
        slope = tl.zeros(x.shape, tl.float32)
    k, e = tl.zeros(x.shape, tl.float32), tl.zeros(x.shape, tl.float32)
    if HAS_REF:
        e = tl.where(is_active, ref_x - x, 0.0)
        k, token_slope, ratio_slope = kl_of(e, ratio, KL, CORRECTED, SEQ)
        k, token_slope, ratio_slope = (
            tl.where(is_active, k, 0.0),
            tl.where(is_active, token_slope, 0.0),
            tl.where(is_active, ratio_slope, 0.0),
        )
        slope = fma(tl.full(token_slope.shape, n[2], tl.float32), token_slope, slope)
        shared = fma(tl.full(token_slope.shape, n[2], tl.float32), ratio_slope, shared)
    return term, k, slope, shared, ratio, e


@triton.jit
def marked(slope, is_active):
    """Return the slope, with -0 as the mark of masked tokens; elsewhere adding 0 turns -0 into +0."""
    # Triton compiles a literal -0.0 as +0.
    return tl.where(is_active, (slope + 0.0).to(tl.int32, bitcast=True), -2147483648).to(tl.float32, bitcast=True)
