"""Functions shared by the attention kernels: the keys that a row sees, and the softmax state of some keys.

A row is one query in one of the GROUP query heads that share a key head: row ``t GROUP + g`` of a sequence. Keys are
counted from the first of their sequence. A state is (top, total, acc): the largest score in base 2, the sum of
``2^(score - top)``, and the sum of those powers times the values. Order of the sums: within a block of keys the tree of
``row_sum`` for total and ``tl.dot`` for acc; blocks in ascending order. Roundings are explicit (``fma``, ``product``),
so that no compiler may fuse in one kernel and not in another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.attention.backends.triton.loads import key_box, keys_at, within
from rl_kernels.core.triton_lib.arithmetic import fma, product
from rl_kernels.core.triton_lib.softcap import capped

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def first_visible(t, shift, left, gone):
    """Return the first key that query t sees; ``shift`` is the position of query 0."""
    return tl.maximum(t + shift - left, gone)


@triton.jit
def end_visible(t, shift, right, length):
    """Return the end of the keys that query t sees: one after the last."""
    return tl.minimum(tl.maximum(t + shift + right + 1, 0), length)


@triton.jit
def is_visible(position, at, left, right, gone, length):
    """Return a mask of the keys ``at`` that the queries at ``position`` see; two bounds per row take more registers."""
    ahead = at[None, :] - position[:, None]
    return (ahead >= -left) & (ahead <= right) & ((at >= gone) & (at < length))[None, :]


@triton.jit
def product_of(a, b):
    """Return ``a @ b``; FP32 operands are multiplied in IEEE FP32, not TF32."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def scores_of(q, k, cap, rate, CAPPED: tl.constexpr):
    """Return ``q @ k``, with CAPPED after the soft cap."""
    score = product_of(q, k)
    if CAPPED:
        score = capped(score, cap, rate)
    return score


