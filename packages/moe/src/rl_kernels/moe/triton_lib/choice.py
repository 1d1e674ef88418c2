"""The choice of experts in Triton: scores, the k largest, weights, and the gradient of the logits; a row a program.

A row's scores are a tile ``[groups, experts of a group]``, padded to powers of two; without groups there is one. The
largest score is taken k times, equal ones by ascending id. Order of the sums, which is the contract: Triton's reduction
over the tile of a row, whose shape follows from E and the groups; sums over slots ascend.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib.arithmetic import product
from rl_kernels.moe import reference
from rl_kernels.moe.triton_lib.rows import sigmoid

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = (tl.constexpr(number) for number in range(3))
"""Numbers of the ways of scoring, in the order of ``choice.SCORINGS``."""
LEAST_SUM = tl.constexpr(reference.LEAST_SUM)
LOWEST = tl.constexpr(float("-inf"))
FAR = tl.constexpr(2147483647)


@triton.jit
def total(x):
    """Return the sum of a tile."""
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def largest(x, where):
    """Return the largest number of a tile among those that ``where`` names, -inf if there is none."""
    return tl.max(tl.max(tl.where(where, x, LOWEST), 1), 0)


@triton.jit
def first(ids, where):
    """Return the smallest id that ``where`` names."""
    return tl.min(tl.min(tl.where(where, ids, FAR), 1), 0)


@triton.jit
def scores_of(LOGITS, row, E, inside, e, SCORING: tl.constexpr):
    """Return the scores of a row, 0 beyond E, and whether one of its logits is NaN or +inf."""
    z = tl.load(LOGITS + row.to(tl.int64) * E + e, mask=inside, other=0.0).to(tl.float32)
    is_bad = total(((z != z) & inside).to(tl.int32)) > 0
    if SCORING == SOFTMAX:
        powers = tl.where(inside, tl.exp(z - largest(z, inside)), 0.0)
        scores = powers / total(powers)
        # Logits of +inf, or of -inf alone, have no softmax.
        is_bad = is_bad | (total(((scores != scores) & inside).to(tl.int32)) > 0)
    elif SCORING == SIGMOID:
        scores = tl.where(inside, sigmoid(z), 0.0)
    else:
        scores = z
    return scores, is_bad


@triton.jit
def groups_kept(rank, inside, GROUPS: tl.constexpr, KEPT: tl.constexpr, HEIGHT: tl.constexpr, SIZE: tl.constexpr):
    """Return which experts are in the KEPT groups whose two largest ranks have the largest sums."""
    column = tl.broadcast_to(tl.arange(0, SIZE)[None, :], [HEIGHT, SIZE])
    allowed = tl.where(inside, rank, LOWEST)
    best = tl.max(allowed, 1)
    at = tl.min(tl.where(allowed == best[:, None], column, FAR), 1)
    second = tl.max(tl.where(column == at[:, None], LOWEST, allowed), 1)
    group = tl.arange(0, HEIGHT)
    has_two = tl.sum(inside.to(tl.int32), 1) > 1
    best = tl.where(has_two, best + second, best)
    left = group < GROUPS
    kept = group < 0
    for _ in range(KEPT):
        top = tl.max(tl.where(left, best, LOWEST), 0)
        taken = tl.min(tl.where(left & (best == top), group, FAR), 0)
        kept = kept | (group == taken)
        left = left & (group != taken)
    return inside & kept[:, None]


@triton.jit(do_not_specialize=["E", "scale"])
def choose(
    LOGITS, CORRECTION, GIVEN, IDS, WEIGHTS, scale, E, SCORING: tl.constexpr, NORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, EACH: tl.constexpr, HEIGHT: tl.constexpr, SIZE: tl.constexpr,
    SLOTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the ids of a row's k experts, or take the GIVEN ones, and their weights. Grid: rows."""
    row = tl.program_id(0)
    group, within = tl.arange(0, HEIGHT), tl.arange(0, SIZE)
    e = group[:, None] * EACH + within[None, :]
    inside = (group < GROUPS)[:, None] & (within < EACH)[None, :]
    scores, is_bad = scores_of(LOGITS, row, E, inside, e, SCORING)
    rank, left = scores, inside
    if GIVEN is None:
        if CORRECTION is not None:
            rank += tl.load(CORRECTION + e, mask=inside, other=0.0).to(tl.float32)
        if KEPT < GROUPS:
            left = groups_kept(rank, inside, GROUPS, KEPT, HEIGHT, SIZE)
    slot = tl.arange(0, WIDTH)
    ids, chosen = tl.zeros([WIDTH], tl.int32), tl.zeros([WIDTH], tl.float32)
    for s in range(SLOTS):
        if GIVEN is None:
            expert = first(e, left & (rank == largest(rank, left)))
            expert = tl.where(is_bad, s, expert)
            left = left & (e != expert)
        else:
            expert = tl.load(GIVEN + row.to(tl.int64) * SLOTS + s).to(tl.int32)
            is_bad = is_bad | (expert < 0) | (expert >= E)
        ids = tl.where(slot == s, expert, ids)
        chosen = tl.where(slot == s, total(tl.where(inside & (e == expert), scores, 0.0)), chosen)
    live = slot < SLOTS
    if SCORING == SOFTMAX_OF_CHOSEN:
        powers = tl.where(live, tl.exp(chosen - tl.max(tl.where(live, chosen, LOWEST), 0)), 0.0)
        chosen = powers / ascending(powers, slot, SLOTS)
    elif NORMALIZE:
        chosen = chosen / (ascending(chosen, slot, SLOTS) + LEAST_SUM)
    weights = tl.where(is_bad, float("nan"), chosen * scale)
    place = row.to(tl.int64) * SLOTS + slot
    tl.store(IDS + place, ids, mask=live)
    tl.store(WEIGHTS + place, weights, mask=live)


