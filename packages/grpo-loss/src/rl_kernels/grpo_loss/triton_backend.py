"""grpo_loss in Triton: every token is read once, and the gradient is written in the pass that sums the loss.

Order of the sums, which is the contract of this backend: a sequence is cut into segments of 4096 tokens from its
start. Token i of a segment is added to lane i mod 1024, ascending, and the lanes are added by a tree; a sequence's
segments are added in ascending order. Sequences are cut into segments of 4096, each added by a tree, ascending too.
Rewards are added to 512 lanes from the group's start, in FP64, and these by a tree. Trees are explicit, halves added to
halves: no bit follows how a compiler lays values out, so none follows strides, addresses or the number of warps. Masked
tokens are zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rl_kernels.core.rowwise import compute_dtype
from rl_kernels.core.triton_lib.arithmetic import fma
from rl_kernels.core.triton_lib.launch import device_of

SEGMENT_LEVELS, LANE_LEVELS, GROUP_LEVELS = tl.constexpr(12), tl.constexpr(10), tl.constexpr(9)
"""Levels of the trees over what follows."""
SEGMENT = tl.constexpr(1 << SEGMENT_LEVELS.value)
"""Tokens, and sequences, whose sum is formed at a time."""
LANES = tl.constexpr(1 << LANE_LEVELS.value)
"""Tokens worked on at once, one a lane of the sum."""
GROUP_LANES = tl.constexpr(1 << GROUP_LEVELS.value)
"""Rewards of a group worked on at once."""
LOSS_WARPS, REDUCE_WARPS, GROUP_WARPS = 8, 16, 4
"""Warps of a program that sums; the sums' order is explicit, so they change no bit."""
GRADIENT_BLOCK, GRADIENT_WARPS = 2048, 4
"""Tokens that one program of the backward pass scales, and its warps: element by element, so they change no bit."""
COUNTERS = tl.constexpr(512)
"""Most programs that count active tokens: integers, so their number changes no bit."""
COUNT_WARPS = 8

LOG2E = tl.constexpr(1.4426950408889634)
SMALL = tl.constexpr(0.5)
"""|e| below which exp(e) - 1 and k3 are a series: their differences lose bits there."""


