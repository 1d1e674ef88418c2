"""The kernel of all objectives: the sums of a segment of a sequence, and the slopes of its tokens.

One program takes a segment of SEGMENT tokens of a sequence, LANES tokens at a time. Order of the sums, which is the
contract (``backend``): token i of a segment goes to lane i mod LANES, in ascending order, and ``tree``
adds the lanes; segments are added in ascending order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib.arithmetic import fma
from rl_kernels.grpo_loss.backends.triton.groups import advantage_of, tree
from rl_kernels.grpo_loss.backends.triton.sequence import extent, log_weight_of, shared_policy, slope_by_ratio, sums_of
from rl_kernels.grpo_loss.backends.triton.terms import constant, exp
from rl_kernels.grpo_loss.backends.triton.tokens import (
    add_metrics,
    count_active,
    load,
    marked,
    no_metrics,
    store_metrics,
    terms_of,
)


@triton.jit(do_not_specialize=["total", "groups"])
def terms(
    current,
    old,
    ref,
    mask,
    scores,
    w,
    entropy,
    boundaries,
    offsets,
    sums,
    slope,
    length,
    total,
    batch,
    segments,
    groups,
    current_row,
    old_row,
    ref_row,
    mask_row,
    score_row,
    w_row,
    entropy_row,
    low,
    high,
    beta,
    delta,
    dual,
    floor,
    cap,
    tau_pos,
    tau_neg,
    k_pos,
    lambda_pos,
    k_neg,
    lambda_neg,
    rollout_min,
    rollout_max,
    eps,
    SEGMENT: tl.constexpr,
    LANES: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    ONE_STEP: tl.constexpr,
    ESTIMATOR: tl.constexpr,
    ADD: tl.constexpr,
    SKIP: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    W_PER_TOKEN: tl.constexpr,
    KIND: tl.constexpr,
    SEQ: tl.constexpr,
    MEAN_SEQ: tl.constexpr,
    BOUNDS: tl.constexpr,
    MODE: tl.constexpr,
    KL: tl.constexpr,
    CORRECTED: tl.constexpr,
    METRICS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Write the sums of a segment of a sequence, and the slope at its tokens. Grid: sequences x segments.

    If the objective needs it, a first pass over the whole sequence computes what its tokens share (``sequence``). The
    main loop then computes the terms of the segment's tokens (``tokens``), with metrics on request.
    Segments of one sequence run side by side, so the first pass mostly reads from the cache. With WHOLE there is a lane
    for each token of any sequence, and nothing is read twice.
    """
    # In the order in which ``terms`` and ``tokens`` read them.
    # fmt: off
    n = (low, high, beta, delta, dual, floor, cap, tau_pos, tau_neg, k_pos, lambda_pos, k_neg, lambda_neg,
         rollout_min, rollout_max)
    # fmt: on
    HAS_OLD: tl.constexpr = old is not None
    HAS_REF: tl.constexpr = ref is not None
    HAS_W: tl.constexpr = w is not None
    # One advantage and one rollout ratio per sequence: its tokens differ only in their KL.
    ALIKE: tl.constexpr = not (PER_TOKEN or W_PER_TOKEN)
    # Then all tokens have the same policy term, if it is a function of the sequence's ratio.
    SHARED: tl.constexpr = SEQ and ALIKE and (KIND == "clip" or KIND == "sapo")
    # A pass over the whole sequence comes first, and counts its tokens.
    FIRST_PASS: tl.constexpr = SEQ or KIND == "vespo"
    PACKED: tl.constexpr = offsets is not None
    row, segment = (tl.program_id(0) // segments).to(tl.int64), tl.program_id(0) % segments
    batch = tl.full((), batch, tl.int64)
    start, size = extent(offsets, row, length, total)
    current += start if PACKED else row * current_row
    mask += start if PACKED else row * mask_row
    if HAS_OLD:
        old += start if PACKED else row * old_row
    if HAS_REF:
        ref += start if PACKED else row * ref_row
    if PER_TOKEN:
        scores += start if PACKED else row * score_row
    if W_PER_TOKEN:
        w += start if PACKED else row * w_row
    if entropy is not None:
        entropy += start if PACKED else row * entropy_row

    shared_a, shared_w = constant(0.0), constant(1.0)
    a, weight = tl.zeros((LANES,), tl.float32), tl.full((LANES,), 1.0, tl.float32)
    first = segment * SEGMENT
    columns = first + tl.arange(0, LANES)
    # Loaded before the rewards, so that both latencies overlap.
    token = load(current, old, ref, mask, scores, w, columns, columns < size, a, weight, PER_TOKEN, W_PER_TOKEN)
    if HAS_W and not W_PER_TOKEN:
        shared_w = tl.load(w + row * w_row).to(tl.float32)
        weight = tl.broadcast_to(shared_w, (LANES,))
    if GROUP_LANES:
        advantage = advantage_of(
            scores, boundaries, row, batch, groups, score_row, eps, GROUP_LANES, ONE_STEP, ESTIMATOR, ADD, SKIP
        )
        shared_a = advantage.to(tl.float32)
    elif not PER_TOKEN:
        shared_a = tl.load(scores + row * score_row).to(tl.float32)
    if not PER_TOKEN:
        a = tl.broadcast_to(shared_a, (LANES,))
    x, old_x, ref_x, is_active, token_a, token_w = token
    token = (x, old_x, ref_x, is_active, token_a if PER_TOKEN else a, token_w if W_PER_TOKEN else weight)

    # Values that the tokens of a sequence share. number: active tokens of this segment; count: the divisor.
    number, policy, kl = tl.zeros((), tl.int32), constant(0.0), constant(0.0)
    count, log_weight = constant(1.0), constant(0.0)
    shared_ratio, shared_slope = tl.full((LANES,), 1.0, tl.float32), tl.zeros((LANES,), tl.float32)
    if FIRST_PASS:
        # The KL is summed here if it is all that is left to sum, or if the slope by the ratio needs its sum.
        SUM_KL: tl.constexpr = HAS_REF and (SHARED or (SEQ and ALIKE and CORRECTED and slope is not None))
        number, tokens, logs, weights, kl, estimates = sums_of(
            token, current, old, ref if SUM_KL else None, mask, w, a, weight, size, segment, n,
            SEGMENT, LANES, KIND, MODE, KL, SUM_KL, W_PER_TOKEN, WHOLE,
        )  # fmt: skip
        count = tl.maximum(tokens, 1).to(tl.float32)
        ratio = constant(1.0)
        if SEQ:
            ratio = exp(tl.div_rn(logs, count))
            shared_ratio = tl.broadcast_to(ratio, (LANES,))
        log_weight = log_weight_of(weights, shared_w, n, MODE, KIND == "vespo" and HAS_W and not W_PER_TOKEN)
        slope_of_all = constant(0.0)
        if SHARED:
            policy, slope_of_all = shared_policy(
                number, shared_w, ratio, shared_a, log_weight, n, KIND, BOUNDS, MODE, HAS_W
            )
            # Only with a KL: otherwise 0 times a ratio of NaN would be NaN.
            if SUM_KL and CORRECTED:
                kl = tl.where(number > 0, kl * ratio, 0.0)
        if SUM_KL and CORRECTED and slope is not None:
            slope_of_all = fma(constant(beta), ratio * tl.div_rn(estimates, count), slope_of_all)
        shared_slope = tl.broadcast_to(slope_of_all, (LANES,))
    elif MEAN_SEQ and slope is not None:
        count = tl.maximum(count_active(mask, size, LANES), 1).to(tl.float32)
    if SEQ and not ALIKE and slope is not None:
        ratio_slope = slope_by_ratio(
            token, current, old, ref, mask, scores, w, a, weight, size, shared_ratio, log_weight, n,
            SEGMENT, LANES, KIND, BOUNDS, MODE, KL, CORRECTED, PER_TOKEN, W_PER_TOKEN, WHOLE,
        )  # fmt: skip
        shared_slope += tl.div_rn(ratio_slope, count)
    scale = tl.zeros((LANES,), tl.float32) + tl.div_rn(constant(1.0), count)

    policy_sum, kl_sum = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    counts = tl.zeros((LANES,), tl.int32)
    if METRICS:
        metrics = no_metrics(LANES)
    # If the sums of the first pass are all that is needed, tokens are not read again.
    if METRICS or slope is not None or not SHARED:
        for _ in range(1 if WHOLE else tl.cdiv(tl.minimum(size - first, SEGMENT), LANES)):
            here = columns < size
            if not WHOLE:
                # The tokens of the next step load while this step is processed.
                ahead = columns + LANES
                is_next = (ahead < size) & (ahead < first + SEGMENT)
                next_token = load(current, old, ref, mask, scores, w, ahead, is_next, a, weight, PER_TOKEN, W_PER_TOKEN)
            term, k, token_slope, _, token_ratio, e = terms_of(
                token, shared_ratio, log_weight, n, KIND, SEQ, BOUNDS, MODE, KL, CORRECTED, HAS_OLD, HAS_REF, HAS_W
            )
            policy_sum += term
            kl_sum += k
            if not FIRST_PASS:
                counts += token[3].to(tl.int32)
            if slope is not None:
                value = token_slope
                if SEQ:
                    value += shared_slope
                if MEAN_SEQ:
                    value *= scale
                value = marked(value, token[3])
                tl.store(slope + start + columns, value, mask=here)
            if METRICS:
                metrics = add_metrics(metrics, token, token_ratio, e, entropy, columns, here, n, KIND, HAS_REF)
            if not WHOLE:
                columns, token = ahead, next_token
    QUANTITIES: tl.constexpr = 14 if METRICS else 3
    place = sums + segment.to(tl.int64) * QUANTITIES * batch + row
    if not SHARED:
        policy, kl = tree(policy_sum), tree(kl_sum)
    if not FIRST_PASS:
        number = tl.sum(counts, 0)
    tl.store(place, policy)
    tl.store(place + batch, kl)
    # A segment's count is exact in FP32.
    tl.store(place + 2 * batch, number.to(tl.float32))
    if METRICS:
        store_metrics(place + 3 * batch, batch, metrics)