@triton.jit
def ascending(x, slot, SLOTS: tl.constexpr):
    """Return the sum of the slots, one after the other."""
    sum_of_slots = tl.sum(tl.where(slot == 0, x, 0.0), 0)
    for s in range(1, SLOTS):
        sum_of_slots += tl.sum(tl.where(slot == s, x, 0.0), 0)
    return sum_of_slots


@triton.jit(do_not_specialize=["E", "scale"])
def choose_backward(
    GRAD_WEIGHTS, GRAD_LOGITS, LOGITS, IDS, OUT, scale, E, SCORING: tl.constexpr, NORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, EACH: tl.constexpr, HEIGHT: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a row's logits, in the dtype of OUT. Grid: rows."""
    row = tl.program_id(0)
    group, within = tl.arange(0, HEIGHT), tl.arange(0, SIZE)
    e = group[:, None] * EACH + within[None, :]
    inside = (group < GROUPS)[:, None] & (within < EACH)[None, :]
    scores, _ = scores_of(LOGITS, row, E, inside, e, SCORING)
    slot = tl.arange(0, WIDTH)
    live, place = slot < SLOTS, row.to(tl.int64) * SLOTS + slot
    ids = tl.minimum(tl.maximum(tl.load(IDS + place, mask=live, other=0), 0), E - 1)
    grad = tl.load(GRAD_WEIGHTS + place, mask=live, other=0.0).to(tl.float32) * scale
    chosen = tl.zeros([WIDTH], tl.float32)
    for s in range(SLOTS):
        expert = tl.sum(tl.where(slot == s, ids, 0), 0)
        chosen = tl.where(slot == s, total(tl.where(inside & (e == expert), scores, 0.0)), chosen)
    if SCORING == SOFTMAX_OF_CHOSEN:
        powers = tl.where(live, tl.exp(chosen - tl.max(tl.where(live, chosen, LOWEST), 0)), 0.0)
        shares = powers / ascending(powers, slot, SLOTS)
        grad = shares * (grad - ascending(product(grad, shares), slot, SLOTS))
    elif NORMALIZE:
        sum_of_slots = ascending(chosen, slot, SLOTS) + LEAST_SUM
        grad = (grad - ascending(product(grad, chosen / sum_of_slots), slot, SLOTS)) / sum_of_slots
    if SCORING == SIGMOID:
        grad = grad * (chosen * (1.0 - chosen))
    out = tl.zeros([HEIGHT, SIZE], tl.float32)
    for s in range(SLOTS):
        expert = tl.sum(tl.where(slot == s, ids, 0), 0)
        out += tl.where(e == expert, tl.sum(tl.where(slot == s, grad, 0.0), 0), 0.0)
    if SCORING == SOFTMAX:
        out = scores * (out - ascending(product(grad, chosen), slot, SLOTS))
    at = row.to(tl.int64) * E + e
    if GRAD_LOGITS is not None:
        out += tl.load(GRAD_LOGITS + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + at, out.to(OUT.dtype.element_ty), mask=inside)
