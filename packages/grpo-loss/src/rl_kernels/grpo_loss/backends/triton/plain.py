"""The kernels of the plain loss, clipped token by token, mean over tokens; launched by ``losses``.

One program of ``plain_terms`` takes a segment of SEGMENT tokens of a sequence, up to 256 at a time, four to a thread.
Order of the sums, which is the contract (``backend``): token i of a segment goes to lane i mod 256, in ascending order,
and ``tree`` adds the lanes; ``plain_sum`` adds a sequence's segments in ascending order, and likewise the sequences.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib.arithmetic import fma
from rl_kernels.grpo_loss.backends.triton.groups import advantage_of, tree
from rl_kernels.grpo_loss.backends.triton.terms import constant, exp, k3_of

UNROLLED = tl.constexpr(4)
"""Sequences that a lane of ``plain_sum`` loads before it adds the first."""
SIGN = tl.constexpr(-(1 << 31))
"""The bits of -0, as an integer."""


@triton.jit
def _policy_term(ratio, a, low, high):
    """Return -min(ratio A, clamp(ratio) A) and its slope; a tie, and NaN, takes the unclipped branch."""
    unclipped = -(ratio * a)
    clipped = -(tl.minimum(tl.maximum(ratio, low), high) * a)
    is_clipped = clipped > unclipped
    return tl.where(is_clipped, clipped, unclipped), tl.where(is_clipped, 0.0, unclipped)


@triton.jit
def _load(current, old, ref, mask, columns, here):
    """Return log-probabilities and whether they are active; tensors that are None are not read."""
    is_active = tl.load(mask + columns, mask=here, other=0) != 0
    x = tl.load(current + columns, mask=here, other=0.0)
    old_x, ref_x = x, x
    if old is not None:
        old_x = tl.load(old + columns, mask=here, other=0.0)
    if ref is not None:
        ref_x = tl.load(ref + columns, mask=here, other=0.0)
    return x, old_x, ref_x, is_active


@triton.jit
def _token(x, old_x, ref_x, is_active, a, low, high, beta, HAS_OLD: tl.constexpr, HAS_REF: tl.constexpr):
    """Return each token's policy term, k3 and slope of the loss; 0 if masked."""
    x = x.to(tl.float32)
    # Masked tokens and A = 0 are left out before the exponential: 0 * inf would be NaN.
    counted = is_active & (a != 0.0)
    if HAS_OLD:
        ratio = exp(tl.where(counted, x - old_x.to(tl.float32), 0.0))
        term, slope = _policy_term(ratio, a, low, high)
    else:
        # The ratio is 1. x - x adds NaN if x is not finite, so that the loss shows it.
        term, slope = _policy_term(tl.full(x.shape, 1.0, tl.float32), a, low, high)
        term, slope = term + (x - x), slope + (x - x)
    term, slope = tl.where(counted, term, 0.0), tl.where(counted, slope, 0.0)
    k3 = tl.zeros(x.shape, tl.float32)
    if HAS_REF:
        k3, expm1 = k3_of(tl.where(is_active, ref_x.to(tl.float32) - x, 0.0))
        slope = fma(constant(beta), -expm1, slope)
    return term, k3, slope


