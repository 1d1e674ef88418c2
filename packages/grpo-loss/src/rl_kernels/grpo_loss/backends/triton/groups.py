"""Advantages in Triton, as a kernel and as a device function of the loss's kernels; and ``tree``, the sum of both.

Order of the sums, which is the contract, in FP64: reward i of a group goes to lane i mod 256, in ascending order, and
``tree`` adds the lanes; first for the mean, then for the squared deviations. A group of fewer rewards may have fewer
lanes, which changes no bit: further lanes would hold zeros. So an advantage has the same bits in every kernel, whether
groups are given by size or by boundaries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rl_kernels.core.calls import Launches, prepared
from rl_kernels.core.gpu import device_of
from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.core.triton_lib.launch import Launch
from rl_kernels.grpo_loss.call import Estimator, LossCall

LANES = 256
"""Maximum lanes of a sum over rewards, tokens or sequences; ``backend.WIDE`` is the one exception."""
LEVELS = tl.constexpr(12)
"""Upper bound of the levels of a tree."""
NEIGHBORS = tl.constexpr(2)
"""Levels of a tree at which neighbors are added."""
SOME_REWARDS = tl.constexpr(16)
"""Fewest lanes of a sum over a group, and the group size up to which they are enough."""
BATCH_LANES = tl.constexpr(256)
"""Lanes of the sum over all rewards, whatever the size of a group."""
WARPS = 4
"""Warps of a program: the order of the sums is explicit, so they change no bit."""


class Scores(NamedTuple):
    """The kernels' source of advantages: rewards in groups, or the advantages themselves.

    Attributes:
        values: rewards ``[B]``, or advantages ``[B]`` or ``[B, T]``.
        boundaries: offsets of the groups, or None.
        groups: the number of groups where there are boundaries, or else the size of each group.
        lanes: lanes of the sum over a group's rewards; 0 for advantages.
        one_step: no group has more rewards than lanes.
        formula: the estimator: its kind, whether eps is added, whether NaN is skipped.
    """

    values: torch.Tensor
    boundaries: torch.Tensor | None = None
    groups: int = 0
    lanes: int = 0
    one_step: bool = False
    formula: tuple[str, bool, bool] = ("population", False, False)


@prepared
def advantages(
    rewards: torch.Tensor, boundaries: torch.Tensor | None, samples: int, eps: torch.Tensor, estimator: str
) -> Launches:
    """Return (r - mean) / max(std, eps) within each group, ``[B]``; 0 where all rewards are equal."""
    count, dtype = rewards.shape[0], compute_dtype(rewards.dtype)
    scores = scores_of(rewards, boundaries, samples, Estimator.parse(estimator))
    programs = scores.groups if boundaries is not None else count // samples if count else 0
    numbers = (count, scores.groups, rewards.stride(0), scores.lanes, scores.one_step, *scores.formula)
    scaled = Launch(_advantages, (programs,), numbers, num_warps=WARPS)

    def launch(
        rewards: torch.Tensor, boundaries: torch.Tensor | None, samples: int, eps: torch.Tensor, estimator: str
    ) -> torch.Tensor:
        out = rewards.new_empty(rewards.shape, dtype=dtype)
        if count:
            with device_of(rewards):
                scaled(rewards, boundaries, out, float(eps))
        return out

    return launch


def lanes_for(size: int, least: int, most: int = LANES) -> int:
    """Return the number of lanes for a sum of ``size`` terms; further lanes would hold zeros."""
    return min(max(1 << (size - 1).bit_length(), least), most)


def scores_of(rewards: torch.Tensor, boundaries: torch.Tensor | None, samples: int, estimator: Estimator) -> Scores:
    """Return rewards and their groups as ``Scores``."""
    formula = estimator.kind, estimator.placement == "add", estimator.nan == "skip"
    if boundaries is None:
        lanes = lanes_for(samples, SOME_REWARDS.value)
        return Scores(rewards, None, samples, lanes, samples <= LANES, formula)
    return Scores(rewards, boundaries, boundaries.shape[0] - 1, LANES, formula=formula)


def scores_of_call(call: LossCall) -> Scores:
    """Return the rewards or the advantages of a call as the kernels take them."""
    if call.rewards is not None:
        return scores_of(call.rewards, call.boundaries, call.samples, call.advantage_formula)
    advantages = call.advantages
    assert advantages is not None
    # One advantage per sequence, expanded to [B, T], is read as [B], except where this would change how slopes are
    # summed.
    is_expanded = advantages.ndim == 2 and advantages.stride(1) == 0 and call.cu_seqlens is None
    is_expanded = is_expanded and call.formula.level == "token"
    return Scores(advantages[:, 0] if is_expanded else advantages)


@triton.jit
def tree(x):
    """Return the sum of ``x``, whose length is a power of two, in pairs, so that no layout changes the order.

    First four neighbors are added, which are in one thread; then, at each level, the two halves of the rest.
    """
    for level in tl.static_range(LEVELS):
        if x.shape[0] > 2:
            if level < NEIGHBORS:
                x = tl.sum(tl.reshape(x, (x.shape[0] // 2, 2)), 1)
            else:
                x = tl.sum(tl.reshape(x, (2, x.shape[0] // 2)), 0)
    return tl.sum(x, 0)


@triton.jit
def _group_of(row, boundaries, groups, count):
    """Return start and end of a sequence's group, clamped to [0, count] because boundaries may be unchecked."""
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
def _load_rewards(rewards, start, end, stride, step, LANES: tl.constexpr, SKIP: tl.constexpr):
    """Return the rewards of a step, in FP64, and a mask of those that are summed."""
    place = start + step * LANES + tl.arange(0, LANES)
    r = tl.load(rewards + place * stride, mask=place < end, other=0.0).to(tl.float64)
    is_there = place < end
    if SKIP:
        is_there = is_there & (r == r)
    return r, is_there


