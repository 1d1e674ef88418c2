"""The kernels after ``kernels.terms``: ``reduce`` adds its sums to loss and metrics, ``gradient`` scales its slopes.

Order of the sums, which is the contract (``backend``): a sequence's segments in ascending order; sequence i goes to
lane i mod LANES, in ascending order; ``tree`` adds the lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib.arithmetic import fma
from rl_kernels.grpo_loss.backends.triton.groups import tree
from rl_kernels.grpo_loss.backends.triton.terms import constant
from rl_kernels.grpo_loss.call import SUMS
from rl_kernels.grpo_loss.outputs import METRICS

FIRST_METRIC = tl.constexpr(SUMS)
"""Index of the first metric's sum, after policy, KL and count; metrics are in the order of ``METRICS``."""
RATIO, LEAST, MOST, SAMPLES, NONFINITE = (
    tl.constexpr(METRICS.index(name))
    for name in ("ratio_mean", "ratio_min", "ratio_max", "effective_samples", "nonfinite")
)
SIGN = tl.constexpr(-(1 << 31))
"""The bits of -0, as an integer."""


@triton.jit
def _add_segments(sums, rows, quantity, batch, segments, QUANTITIES: tl.constexpr):
    """Return the sum of a quantity over the segments of each sequence in ``rows``, in ascending order."""
    total = tl.zeros(rows.shape, tl.float32)
    for segment in range(segments):
        place = sums + (tl.full((), segment, tl.int64) * QUANTITIES + quantity) * batch + rows
        total += tl.load(place, mask=rows < batch, other=0.0)
    return total


@triton.jit
def _total(sums, quantity, batch, segments, QUANTITIES: tl.constexpr, LANES: tl.constexpr):
    """Return the sum of a quantity over all sequences, in order; each lane loads four before it adds the first."""
    total = tl.zeros((LANES,), tl.float32)
    for first in range(0, batch, 4 * LANES):
        rows = first + tl.arange(0, LANES)
        s0 = _add_segments(sums, rows, quantity, batch, segments, QUANTITIES)
        s1 = _add_segments(sums, rows + LANES, quantity, batch, segments, QUANTITIES)
        s2 = _add_segments(sums, rows + 2 * LANES, quantity, batch, segments, QUANTITIES)
        s3 = _add_segments(sums, rows + 3 * LANES, quantity, batch, segments, QUANTITIES)
        total = total + s0 + s1 + s2 + s3
    return tree(total)


@triton.jit
def _number(sums, batch, segments, QUANTITIES: tl.constexpr, LANES: tl.constexpr):
    """Return the number of active tokens."""
    total = tl.zeros((LANES,), tl.int64)
    for first in range(0, batch, 4 * LANES):
        for tile in tl.static_range(4):
            rows = first + tile * LANES + tl.arange(0, LANES)
            for segment in range(segments):
                place = sums + (tl.full((), segment, tl.int64) * QUANTITIES + 2) * batch + rows
                total += tl.load(place, mask=rows < batch, other=0.0).to(tl.int64)
    return tl.sum(total, 0)


@triton.jit
def _metric(sums, metrics, metric, batch, segments, QUANTITIES: tl.constexpr, LANES: tl.constexpr):
    """Write a metric, given by its index in ``METRICS``."""
    number = _number(sums, batch, segments, QUANTITIES, LANES)
    if (metric == LEAST) | (metric == MOST):
        sign = tl.where(metric == LEAST, 1.0, -1.0)
        least = tl.full((LANES,), float("inf"), tl.float32)
        for first in range(0, batch, LANES):
            rows = first + tl.arange(0, LANES)
            for segment in range(segments):
                place = sums + (tl.full((), segment, tl.int64) * QUANTITIES + FIRST_METRIC + metric) * batch + rows
                x = tl.load(place, mask=rows < batch, other=0.0)
                least = tl.where(rows < batch, tl.minimum(least, sign * x), least)
        tl.store(metrics + metric, tl.where(number > 0, sign * tl.min(least, 0), 0.0))
    else:
        total = _total(sums, FIRST_METRIC + metric, batch, segments, QUANTITIES, LANES)
        divisor = tl.where(metric == NONFINITE, 1.0, tl.maximum(number, 1).to(tl.float32))
        if metric == SAMPLES:
            # ``total`` is here the sum of the squared ratios.
            ratio = _total(sums, FIRST_METRIC + RATIO, batch, segments, QUANTITIES, LANES)
            # Without a token, and where all squares underflow, it is 0 / 1.
            divisor = tl.where(total == 0.0, 1.0, total)
            total = ratio * ratio
        tl.store(metrics + metric, tl.div_rn(total, divisor))