@triton.jit
def plain_terms(
    current,
    old,
    ref,
    mask,
    scores,
    boundaries,
    sums,
    slope,
    length,
    groups,
    current_row,
    old_row,
    ref_row,
    mask_row,
    score_row,
    low,
    high,
    beta,
    eps,
    SEGMENT: tl.constexpr,
    LANES: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    ONE_STEP: tl.constexpr,
    ESTIMATOR: tl.constexpr,
    ADD: tl.constexpr,
    SKIP: tl.constexpr,
    PER_TOKEN: tl.constexpr,
):
    """Write the sums and active tokens of a segment, and the slope at its tokens. Grid: sequences, segments.

    The tokens of the first step are loaded before the rewards, so that both latencies overlap.
    """
    row, batch = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    segment = tl.program_id(1)
    steps = tl.cdiv(tl.minimum(length - segment * SEGMENT, SEGMENT), LANES)
    columns = segment * SEGMENT + tl.arange(0, LANES)
    current += row * current_row
    mask += row * mask_row
    if old is not None:
        old += row * old_row
    if ref is not None:
        ref += row * ref_row
    x, old_x, ref_x, is_active = _load(current, old, ref, mask, columns, columns < length)
    if GROUP_LANES:
        advantage = advantage_of(
            scores, boundaries, row, batch, groups, score_row, eps, GROUP_LANES, ONE_STEP, ESTIMATOR, ADD, SKIP
        )
        a = tl.broadcast_to(advantage.to(tl.float32), (LANES,))
    elif not PER_TOKEN:
        a = tl.broadcast_to(tl.load(scores + row * score_row).to(tl.float32), (LANES,))
    policy_sum, kl_sum = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    number = tl.zeros((LANES,), tl.int32)
    for _ in range(steps):
        here = columns < length
        ahead = columns + LANES
        is_next = (ahead < length) & (ahead < segment * SEGMENT + SEGMENT)
        next_x, next_old, next_ref, next_active = _load(current, old, ref, mask, ahead, is_next)
        if PER_TOKEN:
            a = tl.load(scores + row * score_row + columns, mask=here, other=0.0).to(tl.float32)
        term, k3, token_slope = _token(
            x, old_x, ref_x, is_active, a, low, high, beta, HAS_OLD=old is not None, HAS_REF=ref is not None
        )
        policy_sum += term
        kl_sum += k3
        number += is_active.to(tl.int32)
        if slope is not None:
            # -0 marks a masked token; elsewhere + 0.0 turns -0 into +0. Triton compiles a literal -0.0 as +0.
            marked = tl.where(is_active, (token_slope + 0.0).to(tl.int32, bitcast=True), SIGN)
            tl.store(slope + row * length + columns, marked.to(tl.float32, bitcast=True), mask=here)
        columns = ahead
        x, old_x, ref_x, is_active = next_x, next_old, next_ref, next_active
    place = sums + segment.to(tl.int64) * 3 * batch + row
    tl.store(place, tree(policy_sum))
    if ref is not None:
        tl.store(place + batch, tree(kl_sum))
    # A segment's count is exact in FP32.
    tl.store(place + 2 * batch, tl.sum(number, 0).to(tl.float32))


@triton.jit
def plain_sum(sums, loss, policy_loss, kl, count, batch, segments, beta, HAS_REF: tl.constexpr, LANES: tl.constexpr):
    """Divide the sums of all sequences, added in order, by the number of active tokens. Grid: one program."""
    policy_total, kl_total = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    total, quantity_stride = tl.zeros((LANES,), tl.int64), tl.full((), batch, tl.int64)
    for first in range(0, batch, UNROLLED * LANES):
        for tile in tl.static_range(UNROLLED):
            rows = first + tile * LANES + tl.arange(0, LANES)
            here = rows < batch
            policy_sum, kl_sum = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
            for segment in range(segments):
                place = sums + segment * 3 * quantity_stride + rows
                policy_sum += tl.load(place, mask=here, other=0.0)
                if HAS_REF:
                    kl_sum += tl.load(place + quantity_stride, mask=here, other=0.0)
                total += tl.load(place + 2 * quantity_stride, mask=here, other=0.0).to(tl.int64)
            policy_total += policy_sum
            kl_total += kl_sum
    divisor = tl.maximum(tl.sum(total, 0), 1).to(tl.float32)
    policy_mean, kl_mean = tl.div_rn(tree(policy_total), divisor), tl.div_rn(tree(kl_total), divisor)
    tl.store(count, divisor)
    tl.store(policy_loss, policy_mean)
    tl.store(kl, kl_mean)
    tl.store(loss, fma(constant(beta), kl_mean, policy_mean))


@triton.jit
def plain_gradient(slope, count, upstream, grad, size, BLOCK: tl.constexpr):
    """Write the gradient of BLOCK tokens; ``grad`` may be the slope. Grid: blocks of tokens.

    The slope marks masked tokens, so no mask is read.
    """
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.div_rn(tl.load(upstream).to(tl.float32), tl.load(count))
    x = tl.load(slope + places, mask=places < size, other=0.0)
    is_masked = x.to(tl.int32, bitcast=True) == SIGN
    value = tl.where(is_masked, 0.0, x * factor)
    tl.store(grad + places, value.to(grad.dtype.element_ty), mask=places < size)