@triton.jit
def _moments(rewards, start, end, stride, LANES: tl.constexpr, ONE_STEP: tl.constexpr, SKIP: tl.constexpr):
    """Return count, mean, sum of squared deviations, and whether all are equal, for one reward or more."""
    if ONE_STEP:
        steps: tl.constexpr = 1
    else:
        steps = tl.cdiv(end - start, LANES)
    example = tl.load(rewards + start * stride).to(tl.float64)

    total, present = tl.zeros((LANES,), tl.float64), tl.zeros((LANES,), tl.int32)
    differs = tl.zeros((LANES,), tl.int32)
    least = tl.full((LANES,), float("inf"), tl.float64)
    most = tl.full((LANES,), float("-inf"), tl.float64)
    for step in range(steps):
        r, is_there = _load_rewards(rewards, start, end, stride, step, LANES, SKIP)
        if SKIP:
            present += is_there.to(tl.int32)
            least = tl.where(is_there & (r < least), r, least)
            most = tl.where(is_there & (r > most), r, most)
            r = tl.where(is_there, r, 0.0)
        total += r
        differs |= (is_there & (r != example)).to(tl.int32)
    if SKIP:
        size = tl.sum(present, 0).to(tl.float64)
        equal = tl.min(least, 0) >= tl.max(most, 0)
    else:
        size = (end - start).to(tl.float64)
        equal = tl.max(differs, 0) == 0
    mean = tree(total) / size

    squares = tl.zeros((LANES,), tl.float64)
    for step in range(steps):
        r, is_there = _load_rewards(rewards, start, end, stride, step, LANES, SKIP)
        centered = tl.where(is_there, r - mean, 0.0)
        squares = tl.fma(centered, centered, squares)
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
    """Return mean, divisor, and whether all rewards are equal, for a group that is not empty."""
    size, mean, squares, equal = _moments(rewards, start, end, stride, LANES, ONE_STEP, SKIP)
    if KIND == "batch":
        # Over all rewards, one per sequence, again in every program.
        size, _, squares, _ = _moments(rewards, tl.zeros_like(start), count, stride, BATCH_LANES, False, SKIP)
    if KIND == "leave_one_out":
        return mean, (size - 1.0) / size, equal
    elif KIND == "none":
        return mean, tl.full((), 1.0, tl.float64), equal
    else:
        std = tl.sqrt(squares / (size if KIND == "population" else size - 1.0))
        least = tl.full((), eps, tl.float64)
        if ADD:
            return mean, std + least, equal
        # Written so that NaN stays NaN.
        return mean, tl.where(std < eps, least, std), equal


@triton.jit
def _scaled(r, mean, divisor, equal, SKIP: tl.constexpr):
    """Return advantages; equal rewards give exactly 0, by comparison: the mean of seven times 0.1 is not 0.1."""
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
    """Return the advantage of one sequence; every call recomputes the statistics of the sequence's group."""
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
    """Write the advantages of a group; the first and last program also write what invalid boundaries leave out."""
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
        places = place + tl.arange(0, LANES).to(tl.int64)
        r = tl.load(rewards + places * stride, mask=places < last, other=0.0)
        tl.store(out + places, _scaled(r, mean, divisor, equal, SKIP).to(out.dtype.element_ty), mask=places < last)
