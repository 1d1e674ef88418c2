"""Load keys and rows: the place of a sequence in memory, and its tiles, by TMA boxes or by pointers.

A box is the block that TMA loads at once through a descriptor of ``[B, S, Hkv, D]``: ``[1, BLOCK, 1, WIDTH]``,
with zeros beyond the tensor. A descriptor does not know where a sequence ends, so ``within`` replaces rows after its
end by zeros. All strides are multiples of 8 elements, and are passed in units of 8: a compiler that knew a larger
divisor in some calls would lay out the loads there, and perhaps the sums, differently.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.constants import KEY_SEGMENT

UNIT = tl.constexpr(8)
SEGMENT = tl.constexpr(KEY_SEGMENT)
"""Keys of a segment."""


@triton.jit
def queries_of(STARTS, USED, b, count):
    """Return (first row of q, queries, queries in use) of a sequence; ``count`` is T, or the total if packed."""
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

    ``count`` is S, the total if packed, or the capacity of its pages. With LEFT, a window that is limited on the
    left, a negative FIRST says how many keys the cache has dropped ("gone"). These must not be read. They count as
    keys, except whole segments of them, which change nothing.
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
def keys_at(
    BASE, TABLE, n, gone, length, pages, page_step,
    STEP: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    GONE: tl.constexpr,
):  # fmt: skip
    """Return keys ``n`` to ``n + BLOCK`` of one head, and a mask of the keys that exist; other keys are zeros.

    BASE points to the head, in its sequence or in the pages that TABLE names. STEP, the stride of rows, is a
    compile-time constant: an address register for each row would be too many. GONE: there may be keys that are gone.
    """
    ahead = tl.arange(0, BLOCK)
    valid = n + ahead < length
    if GONE:
        valid = valid & (ahead >= gone - n)
    # 64 bits from the start: the compiler cannot split a sum that is widened later into an address and constants.
    zero = tl.zeros((), tl.int64)
    offsets = ahead.to(tl.int64) * (STEP * UNIT)
    if TABLE is None:
        rows = BASE + (zero + n) * (STEP * UNIT)
    elif PAGE % BLOCK == 0:
        page = tl.load(TABLE + n // PAGE).to(tl.int64)
        exists = (page >= 0) & (page < pages)
        valid = valid & exists
        # A missing page reads page 0 instead; its scores become NaN.
        rows = BASE + tl.where(exists, page, 0) * ((zero + page_step) * UNIT) + (zero + n % PAGE) * (STEP * UNIT)
    else:
        page = tl.load(TABLE + (n + ahead) // PAGE, mask=valid, other=0).to(tl.int64)
        valid = valid & (page >= 0) & (page < pages)
        rows = BASE
        offsets = tl.where(valid, page, 0) * ((zero + page_step) * UNIT)
        offsets += ((n + ahead) % PAGE).to(tl.int64) * (STEP * UNIT)
    return load_rows(rows, offsets, valid, SIZE, WIDTH), valid


@triton.jit
def rows_at(
    BASE, row, first, used,
    STEP: tl.constexpr, HEAD: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Return rows ``row`` to ``row + ROWS`` of a sequence and a key head, zeros for queries that are not in use.

    BASE points to the batch and the first query head of the group. ``first`` is the sequence's first query in BASE. If
    ROWS is a multiple of GROUP, ``row`` must begin a query.
    """
    zero = tl.zeros((), tl.int64)
    ahead = tl.arange(0, ROWS)
    if ROWS % GROUP == 0:
        # Then the offsets are the same for every tile.
        place = BASE + (zero + first + row // GROUP) * (STEP * UNIT)
        t, group = ahead // GROUP, ahead % GROUP
        valid = row // GROUP + t < used
    else:
        place = BASE + (zero + first) * (STEP * UNIT)
        t, group = (row + ahead) // GROUP, (row + ahead) % GROUP
        valid = t < used
    return load_rows(place, t.to(tl.int64) * (STEP * UNIT) + group.to(tl.int64) * (HEAD * UNIT), valid, SIZE, WIDTH)


@triton.jit
def load_rows(BASE, offsets, valid, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Load rows, zeros where ``valid`` is false; WIDTH is SIZE, or the next power of two."""
    d = tl.arange(0, WIDTH)
    mask = valid[:, None]
    if SIZE != WIDTH:
        mask = mask & (d < SIZE)[None, :]
    return tl.load(BASE + (offsets[:, None] + d.to(tl.int64)[None, :]), mask=mask, other=0.0)


@triton.jit
def key_box(BOX, TABLE, n, b, row, head, pages, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Return (keys ``n`` to ``n + BLOCK`` of one head, whether their page is missing).

    BOX describes the keys, where ``row`` is the sequence's first in batch ``b``; or with TABLE the pages, whose size is
    a multiple of BLOCK. A missing page reads page 0 instead.
    """
    missing = False
    if TABLE is None:
        tile = BOX.load([b, row + n, head, 0])
    else:
        page = tl.load(TABLE + n // PAGE).to(tl.int64)
        missing = (page < 0) | (page >= pages)
        tile = BOX.load([tl.where(missing, 0, page).to(tl.int32), n % PAGE, head, 0])
    return tl.reshape(tile, [BLOCK, WIDTH]), missing


@triton.jit
def row_box(BOX, row, b, first, head, GROUP: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Return rows ``row`` to ``row + ROWS`` of a sequence and a key head; ROWS is a multiple of GROUP."""
    tile = BOX.load([b, first + row // GROUP, head * GROUP, 0])
    return tl.reshape(tile, [ROWS, WIDTH])


@triton.jit
def within(tile, first, count, SIZE: tl.constexpr):
    """Return a tile whose rows begin at ``first``, zeros from row ``count`` on."""
    return tl.where((first + tl.arange(0, SIZE) < count)[:, None], tile, 0.0)
