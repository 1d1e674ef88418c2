"""The kernel that adds what the programs of an objective left, and the metrics; see ``triton_objectives``."""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib.arithmetic import fma
from rl_kernels.grpo_loss.triton_groups import tree
from rl_kernels.grpo_loss.triton_terms import constant


@triton.jit
def _total(sums, quantity, batch, segments, QUANTITIES: tl.constexpr, LANES: tl.constexpr):
    """Return the sum of a quantity over all sequences, in order."""
    total = tl.zeros((LANES,), tl.float32)
    for first in range(0, batch, LANES):
        rows = first + tl.arange(0, LANES)
        row_sum = tl.zeros((LANES,), tl.float32)
        for segment in range(segments):
            place = sums + (tl.full((), segment, tl.int64) * QUANTITIES + quantity) * batch + rows
            row_sum += tl.load(place, mask=rows < batch, other=0.0)
        total += row_sum
    return tree(total)


@triton.jit
def reduce(
    sums,
    loss,
    policy_loss,
    kl,
    metrics,
    divisor,
    normaliser,
    batch,
    segments,
    beta,
    given,
    factor,
    MEAN_SEQ: tl.constexpr,
    QUANTITIES: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program: the sums of all sequences, in order, divided by what the objective divides by; and the metrics."""
    policy_total, kl_total = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    tokens = tl.zeros((LANES,), tl.int64)
    for first in range(0, batch, LANES):
        rows = first + tl.arange(0, LANES)
        here = rows < batch
        policy_sum, kl_sum = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
        count = tl.zeros((LANES,), tl.int64)
        for segment in range(segments):
            place = sums + tl.full((), segment, tl.int64) * QUANTITIES * batch + rows
            policy_sum += tl.load(place, mask=here, other=0.0)
            kl_sum += tl.load(place + batch, mask=here, other=0.0)
            count += tl.load(place + 2 * batch, mask=here, other=0.0).to(tl.int64)
        if MEAN_SEQ:
            size = tl.maximum(count, 1).to(tl.float32)
            policy_sum, kl_sum = tl.div_rn(policy_sum, size), tl.div_rn(kl_sum, size)
        policy_total += policy_sum
        kl_total += kl_sum
        tokens += count
    found = tl.maximum(tl.sum(tokens, 0), 1).to(tl.float32)
    number = tl.where(given > 0.0, given, found)
    if normaliser is not None:
        number = tl.load(normaliser)
    number = number * factor
    policy_mean, kl_mean = tl.div_rn(tree(policy_total), number), tl.div_rn(tree(kl_total), number)
    tl.store(divisor, number)
    tl.store(policy_loss, policy_mean)
    tl.store(kl, kl_mean)
    tl.store(loss, fma(constant(beta), kl_mean, policy_mean))
    if metrics is not None:
        is_any = tl.sum(tokens, 0) > 0
        least = tl.full((LANES,), float("inf"), tl.float32)
        most = tl.full((LANES,), float("-inf"), tl.float32)
        for first in range(0, batch * segments, LANES):
            index = first + tl.arange(0, LANES)
            here = index < batch * segments
            place = sums + (index // batch).to(tl.int64) * QUANTITIES * batch + 12 * batch + index % batch
            least = tl.minimum(least, tl.load(place, mask=here, other=float("inf")))
            most = tl.maximum(most, tl.load(place + batch, mask=here, other=float("-inf")))
        ratio = _total(sums, 5, batch, segments, QUANTITIES, LANES)
        squares = _total(sums, 6, batch, segments, QUANTITIES, LANES)
        tl.store(metrics, tl.div_rn(_total(sums, 3, batch, segments, QUANTITIES, LANES), found))
        tl.store(metrics + 1, tl.div_rn(_total(sums, 4, batch, segments, QUANTITIES, LANES), found))
        tl.store(metrics + 2, tl.div_rn(ratio, found))
        tl.store(metrics + 3, tl.where(is_any, tl.min(least, 0), 0.0))
        tl.store(metrics + 4, tl.where(is_any, tl.max(most, 0), 0.0))
        tl.store(metrics + 5, tl.div_rn(_total(sums, 7, batch, segments, QUANTITIES, LANES), found))
        tl.store(metrics + 6, tl.div_rn(_total(sums, 8, batch, segments, QUANTITIES, LANES), found))
        tl.store(metrics + 7, tl.div_rn(_total(sums, 9, batch, segments, QUANTITIES, LANES), found))
        tl.store(metrics + 8, tl.where(is_any, tl.div_rn(ratio * ratio, tl.where(is_any, squares, 1.0)), 0.0))
        tl.store(metrics + 9, _total(sums, 10, batch, segments, QUANTITIES, LANES))
        tl.store(metrics + 10, tl.div_rn(_total(sums, 11, batch, segments, QUANTITIES, LANES), found))
