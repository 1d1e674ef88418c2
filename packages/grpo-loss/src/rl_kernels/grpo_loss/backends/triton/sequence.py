"""Values that the tokens of a sequence share: its extent, its ratio, and the slope through the ratio.

The program of each segment recomputes them, in a pass over the whole sequence. Order of the sums: ``tree`` over the
lanes of a segment, segments in ascending order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.grpo_loss.backends.triton.groups import tree
from rl_kernels.grpo_loss.backends.triton.terms import (
    LOG_LEAST,
    LOG_MOST,
    bounded,
    constant,
    policy_of,
    rollout_weight,
)
from rl_kernels.grpo_loss.backends.triton.tokens import load, ratio_of, terms_of


@triton.jit
def extent(offsets, row, length, total):
    """Return the first token of a sequence and its number of tokens, clamped to the tokens that exist."""
    if offsets is None:
        start = row * length
        size = tl.full((), length, tl.int32)
    else:
        start = tl.minimum(tl.maximum(tl.load(offsets + row).to(tl.int64), 0), total)
        end = tl.minimum(tl.maximum(tl.load(offsets + row + 1).to(tl.int64), start), total)
        size = tl.minimum(end - start, length).to(tl.int32)
    return start, size


@triton.jit
def sums_of(
    token,
    current,
    old,
    ref,
    mask,
    w,
    a,
    weight,
    size,
    segment,
    n,
    SEGMENT: tl.constexpr,
    LANES: tl.constexpr,
    KIND: tl.constexpr,
    MODE: tl.constexpr,
    KL: tl.constexpr,
    SUM_KL: tl.constexpr,
    W_PER_TOKEN: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Return sums over a sequence: active tokens of ``segment`` and of all, log-ratios, log-weights, KL of both.

    Log-weights are summed for ``vespo``, the KL with SUM_KL; else they are 0. With WHOLE, ``token`` holds all tokens.
    """
    OWN_WEIGHT: tl.constexpr = W_PER_TOKEN and KIND == "vespo"
    number, kl = tl.zeros((), tl.int32), constant(0.0)
    tokens, logs, weights, estimates = tl.zeros((), tl.int32), constant(0.0), constant(0.0), constant(0.0)
    for part in range(1 if WHOLE else tl.cdiv(size, SEGMENT)):
        counts = tl.zeros((LANES,), tl.int32)
        lane_logs, lane_weights = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
        lane_estimates = tl.zeros((LANES,), tl.float32)
        for step in range(1 if WHOLE else tl.cdiv(tl.minimum(size - part * SEGMENT, SEGMENT), LANES)):
            step_token = token
            if not WHOLE:
                columns = part * SEGMENT + step * LANES + tl.arange(0, LANES)
                step_token = load(
                    current, old, ref, mask, None, w, columns, columns < size, a, weight, False, OWN_WEIGHT
                )
            is_active, log, log_w, estimate = ratio_of(step_token, n, KIND, MODE, KL, SUM_KL, W_PER_TOKEN)
            counts += is_active
            lane_logs += log
            lane_weights += log_w
            lane_estimates += estimate
        part_count = tl.sum(counts, 0)
        number = tl.where(part == segment, part_count, number)
        tokens += part_count
        logs += tree(lane_logs)
        if KIND == "vespo":
            weights += tree(lane_weights)
        if SUM_KL:
            estimate_of_part = tree(lane_estimates)
            kl = tl.where(part == segment, estimate_of_part, kl)
            estimates += estimate_of_part
    return number, tokens, logs, weights, kl, estimates


@triton.jit
def log_weight_of(weights, shared_w, n, MODE: tl.constexpr, ADD_W: tl.constexpr):
    """Return the bounded log-weight of a sequence; ADD_W adds the log of the rollout ratio that its tokens share."""
    if ADD_W:
        v = rollout_weight(shared_w, n[13], n[14], MODE)
        weights += bounded(tl.log(v), LOG_LEAST, LOG_MOST)
    return bounded(weights, LOG_LEAST, LOG_MOST)


@triton.jit
def shared_policy(
    number,
    shared_w,
    ratio,
    shared_a,
    log_weight,
    n,
    KIND: tl.constexpr,
    BOUNDS: tl.constexpr,
    MODE: tl.constexpr,
    HAS_W: tl.constexpr,
):
    """Return the sum of a policy term that ``number`` tokens share, and its slope by the log of the ratio."""
    v = shared_w
    if HAS_W:
        v = rollout_weight(v, n[13], n[14], MODE)
    # These kinds do not read x: any number stands for it.
    term, ratio_slope = policy_of(shared_w, ratio, shared_a, v, log_weight, n, KIND, BOUNDS, HAS_W)
    slope = tl.where(shared_a != 0.0, ratio_slope, 0.0)
    # 0 without tokens or without an advantage, whatever the ratio: 0 * inf is NaN.
    return tl.where((number > 0) & (shared_a != 0.0), term * number.to(tl.float32), 0.0), slope


@triton.jit
def slope_by_ratio(
    token,
    current,
    old,
    ref,
    mask,
    scores,
    w,
    a,
    weight,
    size,
    shared_ratio,
    log_weight,
    n,
    SEGMENT: tl.constexpr,
    LANES: tl.constexpr,
    KIND: tl.constexpr,
    BOUNDS: tl.constexpr,
    MODE: tl.constexpr,
    KL: tl.constexpr,
    CORRECTED: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    W_PER_TOKEN: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Return the sum of all tokens' slopes by the ratio of the sequence, where tokens differ."""
    HAS_OLD: tl.constexpr = old is not None
    HAS_REF: tl.constexpr = ref is not None
    HAS_W: tl.constexpr = w is not None
    ratio_slope = constant(0.0)
    for part in range(1 if WHOLE else tl.cdiv(size, SEGMENT)):
        lane_slopes = tl.zeros((LANES,), tl.float32)
        for step in range(1 if WHOLE else tl.cdiv(tl.minimum(size - part * SEGMENT, SEGMENT), LANES)):
            step_token = token
            if not WHOLE:
                columns = part * SEGMENT + step * LANES + tl.arange(0, LANES)
                step_token = load(
                    current, old, ref, mask, scores, w, columns, columns < size, a, weight, PER_TOKEN, W_PER_TOKEN
                )
            _, _, _, shared, _, _ = terms_of(
                step_token, shared_ratio, log_weight, n,
                KIND, True, BOUNDS, MODE, KL, CORRECTED, HAS_OLD, HAS_REF, HAS_W,
            )  # fmt: skip
            lane_slopes += shared
        ratio_slope += tree(lane_slopes)
    return ratio_slope
