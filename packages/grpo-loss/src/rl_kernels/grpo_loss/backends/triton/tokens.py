"""What the kernel does with one token: it loads it, and computes its terms, its slopes and its part of the metrics."""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib.arithmetic import fma
from rl_kernels.grpo_loss.backends.triton.groups import tree
from rl_kernels.grpo_loss.backends.triton.terms import (
    LOG_LEAST,
    LOG_MOST,
    bounded,
    exp,
    k3_of,
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
    if KIND == "vespo":
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
    if SEQ and (KIND == "clip" or KIND == "sapo"):
        shared = slope
        slope = tl.zeros(x.shape, tl.float32)
    k, e = tl.zeros(x.shape, tl.float32), tl.zeros(x.shape, tl.float32)
    if HAS_REF:
        e = tl.where(is_active, ref_x - x, 0.0)
        k, token_slope, ratio_slope = kl_of(e, ratio, KL, CORRECTED, SEQ)
        # Without a weight k3 and its slope are 0 where e is.
        if CORRECTED or KL != "k3":
            k, token_slope = tl.where(is_active, k, 0.0), tl.where(is_active, token_slope, 0.0)
            ratio_slope = tl.where(is_active, ratio_slope, 0.0)
        slope = fma(tl.full(token_slope.shape, n[2], tl.float32), token_slope, slope)
        shared = fma(tl.full(token_slope.shape, n[2], tl.float32), ratio_slope, shared)
    return term, k, slope, shared, ratio, e


@triton.jit
def marked(slope, is_active):
    """Return the slope, with -0 as the mark of masked tokens; elsewhere adding 0 turns -0 into +0."""
    # Triton compiles a literal -0.0 as +0.
    return tl.where(is_active, (slope + 0.0).to(tl.int32, bitcast=True), -2147483648).to(tl.float32, bitcast=True)


@triton.jit
def no_metrics(LANES: tl.constexpr):
    """Return the initial lanes of each metric."""
    below, above, nonfinite = tl.zeros((LANES,), tl.int32), tl.zeros((LANES,), tl.int32), tl.zeros((LANES,), tl.int32)
    ratios, squares = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    k1, k2 = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    k3, entropies = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    least, most = tl.full((LANES,), float("inf"), tl.float32), tl.full((LANES,), float("-inf"), tl.float32)
    return below, above, nonfinite, ratios, squares, k1, k2, k3, entropies, least, most


@triton.jit
def add_metrics(lanes, token, ratio, e, entropy, columns, here, n, KIND: tl.constexpr, HAS_REF: tl.constexpr):
    """Return the lanes with one more token each: its ratio, e = ref - current, entropy; a masked one changes nothing.

    The squares of the ratios are stored in the place of the effective samples.
    """
    below, above, nonfinite, ratios, squares, k1, k2, k3, entropies, least, most = lanes
    x, old_x, ref_x, is_active, a, _ = token
    low, high, floor, cap = n[0], n[1], n[5], n[6]
    if KIND == "cispo":
        below += (is_active & (ratio < floor)).to(tl.int32)
        above += (is_active & (ratio > cap)).to(tl.int32)
    elif KIND == "clip":
        below += (is_active & (ratio < low) & (a.to(tl.float32) < 0.0)).to(tl.int32)
        above += (is_active & (ratio > high) & (a.to(tl.float32) > 0.0)).to(tl.int32)
    is_finite = tl.abs(x.to(tl.float32)) < float("inf")
    is_finite &= tl.abs(old_x.to(tl.float32)) < float("inf")
    is_finite &= tl.abs(ref_x.to(tl.float32)) < float("inf")
    nonfinite += (is_active & ~is_finite).to(tl.int32)
    shown = tl.where(is_active, ratio, 0.0)
    ratios += shown
    squares = fma(shown, shown, squares)
    if HAS_REF:
        k1 -= e
        k2 = fma(e, 0.5 * e, k2)
        exact, _ = k3_of(e)
        k3 += exact
    if entropy is not None:
        h = tl.load(entropy + columns, mask=here, other=0.0).to(tl.float32)
        entropies += tl.where(is_active, h, 0.0)
    # Ratios of NaN are left out: no comparison with NaN is true.
    least = tl.where(is_active & (ratio < least), ratio, least)
    most = tl.where(is_active & (ratio > most), ratio, most)
    return below, above, nonfinite, ratios, squares, k1, k2, k3, entropies, least, most


@triton.jit
def store_metrics(place, batch, lanes):
    """Store the sum, minimum or maximum of each metric's lanes, in the order of ``METRICS``, with stride ``batch``."""
    below, above, nonfinite, ratios, squares, k1, k2, k3, entropies, least, most = lanes
    tl.store(place, tl.sum(below, 0).to(tl.float32))
    tl.store(place + batch, tl.sum(above, 0).to(tl.float32))
    tl.store(place + 2 * batch, tree(ratios))
    tl.store(place + 3 * batch, tl.min(least, 0))
    tl.store(place + 4 * batch, tl.max(most, 0))
    tl.store(place + 5 * batch, tree(k1))
    tl.store(place + 6 * batch, tree(k2))
    tl.store(place + 7 * batch, tree(k3))
    tl.store(place + 8 * batch, tree(squares))
    tl.store(place + 9 * batch, tl.sum(nonfinite, 0).to(tl.float32))
    tl.store(place + 10 * batch, tree(entropies))
