"""The kernel of objectives beyond the plain loss: one program a segment of a sequence; see ``triton_objectives``."""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib.arithmetic import fma
from rl_kernels.grpo_loss.backends.triton.groups import advantage_of, tree
from rl_kernels.grpo_loss.backends.triton.terms import (
    CISPO,
    CLIP,
    LOG_LEAST,
    LOG_MOST,
    SAPO,
    VESPO,
    bounded,
    constant,
    exp,
    k3_of,
    policy_of,
    rollout_weight,
)
from rl_kernels.grpo_loss.backends.triton.tokens import count_active, load, ratio_of, terms_of


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
    """One program a segment of a sequence: its sums, and the slope at its tokens.

    Segments of one sequence run side by side, so that what each of them reads of all comes from the cache. With WHOLE
    there is a lane for each token of any sequence, and nothing is read twice.
    """
    # In the order in which triton_terms reads them.
    # fmt: off
    n = (low, high, beta, delta, dual, floor, cap, tau_pos, tau_neg, k_pos, lambda_pos, k_neg, lambda_neg,
         rollout_min, rollout_max)
    # fmt: on
    HAS_OLD: tl.constexpr = old is not None
    HAS_REF: tl.constexpr = ref is not None
    HAS_W: tl.constexpr = w is not None
    # One advantage and one rollout ratio a sequence: its tokens differ in their KL alone.
    ALIKE: tl.constexpr = not (PER_TOKEN or W_PER_TOKEN)
    # Then all of them have the policy term of the sequence, if it is a function of the ratio.
    SHARED: tl.constexpr = SEQ and ALIKE and KIND <= SAPO
    # A pass over the whole sequence comes first, and counts its tokens.
    FIRST_PASS: tl.constexpr = SEQ or KIND == VESPO
    row, segment = (tl.program_id(0) // segments).to(tl.int64), tl.program_id(0) % segments
    batch = tl.full((), batch, tl.int64)
    if offsets is None:
        start = row * length
        size = tl.full((), length, tl.int32)
        current += row * current_row
        mask += row * mask_row
        if HAS_OLD:
            old += row * old_row
        if HAS_REF:
            ref += row * ref_row
        if PER_TOKEN:
            scores += row * score_row
        if W_PER_TOKEN:
            w += row * w_row
        if entropy is not None:
            entropy += row * entropy_row
    else:
        start = tl.minimum(tl.maximum(tl.load(offsets + row).to(tl.int64), 0), total)
        end = tl.minimum(tl.maximum(tl.load(offsets + row + 1).to(tl.int64), start), total)
        size = tl.minimum(end - start, length).to(tl.int32)
        current += start
        mask += start
        if HAS_OLD:
            old += start
        if HAS_REF:
            ref += start
        if PER_TOKEN:
            scores += start
        if W_PER_TOKEN:
            w += start
        if entropy is not None:
            entropy += start
    shared_a, shared_w = constant(0.0), constant(1.0)
    a, weight = tl.zeros((LANES,), tl.float32), tl.full((LANES,), 1.0, tl.float32)
    first = segment * SEGMENT
    columns = first + tl.arange(0, LANES)
    # Asked for before the rewards are, so that one waits beside the other.
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
    x, before, other, is_active, token_a, token_w = token
    token = (x, before, other, is_active, token_a if PER_TOKEN else a, token_w if W_PER_TOKEN else weight)

    count, log_weight = constant(1.0), constant(0.0)
    shared_ratio, shared_slope = tl.full((LANES,), 1.0, tl.float32), tl.zeros((LANES,), tl.float32)
    parts = 1 if WHOLE else tl.cdiv(size, SEGMENT)
    # Active tokens of this segment; ``tokens`` are those of the sequence, ``count`` what is divided by.
    number, policy, kl = tl.zeros((), tl.int32), constant(0.0), constant(0.0)
    if FIRST_PASS:
        # With a shared policy term the KL is all that is left to sum, and summed here; as it is for the ratio's slope.
        SUM_KL: tl.constexpr = HAS_REF and (SHARED or (SEQ and ALIKE and CORRECTED and slope is not None))
        OWN_WEIGHT: tl.constexpr = W_PER_TOKEN and KIND == VESPO
        other_of = ref if SUM_KL else None
        tokens, logs, weights, estimates = tl.zeros((), tl.int32), constant(0.0), constant(0.0), constant(0.0)
        for part in range(parts):
            found = tl.zeros((LANES,), tl.int32)
            lane_logs, lane_weights = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
            lane_estimates = tl.zeros((LANES,), tl.float32)
            for step in range(1 if WHOLE else tl.cdiv(tl.minimum(size - part * SEGMENT, SEGMENT), LANES)):
                some = token
                if not WHOLE:
                    there = part * SEGMENT + step * LANES + tl.arange(0, LANES)
                    some = load(
                        current, old, other_of, mask, None, w, there, there < size, a, weight, False, OWN_WEIGHT
                    )
                one, log, log_w, estimate = ratio_of(some, n, KIND, MODE, KL, SUM_KL, W_PER_TOKEN)
                found += one
                lane_logs += log
                lane_weights += log_w
                lane_estimates += estimate
            of_part = tl.sum(found, 0)
            number = tl.where(part == segment, of_part, number)
            tokens += of_part
            logs += tree(lane_logs)
            if KIND == VESPO:
                weights += tree(lane_weights)
            if SUM_KL:
                estimate_of_part = tree(lane_estimates)
                kl = tl.where(part == segment, estimate_of_part, kl)
                estimates += estimate_of_part
        count = tl.maximum(tokens, 1).to(tl.float32)
        ratio = constant(1.0)
        if SEQ:
            ratio = exp(tl.div_rn(logs, count))
            shared_ratio = tl.broadcast_to(ratio, (LANES,))
        if KIND == VESPO and HAS_W and not W_PER_TOKEN:
            v = rollout_weight(shared_w, rollout_min, rollout_max, MODE)
            weights += bounded(tl.log(v), LOG_LEAST, LOG_MOST)
        log_weight = bounded(weights, LOG_LEAST, LOG_MOST)
        slope_of_all = constant(0.0)
        if SHARED:
            v = shared_w
            if HAS_W:
                v = rollout_weight(v, rollout_min, rollout_max, MODE)
            # These kinds do not read x: any number stands for it.
            whole, through = policy_of(shared_w, ratio, shared_a, v, log_weight, n, KIND, BOUNDS, HAS_W)
            slope_of_all = tl.where(shared_a != 0.0, through, 0.0)
            # Without tokens, and without an advantage, it is 0 whatever the ratio is: 0 * inf is NaN.
            policy = tl.where((number > 0) & (shared_a != 0.0), whole * number.to(tl.float32), 0.0)
            # Without a reference there is no KL, and 0 times a ratio of NaN would be one.
            if SUM_KL and CORRECTED:
                kl = tl.where(number > 0, kl * ratio, 0.0)
        if SUM_KL and CORRECTED and slope is not None:
            slope_of_all = fma(constant(beta), ratio * tl.div_rn(estimates, count), slope_of_all)
        shared_slope = tl.broadcast_to(slope_of_all, (LANES,))
    elif MEAN_SEQ and slope is not None:
        count = tl.maximum(count_active(mask, size, LANES), 1).to(tl.float32)
    if SEQ and not ALIKE and slope is not None:
        through = constant(0.0)
        for part in range(parts):
            lane_through = tl.zeros((LANES,), tl.float32)
            for step in range(1 if WHOLE else tl.cdiv(tl.minimum(size - part * SEGMENT, SEGMENT), LANES)):
                some = token
                if not WHOLE:
                    there = part * SEGMENT + step * LANES + tl.arange(0, LANES)
                    some = load(
                        current, old, ref, mask, scores, w, there, there < size, a, weight, PER_TOKEN, W_PER_TOKEN
                    )
                _, _, _, shared, _, _ = terms_of(
                    some, shared_ratio, log_weight, n, KIND, SEQ, BOUNDS, MODE, KL, CORRECTED, HAS_OLD, HAS_REF, HAS_W
                )
                lane_through += shared
            through += tree(lane_through)
        shared_slope += tl.div_rn(through, count)
    scale = tl.zeros((LANES,), tl.float32) + tl.div_rn(constant(1.0), count)

    policy_sum, kl_sum = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    counts = tl.zeros((LANES,), tl.int32)
    if METRICS:
        below, above, odd = (tl.zeros((LANES,), tl.int32), tl.zeros((LANES,), tl.int32), tl.zeros((LANES,), tl.int32))
        ratios, squares = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
        k1, k2 = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
        k3, entropies = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
        least = tl.full((LANES,), float("inf"), tl.float32)
        most = tl.full((LANES,), float("-inf"), tl.float32)
    # Where the sums of the first pass are all that is asked for, tokens are read once.
    if METRICS or slope is not None or not SHARED:
        for _ in range(1 if WHOLE else tl.cdiv(tl.minimum(size - first, SEGMENT), LANES)):
            here = columns < size
            if not WHOLE:
                # A step's tokens are asked for while those before it are worked on.
                ahead = columns + LANES
                is_next = (ahead < size) & (ahead < first + SEGMENT)
                next_token = load(current, old, ref, mask, scores, w, ahead, is_next, a, weight, PER_TOKEN, W_PER_TOKEN)
            x, before, other, is_active, token_a, _ = token
            term, k, own, _, seen, e = terms_of(
                token, shared_ratio, log_weight, n, KIND, SEQ, BOUNDS, MODE, KL, CORRECTED, HAS_OLD, HAS_REF, HAS_W
            )
            policy_sum += term
            kl_sum += k
            if not FIRST_PASS:
                counts += is_active.to(tl.int32)
            if slope is not None:
                value = own
                if SEQ:
                    value += shared_slope
                if MEAN_SEQ:
                    value *= scale
                # -0 marks a masked token, so it must stand nowhere else: -0 + 0 is +0. A literal -0.0 is 0 to Triton.
                marked = tl.where(is_active, (value + 0.0).to(tl.int32, bitcast=True), -2147483648)
                tl.store(slope + start + columns, marked.to(tl.float32, bitcast=True), mask=here)
            if METRICS:
                if KIND == CISPO:
                    below += (is_active & (seen < floor)).to(tl.int32)
                    above += (is_active & (seen > cap)).to(tl.int32)
                elif KIND == CLIP:
                    below += (is_active & (seen < low) & (token_a.to(tl.float32) < 0.0)).to(tl.int32)
                    above += (is_active & (seen > high) & (token_a.to(tl.float32) > 0.0)).to(tl.int32)
                is_finite = tl.abs(x.to(tl.float32)) < float("inf")
                is_finite &= tl.abs(before.to(tl.float32)) < float("inf")
                is_finite &= tl.abs(other.to(tl.float32)) < float("inf")
                odd += (is_active & ~is_finite).to(tl.int32)
                shown = tl.where(is_active, seen, 0.0)
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
                # Of those that are numbers: no comparison holds for NaN.
                least = tl.where(is_active & (seen < least), seen, least)
                most = tl.where(is_active & (seen > most), seen, most)
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
    # A segment's tokens are few enough for FP32 to count.
    tl.store(place + 2 * batch, number.to(tl.float32))
    if METRICS:
        # In the order of ``METRICS``; the squares stand for the effective samples.
        tl.store(place + 3 * batch, tl.sum(below, 0).to(tl.float32))
        tl.store(place + 4 * batch, tl.sum(above, 0).to(tl.float32))
        tl.store(place + 5 * batch, tree(ratios))
        tl.store(place + 6 * batch, tl.min(least, 0))
        tl.store(place + 7 * batch, tl.max(most, 0))
        tl.store(place + 8 * batch, tree(k1))
        tl.store(place + 9 * batch, tree(k2))
        tl.store(place + 10 * batch, tree(k3))
        tl.store(place + 11 * batch, tree(squares))
        tl.store(place + 12 * batch, tl.sum(odd, 0).to(tl.float32))
        tl.store(place + 13 * batch, tree(entropies))