@triton.jit
def _sums(sums, rows, batch, segments, QUANTITIES: tl.constexpr):
    """Return policy, KL and number of active tokens of some sequences."""
    policy = _add_segments(sums, rows, 0, batch, segments, QUANTITIES)
    kl = _add_segments(sums, rows, 1, batch, segments, QUANTITIES)
    # Each segment's count is exact in FP32, their sum need not be.
    count = tl.zeros(rows.shape, tl.int64)
    for segment in range(segments):
        place = sums + (tl.full((), segment, tl.int64) * QUANTITIES + 2) * batch + rows
        count += tl.load(place, mask=rows < batch, other=0.0).to(tl.int64)
    return policy, kl, count


@triton.jit
def _added(policy_total, policy, kl_total, kl, count, MEAN_SEQ: tl.constexpr):
    """Return the totals with the sums of some sequences, or their means, added."""
    if MEAN_SEQ:
        size = tl.maximum(count, 1).to(tl.float32)
        policy, kl = tl.div_rn(policy, size), tl.div_rn(kl, size)
    return policy_total + policy, kl_total + kl


@triton.jit
def reduce(
    sums,
    loss,
    policy_loss,
    kl,
    metrics,
    divisor,
    normalizer,
    batch,
    segments,
    beta,
    given,
    factor,
    MEAN_SEQ: tl.constexpr,
    QUANTITIES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Divide the sums of all sequences by the objective's divisor; one more program for each metric."""
    if tl.program_id(0) > 0:
        if metrics is not None:
            _metric(sums, metrics, tl.program_id(0) - 1, batch, segments, QUANTITIES, LANES)
    else:
        policy_total, kl_total = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
        tokens = tl.zeros((LANES,), tl.int64)
        for first in range(0, batch, 4 * LANES):
            # All are loaded before the first is added, so that their latencies overlap.
            rows = first + tl.arange(0, LANES)
            policy0, kl0, count0 = _sums(sums, rows, batch, segments, QUANTITIES)
            policy1, kl1, count1 = _sums(sums, rows + LANES, batch, segments, QUANTITIES)
            policy2, kl2, count2 = _sums(sums, rows + 2 * LANES, batch, segments, QUANTITIES)
            policy3, kl3, count3 = _sums(sums, rows + 3 * LANES, batch, segments, QUANTITIES)
            policy_total, kl_total = _added(policy_total, policy0, kl_total, kl0, count0, MEAN_SEQ)
            policy_total, kl_total = _added(policy_total, policy1, kl_total, kl1, count1, MEAN_SEQ)
            policy_total, kl_total = _added(policy_total, policy2, kl_total, kl2, count2, MEAN_SEQ)
            policy_total, kl_total = _added(policy_total, policy3, kl_total, kl3, count3, MEAN_SEQ)
            tokens += count0 + count1 + count2 + count3
        number = tl.where(given > 0.0, given, tl.maximum(tl.sum(tokens, 0), 1).to(tl.float32))
        if normalizer is not None:
            number = tl.load(normalizer).to(tl.float32)
            # Where no token is active a count of 0 is right: the loss is 0 / 1, not 0 / 0.
            number = tl.where((number == 0.0) & (tl.sum(tokens, 0) == 0), 1.0, number)
        number = number * factor
        policy_mean, kl_mean = tl.div_rn(tree(policy_total), number), tl.div_rn(tree(kl_total), number)
        tl.store(divisor, number)
        tl.store(policy_loss, policy_mean)
        tl.store(kl, kl_mean)
        tl.store(loss, fma(constant(beta), kl_mean, policy_mean))


@triton.jit
def gradient(slope, divisor, upstream, grad, size, BLOCK: tl.constexpr):
    """Write the gradient of BLOCK tokens; ``grad`` may be the slope. Grid: blocks of tokens.

    The slope marks masked tokens, so no mask is read.
    """
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.div_rn(tl.load(upstream).to(tl.float32), tl.load(divisor))
    x = tl.load(slope + places, mask=places < size, other=0.0)
    is_masked = x.to(tl.int32, bitcast=True) == SIGN
    value = tl.where(is_masked, 0.0, x * factor)
    tl.store(grad + places, value.to(grad.dtype.element_ty), mask=places < size)