def advantages(rewards: torch.Tensor, boundaries: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """Return (r - mean) / max(std, eps) within each group, ``[B]``; 0 where all rewards are equal."""
    out = rewards.new_empty(rewards.shape, dtype=compute_dtype(rewards.dtype))
    count, groups = rewards.shape[0], boundaries.shape[0] - 1
    if count:
        sizes = (count, groups, rewards.stride(0), boundaries.stride(0))
        with device_of(rewards):
            _advantages[(groups,)](rewards, boundaries, out, float(eps), *sizes, num_warps=GROUP_WARPS)
    return out


def forward(
    current_logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    ref_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_eps: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (loss, policy_loss, kl), scalars."""
    return _loss(current_logps, old_logps, ref_logps, advantages, mask, float(clip_eps), float(beta), None)


def forward_grad(
    current_logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    ref_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_eps: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (loss, policy_loss, kl, unit_grad), the last ``[B, T]``."""
    unit_grad = current_logps.new_empty(current_logps.shape, dtype=torch.float32)
    inputs = (current_logps, old_logps, ref_logps, advantages, mask)
    return *_loss(*inputs, float(clip_eps), float(beta), unit_grad), unit_grad


def _loss(
    current: torch.Tensor,
    old: torch.Tensor | None,
    ref: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_eps: float,
    beta: float,
    unit_grad: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (loss, policy_loss, kl) and write the gradient, if it is wanted."""
    batch, length = current.shape
    segments = triton.cdiv(length, SEGMENT.value)
    loss, policy_loss, kl = (current.new_empty((), dtype=torch.float32) for _ in range(3))
    sums = current.new_empty((segments, 2, batch), dtype=torch.float32)
    active = current.new_empty((segments, batch), dtype=torch.int32)
    with device_of(current):
        if batch and length:
            counts = active if unit_grad is None else _count(mask)
            # Where a tensor is missing its place is taken by one that is not read.
            tensors = (current, current if old is None else old, current if ref is None else ref, advantages, mask)
            strides = [stride for tensor in tensors for stride in (*tensor.stride(), 0)[:2]]
            _terms[(batch, segments)](
                *tensors,
                sums,
                active,
                counts,
                current if unit_grad is None else unit_grad,
                batch,
                length,
                counts.shape[0],
                *strides,
                1 - clip_eps,
                1 + clip_eps,
                beta,
                HAS_OLD=old is not None,
                HAS_REF=ref is not None,
                PER_TOKEN=advantages.ndim == 2,
                GRADIENT=unit_grad is not None,
                num_warps=LOSS_WARPS,
            )
        results = (loss, policy_loss, kl, batch, segments, beta)
        _reduce[(1,)](sums, active, *results, HAS_REF=ref is not None, num_warps=REDUCE_WARPS)
    return loss, policy_loss, kl


def _count(mask: torch.Tensor) -> torch.Tensor:
    """Return numbers that add up to the number of active tokens, which divides the gradient as it is written."""
    batch, length = mask.shape
    counts = mask.new_empty(min(COUNTERS.value, batch * triton.cdiv(length, SEGMENT.value)), dtype=torch.int64)
    _count_active[counts.shape](mask, counts, batch, length, *mask.stride(), num_warps=COUNT_WARPS)
    return counts


def backward(
    current_logps: torch.Tensor, unit_grad: torch.Tensor, mask: torch.Tensor, upstream: torch.Tensor
) -> torch.Tensor:
    """Return the gradient in the dtype of current_logps; 0 at masked positions, whatever the upstream gradient."""
    grad = current_logps.new_empty(current_logps.shape)
    batch, length = grad.shape
    if grad.numel():
        strides = (*unit_grad.stride(), *mask.stride())
        with device_of(grad):
            _scale[(batch, triton.cdiv(length, GRADIENT_BLOCK))](
                unit_grad, mask, upstream, grad, length, *strides, COLUMNS=GRADIENT_BLOCK, num_warps=GRADIENT_WARPS
            )
    return grad


@triton.jit
def _tree(x, LEVELS: tl.constexpr):
    """Return the sum of ``x[2**LEVELS]``: two terms at a time, so that no layout changes the order."""
    for _ in tl.static_range(LEVELS - 1):
        x = tl.sum(tl.reshape(x, (2, x.shape[0] // 2)), 0)
    return tl.sum(x, 0)


@triton.jit
def _advantages(rewards, boundaries, out, eps, count, groups, stride, boundary_stride):
    """One program a group; the first and the last also write what unchecked boundaries leave out."""
    group = tl.program_id(0).to(tl.int64)
    start = tl.load(boundaries + group * boundary_stride)
    end = tl.load(boundaries + (group + 1) * boundary_stride)
    first = tl.where(group == 0, 0, tl.maximum(start, 0))
    last = tl.where(group == groups - 1, count, tl.minimum(end, count))
    start = tl.minimum(tl.maximum(start, 0), count - 1)
    end = tl.minimum(tl.maximum(end, 1), count)
    size = (end - start).to(tl.float64)
    lanes = tl.arange(0, GROUP_LANES)
    example = tl.load(rewards + start * stride).to(tl.float64)

    total = tl.zeros((GROUP_LANES,), tl.float64)
    unlike = tl.zeros((GROUP_LANES,), tl.int32)
    for place in range(start, end, GROUP_LANES):
        here = place + lanes < end
        r = tl.load(rewards + (place + lanes) * stride, mask=here, other=0.0).to(tl.float64)
        total += r
        unlike |= (here & (r != example)).to(tl.int32)
    mean = _tree(total, GROUP_LEVELS) / size

    squares = tl.zeros((GROUP_LANES,), tl.float64)
    for place in range(start, end, GROUP_LANES):
        here = place + lanes < end
        r = tl.load(rewards + (place + lanes) * stride, mask=here, other=0.0).to(tl.float64)
        centred = tl.where(here, r - mean, 0.0)
        squares = tl.fma(centred, centred, squares)
    std = tl.sqrt(_tree(squares, GROUP_LEVELS) / size)
    # Written so that a NaN stays.
    scale = tl.where(std < eps, tl.full((), eps, tl.float64), std)

    # The mean of seven times 0.1 is not 0.1: equal rewards give exactly 0 by comparison.
    equal = tl.max(unlike, 0) == 0
    for place in range(first, last, GROUP_LANES):
        here = place + lanes < last
        r = tl.load(rewards + (place + lanes) * stride, mask=here, other=0.0).to(tl.float64)
        scaled = tl.where(equal, 0.0, (r - mean) / scale)
        tl.store(out + place + lanes, scaled.to(out.dtype.element_ty), mask=here)


@triton.jit
def _count_active(mask, counts, batch, length, row_stride, column_stride):
    """One program some segments of sequences, wherever they are."""
    lanes = tl.arange(0, SEGMENT)
    segments = tl.cdiv(length, SEGMENT)
    total = tl.zeros((SEGMENT,), tl.int32)
    for task in range(tl.program_id(0).to(tl.int64), tl.full((), batch, tl.int64) * segments, tl.num_programs(0)):
        columns = task % segments * SEGMENT + lanes
        place = mask + task // segments * row_stride + columns * column_stride
        total += (tl.load(place, mask=columns < length, other=0) != 0).to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum(total.to(tl.int64), 0))


@triton.jit
def _place(tensor, row, columns, row_stride, column_stride):
    return tensor + row * row_stride + columns.to(tl.int64) * column_stride


@triton.jit
def _constant(value):
    return tl.full((), value, tl.float32)


@triton.jit
def _exp(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def _k3(e):
    """Return exp(e) - e - 1, never negative and accurate for small e, and exp(e) - 1."""
    series = fma(e, _constant(1 / 362880), _constant(1 / 40320))
    series = fma(e, series, _constant(1 / 5040))
    series = fma(e, series, _constant(1 / 720))
    series = fma(e, series, _constant(1 / 120))
    series = fma(e, series, _constant(1 / 24))
    series = fma(e, series, _constant(1 / 6))
    series = fma(e, series, _constant(1 / 2))
    small = tl.abs(e) < SMALL
    square = e * e
    expm1 = tl.where(small, fma(square, series, e), _exp(e) - 1.0)
    return tl.where(small, square * series, expm1 - e), expm1


@triton.jit
def _policy_term(ratio, a, low, high):
    """Return -min(ratio A, clamp(ratio) A) and its slope; a tie, and NaN, takes the unclipped branch."""
    unclipped = -(ratio * a)
    clipped = -(tl.minimum(tl.maximum(ratio, low), high) * a)
    is_clipped = clipped > unclipped
    return tl.where(is_clipped, clipped, unclipped), tl.where(is_clipped, 0.0, unclipped)


@triton.jit
def _terms(
    current,
    old,
    ref,
    advantages,
    mask,
    sums,
    active,
    counts,
    unit_grad,
    batch,
    length,
    counters,
    current_row,
    current_column,
    old_row,
    old_column,
    ref_row,
    ref_column,
    advantage_row,
    advantage_column,
    mask_row,
    mask_column,
    low,
    high,
    beta,
    HAS_OLD: tl.constexpr,
    HAS_REF: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    GRADIENT: tl.constexpr,
):
    """One program a segment of a sequence: its sums, its number of active tokens, and the gradient to its tokens."""
    row = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    lanes = tl.arange(0, LANES)
    policy_sum, kl_sum = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    number = tl.zeros((LANES,), tl.int32)
    if GRADIENT:
        counter = tl.arange(0, COUNTERS)
        count = tl.sum(tl.load(counts + counter, mask=counter < counters, other=0), 0)
        scale = tl.div_rn(_constant(1.0), tl.maximum(count, 1).to(tl.float32))
    if not PER_TOKEN:
        a = tl.broadcast_to(tl.load(advantages + row * advantage_row).to(tl.float32), (LANES,))
    for first in range(segment * SEGMENT, tl.minimum(length, segment * SEGMENT + SEGMENT), LANES):
        columns = first + lanes
        here = columns < length
        is_active = tl.load(_place(mask, row, columns, mask_row, mask_column), mask=here, other=0) != 0
        x = tl.load(_place(current, row, columns, current_row, current_column), mask=here, other=0.0).to(tl.float32)
        if PER_TOKEN:
            place = _place(advantages, row, columns, advantage_row, advantage_column)
            a = tl.load(place, mask=here, other=0.0).to(tl.float32)
        # Masked before any exponential, and A = 0 with it: 0 * inf would be NaN.
        counted = is_active & (a != 0.0)
        if HAS_OLD:
            before = tl.load(_place(old, row, columns, old_row, old_column), mask=here, other=0.0).to(tl.float32)
            ratio = _exp(tl.where(counted, x - before, 0.0))
        else:
            ratio = tl.full((LANES,), 1.0, tl.float32)
        term, slope = _policy_term(ratio, a, low, high)
        policy_sum += tl.where(counted, term, 0.0)
        slope = tl.where(counted, slope, 0.0)
        if HAS_REF:
            other = tl.load(_place(ref, row, columns, ref_row, ref_column), mask=here, other=0.0).to(tl.float32)
            k3, expm1 = _k3(tl.where(is_active, other - x, 0.0))
            kl_sum += k3
            slope = fma(_constant(beta), -expm1, slope)
        number += is_active.to(tl.int32)
        if GRADIENT:
            # A slope of +-0 at a masked token becomes +0, which any finite upstream leaves 0.
            tl.store(unit_grad + row * length + columns, tl.where(is_active, slope * scale, 0.0), mask=here)
    place = sums + segment.to(tl.int64) * 2 * batch + row
    tl.store(place, _tree(policy_sum, LANE_LEVELS))
    if HAS_REF:
        tl.store(place + batch, _tree(kl_sum, LANE_LEVELS))
    tl.store(active + segment.to(tl.int64) * batch + row, tl.sum(number, 0))


@triton.jit
def _reduce(sums, active, loss, policy_loss, kl, batch, segments, beta, HAS_REF: tl.constexpr):
    """One program: the sums of all sequences, in order, divided by the number of active tokens."""
    lanes = tl.arange(0, SEGMENT)
    policy_total, kl_total = _constant(0.0), _constant(0.0)
    count = tl.full((), 0, tl.int64)
    for first in range(0, batch, SEGMENT):
        rows = first + lanes
        here = rows < batch
        policy_sum, kl_sum = tl.zeros((SEGMENT,), tl.float32), tl.zeros((SEGMENT,), tl.float32)
        number = tl.zeros((SEGMENT,), tl.int64)
        for segment in range(segments):
            offset = tl.full((), segment, tl.int64) * batch
            place = sums + 2 * offset + rows
            policy_sum += tl.load(place, mask=here, other=0.0)
            if HAS_REF:
                kl_sum += tl.load(place + batch, mask=here, other=0.0)
            number += tl.load(active + offset + rows, mask=here, other=0)
        policy_total += _tree(policy_sum, SEGMENT_LEVELS)
        if HAS_REF:
            kl_total += _tree(kl_sum, SEGMENT_LEVELS)
        count += tl.sum(number, 0)
    divisor = tl.maximum(count, 1).to(tl.float32)
    policy_mean, kl_mean = tl.div_rn(policy_total, divisor), tl.div_rn(kl_total, divisor)
    tl.store(policy_loss, policy_mean)
    tl.store(kl, kl_mean)
    tl.store(loss, fma(_constant(beta), kl_mean, policy_mean))


@triton.jit
def _scale(
    unit_grad, mask, upstream, grad, length, grad_row, grad_column, mask_row, mask_column, COLUMNS: tl.constexpr
):
    """One program some tokens of a sequence; the mask is read only where the upstream would turn a 0 into NaN."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = columns < length
    factor = tl.load(upstream).to(tl.float32)
    # -0 + 0 is +0.
    value = tl.load(_place(unit_grad, row, columns, grad_row, grad_column), mask=here, other=0.0) * factor + 0.0
    if not (tl.abs(factor) < float("inf")):
        is_active = tl.load(_place(mask, row, columns, mask_row, mask_column), mask=here, other=0) != 0
        value = tl.where(is_active, value, 0.0)
    tl.store(grad + row * length + columns, value.to(grad.dtype.element_ty), mask=here)