@triton.jit
def row_sum(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the sum of each row by a tree: neighbors are added first, then in each step the two halves of the rest.

    Every step adds just two numbers, so their order does not matter: the bits do not depend on the number of warps or
    on the layout of the tile. Of a product, one thread holds neighbors, and then both halves.
    """
    x = tl.sum(tl.reshape(x, [ROWS, COLUMNS // 2, 2]), 2)
    HALVINGS: tl.constexpr = (COLUMNS // 2).bit_length() - 1
    for step in tl.static_range(HALVINGS):
        x = tl.sum(tl.reshape(x, [ROWS, 2, COLUMNS // (4 << step)]), 1)
    return tl.reshape(x, [ROWS])


@triton.jit
def empty_state(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the state of an empty set of keys."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    return top, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)


@triton.jit
def finite(top):
    """Return top, with 0 in place of -inf for rows that see no key."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def merge_states(top, total, acc, other_top, other_total, other_acc):
    """Merge the states of two ranges of keys; the second range follows the first."""
    new_top = tl.maximum(top, other_top)
    base = finite(new_top)
    a, b = tl.exp2(top - base), tl.exp2(other_top - base)
    total = fma(total, a, product(other_total, b))
    factor = tl.broadcast_to(a[:, None], acc.shape)
    acc = fma(acc, factor, product(other_acc, tl.broadcast_to(b[:, None], acc.shape)))
    return new_top, total, acc


@triton.jit
def finish_rows(top, total, acc, SINKS, heads):
    """Return (out, lse) of rows from the state of all their keys, and add the sink to the total."""
    if SINKS is not None:
        sink = product(tl.load(SINKS + heads).to(tl.float32), tl.full(top.shape, LOG2E, tl.float32))
        new_top = tl.maximum(top, sink)
        base = finite(new_top)
        old_scale = tl.exp2(top - base)
        total = fma(total, old_scale, tl.exp2(sink - base))
        acc = product(acc, tl.broadcast_to(old_scale[:, None], acc.shape))
        top = new_top
    has_keys = total > 0
    # Not a product with the inverse, which is infinite if the total is far below 1.
    out = tl.where(has_keys[:, None], acc / tl.where(has_keys, total, 1.0)[:, None], 0.0)
    # NaN > 0 is false, but NaN must not become 0.
    out = tl.where((total != total)[:, None], total[:, None], out)
    lse = product(top + tl.log2(tl.where(has_keys, total, 1.0)), tl.full(top.shape, LN2, tl.float32))
    return out, tl.where(total == 0, float("-inf"), tl.where(total != total, total, lse))


@triton.jit
def mask_scores(score, n, missing, position, left, right, low_most, high_least, gone, length, BLOCK: tl.constexpr):
    """Mask the scores of the block at ``n``: -inf where a row does not see a key, NaN where its page is missing.

    All rows see keys ``low_most`` to ``high_least``, so blocks within these need no mask.
    """
    if (n < low_most) | (n + BLOCK > high_least) | missing:
        at = n + tl.arange(0, BLOCK)
        score = tl.where(missing, float("nan"), score)
        score = tl.where(is_visible(position, at, left, right, gone, length), score, float("-inf"))
    return score


@triton.jit
def rescale_state(score, top, total, acc, factor, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the state with a block of scores, and the block's weights, whose values ``accumulate`` adds to acc."""
    new_top = tl.maximum(top, product(tl.max(score, 1), tl.full(top.shape, factor, tl.float32)))
    base = finite(new_top)
    shift = tl.broadcast_to(-base[:, None], score.shape)
    weights = tl.exp2(fma(score, tl.full(score.shape, factor, tl.float32), shift))
    old_scale = tl.exp2(top - base)
    total = fma(total, old_scale, row_sum(weights, ROWS, BLOCK))
    acc = product(acc, tl.broadcast_to(old_scale[:, None], acc.shape))
    return new_top, total, acc, weights


@triton.jit
def accumulate(acc, weights, v):
    """Return ``acc + weights @ v``."""
    return tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")


@triton.jit
def segment_of(
    q, K, V, K_BOX, V_BOX, TABLE, position, left, right, low_most, high_least, first, end, gone, length, pages,
    box_b, box_row, head, k_page, v_page, factor, cap, rate,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    K_STEP: tl.constexpr, V_STEP: tl.constexpr, PAGE: tl.constexpr, CAPPED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, GONE: tl.constexpr, GOES_ON: tl.constexpr,
):  # fmt: skip
    """Return the state of keys ``first``, where a block begins, to ``end``, all within one segment.

    Rows stand at ``position`` among the keys. GOES_ON: memory may hold other data after the last key of a sequence.
    """
    top, total, acc = empty_state(ROWS, WIDTH_V)
    if K_BOX is not None:
        # First the blocks that end within the sequence, then the one that does not.
        whole = tl.minimum(end, length // BLOCK * BLOCK) if GOES_ON else end
        for n in tl.range(first, whole, BLOCK):
            k, missing = key_box(K_BOX, TABLE, n, box_b, box_row, head, pages, WIDTH, PAGE, BLOCK)
            score = scores_of(q, tl.trans(k), cap, rate, CAPPED)
            score = mask_scores(score, n, missing, position, left, right, low_most, high_least, gone, length, BLOCK)
            top, total, acc, weights = rescale_state(score, top, total, acc, factor, ROWS, BLOCK)
            # Not earlier: so the values arrive while the weights are computed.
            v, _ = key_box(V_BOX, TABLE, n, box_b, box_row, head, pages, WIDTH_V, PAGE, BLOCK)
            acc = accumulate(acc, weights, v)
        if (whole < end) & (first < end):
            k, missing = key_box(K_BOX, TABLE, whole, box_b, box_row, head, pages, WIDTH, PAGE, BLOCK)
            score = scores_of(q, tl.trans(k), cap, rate, CAPPED)
            score = mask_scores(score, whole, missing, position, left, right, low_most, high_least, gone, length, BLOCK)
            top, total, acc, weights = rescale_state(score, top, total, acc, factor, ROWS, BLOCK)
            v, _ = key_box(V_BOX, TABLE, whole, box_b, box_row, head, pages, WIDTH_V, PAGE, BLOCK)
            acc = accumulate(acc, weights, within(v, whole, length, BLOCK))
    else:
        for n in tl.range(first, end, BLOCK):
            k, valid = keys_at(K, TABLE, n, gone, length, pages, k_page, K_STEP, D, WIDTH, PAGE, BLOCK, GONE)
            score = scores_of(q, tl.trans(k), cap, rate, CAPPED)
            if TABLE is not None:
                at = n + tl.arange(0, BLOCK)
                score = tl.where(valid[None, :] | (at >= length)[None, :], score, float("nan"))
            score = mask_scores(score, n, False, position, left, right, low_most, high_least, gone, length, BLOCK)
            top, total, acc, weights = rescale_state(score, top, total, acc, factor, ROWS, BLOCK)
            v, _ = keys_at(V, TABLE, n, gone, length, pages, v_page, V_STEP, DV, WIDTH_V, PAGE, BLOCK, GONE)
            acc = accumulate(acc, weights, v)
    return top, total, acc
