"""What all kernels of attention share: where a sequence lies, what a row sees, and the state of a stretch of keys.

A row is a query and one of the heads that share a head of keys: row ``t GROUP + g`` of a sequence. Keys are counted
from the first of their sequence. A state is (top, total, acc): the largest score in base 2, the sum of
``2^(score - top)``, and that of its products with the values. The arithmetic is explicit, so that no compiler may fuse
it one way in one kernel and another in the next. Strides come in units of 8 elements, of which all are multiples: a
compiler that knew more of some call would lay out its loads, and perhaps its sums, in another way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib.arithmetic import fma, product
from rl_kernels.core.triton_lib.softcap import capped

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
UNIT = tl.constexpr(8)
SEGMENT = tl.constexpr(1024)
"""Keys of a segment."""


@triton.jit
def queries_of(STARTS, USED, b, count):
    """Return (first row of q, queries, queries in use) of a sequence; ``count`` is T, or the total where packed."""
    first = tl.full((), 0, tl.int32)
    if STARTS is not None:
        start = tl.minimum(tl.maximum(tl.load(STARTS + b).to(tl.int64), 0), count).to(tl.int32)
        end = tl.minimum(tl.maximum(tl.load(STARTS + b + 1).to(tl.int64), start), count).to(tl.int32)
        first, count = start, end - start
    used = count
    if USED is not None:
        used = tl.minimum(tl.maximum(tl.load(USED + b).to(tl.int64), 0), count).to(tl.int32)
    return first, count, used


@triton.jit
def keys_of(STARTS, FIRST, USED, b, count, LEFT: tl.constexpr):
    """Return (row of k of key 0, keys, keys that are gone) of a sequence.

    ``count`` is S, the total where packed, or the room in its pages. Where a window ends on the left, LEFT, the first
    keys may be gone: they are counted but for whole segments, which change nothing, and must not be read.
    """
    gone = tl.full((), 0, tl.int32)
    if STARTS is not None:
        first = tl.minimum(tl.maximum(tl.load(STARTS + b).to(tl.int64), 0), count).to(tl.int32)
        end = tl.minimum(tl.maximum(tl.load(STARTS + b + 1).to(tl.int64), first), count).to(tl.int32)
    else:
        first, end = tl.full((), 0, tl.int32), count
        if USED is not None:
            end = tl.minimum(tl.maximum(tl.load(USED + b).to(tl.int64), 0), count).to(tl.int32)
        if FIRST is not None:
            start = tl.load(FIRST + b).to(tl.int64)
            first = tl.minimum(tl.maximum(start, 0), end).to(tl.int32)
            if LEFT:
                gone = (tl.maximum(-start, 0) % SEGMENT).to(tl.int32)
                first -= gone
    return first, end - first, gone


@triton.jit
def seen_from(t, shift, left, gone):
    """Return the first key that query t sees; ``shift`` is the position of query 0."""
    return tl.maximum(t + shift - left, gone)


@triton.jit
def seen_to(t, shift, right, length):
    """Return the key behind the last that query t sees."""
    return tl.minimum(tl.maximum(t + shift + right + 1, 0), length)


@triton.jit
def sees(position, at, left, right, gone, length):
    """Say which keys ``at`` the queries at ``position`` see: differences, or each row would hold its two ends."""
    ahead = at[None, :] - position[:, None]
    return (ahead >= -left) & (ahead <= right) & ((at >= gone) & (at < length))[None, :]


@triton.jit
def keys_at(
    BASE, TABLE, n, gone, length, pages, page_step,
    STEP: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    GONE: tl.constexpr,
):  # fmt: skip
    """Return (keys ``n`` to ``n + BLOCK`` of one head, which of them exist): zeros where there is none.

    BASE is that of the head, in its sequence or in the pages that TABLE names. STEP, between rows, is known when it
    compiles: a register for each row's address would be too many. GONE says that there may be keys that are gone.
    """
    ahead = tl.arange(0, BLOCK)
    known = n + ahead < length
    if GONE:
        known = known & (ahead >= gone - n)
    # Of 64 bits from the start: a sum that is widened afterwards cannot be taken apart into an address and constants.
    zero = tl.zeros((), tl.int64)
    offsets = ahead.to(tl.int64) * (STEP * UNIT)
    if TABLE is None:
        rows = BASE + (zero + n) * (STEP * UNIT)
    elif PAGE % BLOCK == 0:
        page = tl.load(TABLE + n // PAGE).to(tl.int64)
        exists = (page >= 0) & (page < pages)
        known = known & exists
        # A page that does not exist is read where the first is, and its scores are NaN.
        rows = BASE + tl.where(exists, page, 0) * (page_step * UNIT) + (n % PAGE) * (STEP * UNIT)
    else:
        page = tl.load(TABLE + (n + ahead) // PAGE, mask=known, other=0).to(tl.int64)
        known = known & (page >= 0) & (page < pages)
        rows = BASE
        offsets = tl.where(known, page, 0) * (page_step * UNIT) + (n + ahead) % PAGE * (STEP * UNIT)
    return loaded(rows, offsets, known, SIZE, WIDTH), known


@triton.jit
def rows_at(
    BASE, row, first, used,
    STEP: tl.constexpr, HEAD: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Return rows ``row`` to ``row + ROWS`` of a sequence and a head of keys, zeros where none is in use.

    BASE is that of the sequence and the first query head of the group; ``row`` begins a query where ROWS is a multiple
    of GROUP. ``first`` is the sequence's first query in BASE.
    """
    zero = tl.zeros((), tl.int64)
    ahead = tl.arange(0, ROWS)
    if ROWS % GROUP == 0:
        # Then the offsets are the same for every tile.
        place = BASE + (zero + first + row // GROUP) * (STEP * UNIT)
        t, group = ahead // GROUP, ahead % GROUP
        known = row // GROUP + t < used
    else:
        place = BASE + (zero + first) * (STEP * UNIT)
        t, group = (row + ahead) // GROUP, (row + ahead) % GROUP
        known = t < used
    return loaded(place, t.to(tl.int64) * (STEP * UNIT) + group * (HEAD * UNIT), known, SIZE, WIDTH)


@triton.jit
def loaded(BASE, offsets, known, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Load rows, zeros where none is; WIDTH is SIZE, or the power of two beyond it."""
    d = tl.arange(0, WIDTH)
    mask = known[:, None]
    if SIZE != WIDTH:
        mask = mask & (d < SIZE)[None, :]
    return tl.load(BASE + (offsets[:, None] + d.to(tl.int64)[None, :]), mask=mask, other=0.0)


@triton.jit
def product_of(a, b):
    """Return ``a @ b``; FP32 operands are multiplied as IEEE has it."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def scores_of(q, k, cap, rate, CAPPED: tl.constexpr):
    """Return raw scores, capped if there is a cap."""
    score = product_of(q, k)
    if CAPPED:
        score = capped(score, cap, rate)
    return score


@triton.jit
def row_sum(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the sum of each row as a tree: neighbours first, then always the two halves of what is left.

    Every step adds two numbers, which have no order: however many warps a tile has, and whichever instruction it came
    from, the bits are the same. Neighbours, and then the halves, are what a thread holds of a product.
    """
    x = tl.sum(tl.reshape(x, [ROWS, COLUMNS // 2, 2]), 2)
    HALVINGS: tl.constexpr = (COLUMNS // 2).bit_length() - 1
    for step in tl.static_range(HALVINGS):
        x = tl.sum(tl.reshape(x, [ROWS, 2, COLUMNS // (4 << step)]), 1)
    return tl.reshape(x, [ROWS])


@triton.jit
def nothing(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the state of no keys."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    return top, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)


@triton.jit
def finite(top):
    """Return a stand-in of 0 for the maximum of a row that has seen nothing."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def merged(top, total, acc, other_top, other_total, other_acc):
    """Return the state of two stretches of keys, the second behind the first."""
    above = tl.maximum(top, other_top)
    base = finite(above)
    a, b = tl.exp2(top - base), tl.exp2(other_top - base)
    total = fma(total, a, product(other_total, b))
    factor = tl.broadcast_to(a[:, None], acc.shape)
    acc = fma(acc, factor, product(other_acc, tl.broadcast_to(b[:, None], acc.shape)))
    return above, total, acc


@triton.jit
def finished(top, total, acc, SINKS, heads):
    """Return (out, lse) of whole rows; the sink joins here."""
    if SINKS is not None:
        sink = product(tl.load(SINKS + heads).to(tl.float32), tl.full(top.shape, LOG2E, tl.float32))
        above = tl.maximum(top, sink)
        keep = tl.exp2(top - above)
        total = fma(total, keep, tl.exp2(sink - above))
        acc = product(acc, tl.broadcast_to(keep[:, None], acc.shape))
        top = above
    some = total > 0
    # Not a product with the inverse: of sums far below 1 that is infinite.
    out = tl.where(some[:, None], acc / tl.where(some, total, 1.0)[:, None], 0.0)
    # NaN is no number above 0, and must not become 0.
    out = tl.where((total != total)[:, None], total[:, None], out)
    lse = product(top + tl.log2(tl.where(some, total, 1.0)), tl.full(top.shape, LN2, tl.float32))
    return out, tl.where(total == 0, float("-inf"), tl.where(total != total, total, lse))


@triton.jit
def segment_of(
    q, K, V, TABLE, position, left, right, low_most, high_least, first, end, gone, length, pages, k_page, v_page,
    factor, cap, rate,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    K_STEP: tl.constexpr, V_STEP: tl.constexpr, PAGE: tl.constexpr, CAPPED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, GONE: tl.constexpr,
):  # fmt: skip
    """Return the state of the keys from ``first``, where a block begins, to ``end``, within one segment.

    Rows stand at ``position`` among the keys. All of them see those from ``low_most`` to ``high_least``: blocks of
    these alone need no mask.
    """
    top, total, acc = nothing(ROWS, WIDTH_V)
    for n in tl.range(first, end, BLOCK):
        k, known = keys_at(K, TABLE, n, gone, length, pages, k_page, K_STEP, D, WIDTH, PAGE, BLOCK, GONE)
        score = scores_of(q, tl.trans(k), cap, rate, CAPPED)
        at = n + tl.arange(0, BLOCK)
        if TABLE is not None:
            score = tl.where(known[None, :] | (at >= length)[None, :], score, float("nan"))
        if (n < low_most) | (n + BLOCK > high_least):
            score = tl.where(sees(position, at, left, right, gone, length), score, float("-inf"))
        above = tl.maximum(top, product(tl.max(score, 1), tl.full(top.shape, factor, tl.float32)))
        base = finite(above)
        shift = tl.broadcast_to(-base[:, None], score.shape)
        weights = tl.exp2(fma(score, tl.full(score.shape, factor, tl.float32), shift))
        keep = tl.exp2(top - base)
        total = fma(total, keep, row_sum(weights, ROWS, BLOCK))
        acc = product(acc, tl.broadcast_to(keep[:, None], acc.shape))
        v, known = keys_at(V, TABLE, n, gone, length, pages, v_page, V_STEP, DV, WIDTH_V, PAGE, BLOCK, GONE)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        top = above
    return top, total, acc
