"""Advantages in Triton, for a kernel of their own and for the one that sums the loss; and the tree that both sum by.

The rewards of a group are added to 256 lanes from its start, in FP64, mean first and then squares of deviations, and
the lanes by a tree. Fewer lanes, where a group has no more rewards, change no bit: the others are zeros. So an
advantage has the same bits from every kernel, and however its group was said.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rl_kernels.core.gpu import device_of
from rl_kernels.core.rowwise import compute_dtype
from rl_kernels.core.triton_lib.launch import launch
from rl_kernels.grpo_loss.call import LossCall
from rl_kernels.grpo_loss.estimator import ESTIMATORS, Estimator

LANES = 256
"""Most lanes of a sum, of rewards, tokens or sequences."""
LEVELS = tl.constexpr(12)
"""More levels than any tree has."""
NEIGHBOURS = tl.constexpr(2)
"""Levels at which neighbours are added."""
SOME_REWARDS = tl.constexpr(16)
"""Rewards of a group to which one warp is enough."""
POPULATION, LEAVE_ONE_OUT, NONE, BATCH = (
    tl.constexpr(ESTIMATORS.index(name)) for name in ("population", "leave_one_out", "none", "batch")
)
BATCH_LANES = tl.constexpr(256)
"""Lanes of the sum over all rewards, whatever the size of a group."""
WARPS = 4
"""Warps of a program: the order of the sums is explicit, so they change no bit."""


class Scores(NamedTuple):
    """What advantages come from, as the kernels take it: rewards of groups, or the advantages themselves.

    Attributes:
        values: rewards ``[B]``, or advantages ``[B]`` or ``[B, T]``.
        boundaries: of the groups, or None.
        groups: the number of groups where there are boundaries, or else the size of each group.
        lanes: to which a group's rewards are added; 0 for advantages.
        one_step: no group has more rewards than that.
        formula: the estimator: its place in ``ESTIMATORS``, whether eps is added, whether NaN is skipped.
    """

    values: torch.Tensor
    boundaries: torch.Tensor | None = None
    groups: int = 0
    lanes: int = 0
    one_step: bool = False
    formula: tuple[int, bool, bool] = (0, False, False)


def advantages(
    rewards: torch.Tensor, boundaries: torch.Tensor | None, samples: int, eps: torch.Tensor, estimator: str
) -> torch.Tensor:
    """Return (r - mean) / max(std, eps) within each group, ``[B]``; 0 where all rewards are equal."""
    out = rewards.new_empty(rewards.shape, dtype=compute_dtype(rewards.dtype))
    count = rewards.shape[0]
    if count:
        scores = scores_of(rewards, boundaries, samples, Estimator.parse(estimator))
        programs = count // samples if boundaries is None else scores.groups
        arguments = (rewards, boundaries, out, float(eps), count, scores.groups, rewards.stride(0))
        with device_of(rewards):
            constants = (scores.lanes, scores.one_step, *scores.formula)
            launch(_advantages, (programs,), *arguments, *constants, num_warps=WARPS)
    return out


def lanes_for(size: int, least: int, most: int = LANES) -> int:
    """Return the lanes to which so many terms are added: more would hold zeros."""
    return min(max(1 << (size - 1).bit_length(), least), most)


def scores_of(rewards: torch.Tensor, boundaries: torch.Tensor | None, samples: int, estimator: Estimator) -> Scores:
    """Return rewards and their groups as the kernels take them."""
    formula = ESTIMATORS.index(estimator.kind), estimator.placement == "add", estimator.nan == "skip"
    if boundaries is None:
        lanes = lanes_for(samples, SOME_REWARDS.value)
        return Scores(rewards, None, samples, lanes, samples <= LANES, formula)
    return Scores(rewards, boundaries, boundaries.shape[0] - 1, LANES, formula=formula)


def scores_in(call: LossCall) -> Scores:
    """Return what advantages come from in a call."""
    if call.rewards is not None:
        return scores_of(call.rewards, call.boundaries, call.samples, call.advantage_formula)
    advantages = call.advantages
    assert advantages is not None
    # One advantage a sequence, expanded, is read as that one: but where it would change how slopes are summed.
    is_one = advantages.ndim == 2 and advantages.stride(1) == 0 and call.cu_seqlens is None
    is_one = is_one and call.formula.level == "token"
    return Scores(advantages[:, 0] if is_one else advantages)


@triton.jit
def tree(x):
    """Return the sum of ``x``, a power of two of terms: two at a time, so that no layout changes the order.

    Four neighbours first, which one thread holds, then halves.
    """
    for level in tl.static_range(LEVELS):
        if x.shape[0] > 2:
            if level < NEIGHBOURS:
                x = tl.sum(tl.reshape(x, (x.shape[0] // 2, 2)), 1)
            else:
                x = tl.sum(tl.reshape(x, (2, x.shape[0] // 2)), 0)
    return tl.sum(x, 0)


@triton.jit
def _group_of(row, boundaries, groups, count):
    """Return where the group of a sequence starts and ends; inside of [0, count], whatever the boundaries are."""
    if boundaries is None:
        start = row // groups * groups
        return start, start + groups
    else:
        # The last group that starts at the row or before it.
        low = tl.full((), 0, tl.int64)
        high = tl.full((), groups, tl.int64) - 1
        while low < high:
            middle = (low + high + 1) // 2
            is_before = tl.load(boundaries + middle) <= row
            low = tl.where(is_before, middle, low)
            high = tl.where(is_before, high, middle - 1)
        return _clamped(boundaries, low, count)


@triton.jit
def _clamped(boundaries, group, count):
    start = tl.load(boundaries + group)
    end = tl.load(boundaries + group + 1)
    return tl.minimum(tl.maximum(start, 0), count - 1), tl.minimum(tl.maximum(end, 1), count)


@triton.jit
def _place(rewards, start, end, stride, step, LANES: tl.constexpr, SKIP: tl.constexpr):
    """Return the rewards of a step, in FP64, and which of them count."""
    place = start + step * LANES + tl.arange(0, LANES)
    r = tl.load(rewards + place * stride, mask=place < end, other=0.0).to(tl.float64)
    is_there = place < end
    if SKIP:
        is_there = is_there & (r == r)
    return r, is_there


@triton.jit
def _moments(rewards, start, end, stride, LANES: tl.constexpr, ONE_STEP: tl.constexpr, SKIP: tl.constexpr):
    """Return number, mean, sum of squared deviations, and whether all are equal, of rewards that are not none."""
    if ONE_STEP:
        steps: tl.constexpr = 1
    else:
        steps = tl.cdiv(end - start, LANES)
    example = tl.load(rewards + start * stride).to(tl.float64)

    total, found = tl.zeros((LANES,), tl.float64), tl.zeros((LANES,), tl.int32)
    unlike = tl.zeros((LANES,), tl.int32)
    least = tl.full((LANES,), float("inf"), tl.float64)
    most = tl.full((LANES,), float("-inf"), tl.float64)
    for step in range(steps):
        r, is_there = _place(rewards, start, end, stride, step, LANES, SKIP)
        if SKIP:
            found += is_there.to(tl.int32)
            least = tl.where(is_there & (r < least), r, least)
            most = tl.where(is_there & (r > most), r, most)
            r = tl.where(is_there, r, 0.0)
        total += r
        unlike |= (is_there & (r != example)).to(tl.int32)
    if SKIP:
        size = tl.sum(found, 0).to(tl.float64)
        equal = tl.min(least, 0) >= tl.max(most, 0)
    else:
        size = (end - start).to(tl.float64)
        equal = tl.max(unlike, 0) == 0
    mean = tree(total) / size

    squares = tl.zeros((LANES,), tl.float64)
    for step in range(steps):
        r, is_there = _place(rewards, start, end, stride, step, LANES, SKIP)
        centred = tl.where(is_there, r - mean, 0.0)
        squares = tl.fma(centred, centred, squares)
    return size, mean, tree(squares), equal


@triton.jit
def _statistics(
    rewards,
    start,
    end,
    count,
    stride,
    eps,
    LANES: tl.constexpr,
    ONE_STEP: tl.constexpr,
    KIND: tl.constexpr,
    ADD: tl.constexpr,
    SKIP: tl.constexpr,
):
    """Return mean, divisor, and whether all rewards are equal, of a group that is not empty."""
    size, mean, squares, equal = _moments(rewards, start, end, stride, LANES, ONE_STEP, SKIP)
    if KIND == BATCH:
        # Of all rewards, by every program: their number is that of the sequences.
        size, _, squares, _ = _moments(rewards, tl.zeros_like(start), count, stride, BATCH_LANES, False, SKIP)
    if KIND == LEAVE_ONE_OUT:
        return mean, (size - 1.0) / size, equal
    elif KIND == NONE:
        return mean, tl.full((), 1.0, tl.float64), equal
    else:
        std = tl.sqrt(squares / (size if KIND == POPULATION else size - 1.0))
        least = tl.full((), eps, tl.float64)
        if ADD:
            return mean, std + least, equal
        # Written so that a NaN stays.
        return mean, tl.where(std < eps, least, std), equal


@triton.jit
def _scaled(r, mean, divisor, equal, SKIP: tl.constexpr):
    """Return advantages; the mean of seven times 0.1 is not 0.1, so equal rewards give exactly 0 by comparison."""
    r = r.to(tl.float64)
    scaled = tl.where(equal, 0.0, (r - mean) / divisor)
    if SKIP:
        scaled = tl.where(r != r, 0.0, scaled)
    return scaled


@triton.jit
def advantage_of(
    rewards,
    boundaries,
    row,
    count,
    groups,
    stride,
    eps,
    LANES: tl.constexpr,
    ONE_STEP: tl.constexpr,
    KIND: tl.constexpr,
    ADD: tl.constexpr,
    SKIP: tl.constexpr,
):
    """Return the advantage of one sequence; what its group alone decides is worked out anew for each."""
    start, end = _group_of(row, boundaries, groups, count)
    if ONE_STEP:
        mean, divisor, equal = _statistics(rewards, start, end, count, stride, eps, LANES, True, KIND, ADD, SKIP)
    elif end - start <= SOME_REWARDS:
        mean, divisor, equal = _statistics(rewards, start, end, count, stride, eps, SOME_REWARDS, True, KIND, ADD, SKIP)
    else:
        mean, divisor, equal = _statistics(rewards, start, end, count, stride, eps, LANES, False, KIND, ADD, SKIP)
    return _scaled(tl.load(rewards + row * stride), mean, divisor, equal, SKIP)


@triton.jit
def _advantages(
    rewards,
    boundaries,
    out,
    eps,
    count,
    groups,
    stride,
    LANES: tl.constexpr,
    ONE_STEP: tl.constexpr,
    KIND: tl.constexpr,
    ADD: tl.constexpr,
    SKIP: tl.constexpr,
):
    """One program a group; the first and the last also write what unchecked boundaries leave out."""
    group = tl.program_id(0).to(tl.int64)
    if boundaries is None:
        start, end = group * groups, group * groups + groups
        first, last = start, end
    else:
        start, end = _clamped(boundaries, group, count)
        first = tl.where(group == 0, 0, tl.maximum(tl.load(boundaries + group), 0))
        last = tl.where(group == groups - 1, count, tl.minimum(tl.load(boundaries + group + 1), count))
    mean, divisor, equal = _statistics(rewards, start, end, count, stride, eps, LANES, ONE_STEP, KIND, ADD, SKIP)
    for place in range(first, last, LANES):
        places = place + tl.arange(0, LANES)
        r = tl.load(rewards + places * stride, mask=places < last, other=0.0)
        tl.store(out + places, _scaled(r, mean, divisor, equal, SKIP).to(out.dtype.element_ty), mask=places < last)
