"""How keys and rows come from memory: where a sequence lies, and tiles of it, in boxes or by pointers.

A box is what Hopper's copy engine brings at once through a descriptor of ``[B, S, Hkv, D]``: ``[1, BLOCK, 1, WIDTH]``
of it, zeros beyond its sizes. It knows no sequences: where one ends, and memory goes on, ``within`` puts zeros in the
place of what follows. Strides come in units of 8 elements, of which all are multiples: a compiler that knew more of
some call would lay out its loads, and perhaps its sums, in another way.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
def key_box(BOX, TABLE, n, b, row, head, pages, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Return (keys ``n`` to ``n + BLOCK`` of one head, whether their page is missing).

    BOX describes the keys, ``row`` is that of the sequence's first in batch ``b``; or it describes the pages that TABLE
    names, each of a multiple of BLOCK. A page that is missing is read where the first is.
    """
    missing = False
    if TABLE is None:
        found = BOX.load([b, row + n, head, 0])
    else:
        page = tl.load(TABLE + n // PAGE).to(tl.int64)
        missing = (page < 0) | (page >= pages)
        found = BOX.load([tl.where(missing, 0, page).to(tl.int32), n % PAGE, head, 0])
    return tl.reshape(found, [BLOCK, WIDTH]), missing


@triton.jit
def row_box(BOX, row, b, first, head, GROUP: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Return rows ``row`` to ``row + ROWS`` of a sequence and a head of keys; ROWS is a multiple of GROUP."""
    found = BOX.load([b, first + row // GROUP, head * GROUP, 0])
    return tl.reshape(found, [ROWS, WIDTH])


@triton.jit
def within(tile, first, count, SIZE: tl.constexpr):
    """Return a tile whose rows begin at ``first``, zeros from row ``count`` on."""
    return tl.where((first + tl.arange(0, SIZE) < count)[:, None], tile, 0.0)
