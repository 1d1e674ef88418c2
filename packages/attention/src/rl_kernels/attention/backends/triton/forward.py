"""The kernels of the forward pass: ``attend``, and ``finish``, which merges segments if keys are split over programs.

A program holds the state of ROWS rows (``tiles``) and walks over keys in blocks of BLOCK. Order of the sums, which is
the contract (``backend``), with and without SPLIT: blocks in ascending order within a segment of 1024 keys; segments,
each with a state of its own, are merged in ascending order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.attention.backends.triton.loads import SEGMENT, UNIT, keys_of, queries_of, rows_at
from rl_kernels.attention.backends.triton.tiles import (
    empty_state,
    end_visible,
    finish_rows,
    first_visible,
    merge_states,
    segment_of,
)

SIZES = (
    *("queries", "keys", "pages", "table_step", "tiles", "segments", "left", "right"),
    *("q_batch", "k_batch", "k_head", "v_batch", "v_head"),
)
"""Parameters of ``attend`` that Triton must not specialize on."""


@triton.jit
def put(OUT, LSE, out, lse, b, row, heads, d, inside, queries, HEADS: tl.constexpr, DV: tl.constexpr):
    """Write columns d of rows of ``out[B, queries, H, DV]``, and rows of ``lse[B, H, queries]`` unless it is None."""
    place = (b.to(tl.int64) * queries + row) * HEADS + heads
    tl.store(
        OUT + place[:, None] * DV + d[None, :], out.to(OUT.dtype.element_ty), mask=inside[:, None] & (d < DV)[None, :]
    )
    if LSE is not None:
        tl.store(LSE + (b.to(tl.int64) * HEADS + heads) * queries + row, lse, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def attend(
    Q, K, V, OUT, LSE, SINKS, STARTS_Q, STARTS_K, FIRST_K, USED_Q, USED_K, TABLE, K_BOX, V_BOX,
    TOPS, TOTALS, ACCS, queries, keys, pages, table_step, tiles, segments, left, right,
    q_batch, k_batch, k_head, v_batch, v_head, factor, cap, rate,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    Q_STEP: tl.constexpr, Q_HEAD: tl.constexpr, K_STEP: tl.constexpr, V_STEP: tl.constexpr,
    PAGE: tl.constexpr, CAPPED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LEFT: tl.constexpr, SPLIT: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Write attention of ROWS rows of one sequence and key head; K_BOX and V_BOX describe K and V, or are None.

    Grid: sequences x tiles of rows (x segments, with SPLIT), key heads. With SPLIT a program takes one segment, and
    writes its state to ``TOPS, TOTALS[B, KV_HEADS, tiles, segments, ROWS]`` and ``ACCS[..., WIDTH_V]``. ONE: no
    sequence has more than one segment, so nothing is merged.
    """
    program, head = tl.program_id(0), tl.program_id(1)
    part = 0
    if SPLIT:
        part, program = program % segments, program // segments
    # Tiles with the most keys start first.
    batches = tl.num_programs(0) // (tiles * segments if SPLIT else tiles)
    b, tile = program % batches, tiles - 1 - program // batches
    first_q, count, used = queries_of(STARTS_Q, USED_Q, b, queries)
    batch = b if STARTS_Q is None else 0 * b
    if tile * ROWS >= count * GROUP:
        return
    first_k, length, gone = keys_of(STARTS_K, FIRST_K, USED_K, b, keys, LEFT)
    GONE: tl.constexpr = LEFT and FIRST_K is not None
    GOES_ON: tl.constexpr = STARTS_K is not None or USED_K is not None
    rows = tile * ROWS + tl.arange(0, ROWS)
    t = rows // GROUP
    heads = head * GROUP + rows % GROUP
    shift = length - count
    position = t + shift
    t_first, t_last = tile * ROWS // GROUP, tl.minimum((tile * ROWS + ROWS - 1) // GROUP, used - 1)
    first, low_most = first_visible(t_first, shift, left, gone), first_visible(t_last, shift, left, gone)
    high_least, end = end_visible(t_first, shift, right, length), end_visible(t_last, shift, right, length)
    # A tile without a query in use sees no key.
    end = tl.where(t_first < used, end, 0)

    q_base = Q + batch.to(tl.int64) * q_batch * UNIT + head.to(tl.int64) * (GROUP * Q_HEAD * UNIT)
    q = rows_at(q_base, tile * ROWS, first_q, used, Q_STEP, Q_HEAD, GROUP, D, WIDTH, ROWS)
    pages_of, box_b = TABLE, 0 * b
    if TABLE is None:
        k_base, v_base = K + first_k.to(tl.int64) * (K_STEP * UNIT), V + first_k.to(tl.int64) * (V_STEP * UNIT)
        if STARTS_K is None:
            box_b = b
            k_base, v_base = k_base + b.to(tl.int64) * k_batch * UNIT, v_base + b.to(tl.int64) * v_batch * UNIT
    else:
        k_base, v_base, pages_of = K, V, TABLE + b.to(tl.int64) * table_step
    k_base, v_base = k_base + head.to(tl.int64) * k_head * UNIT, v_base + head.to(tl.int64) * v_head * UNIT

    first = first // BLOCK * BLOCK
    if SPLIT:
        segment = part * SEGMENT
        begin, stop = tl.maximum(first, segment), tl.minimum(end, segment + SEGMENT)
        top, total, acc = segment_of(
            q, k_base, v_base, K_BOX, V_BOX, pages_of, position, left, right, low_most, high_least, begin, stop,
            gone, length, pages, box_b, first_k, head, k_batch, v_batch, factor, cap, rate,
            D, DV, WIDTH, WIDTH_V, K_STEP, V_STEP, PAGE, CAPPED, ROWS, BLOCK, GONE, GOES_ON,
        )  # fmt: skip
        state = (((b.to(tl.int64) * KV_HEADS + head) * tiles + tile) * segments + part) * ROWS + tl.arange(0, ROWS)
        has_row = t < count
        tl.store(TOPS + state, top, mask=has_row)
        tl.store(TOTALS + state, total, mask=has_row)
        tl.store(ACCS + state[:, None] * WIDTH_V + tl.arange(0, WIDTH_V)[None, :], acc, mask=has_row[:, None])
    else:
        if ONE:
            top, total, acc = segment_of(
                q, k_base, v_base, K_BOX, V_BOX, pages_of, position, left, right, low_most, high_least,
                first, end, gone, length, pages, box_b, first_k, head, k_batch, v_batch, factor, cap, rate,
                D, DV, WIDTH, WIDTH_V, K_STEP, V_STEP, PAGE, CAPPED, ROWS, BLOCK, GONE, GOES_ON,
            )  # fmt: skip
        else:
            top, total, acc = empty_state(ROWS, WIDTH_V)
            for segment in range(first // SEGMENT * SEGMENT, end, SEGMENT):
                begin, stop = tl.maximum(first, segment), tl.minimum(end, segment + SEGMENT)
                other_top, other_total, other_acc = segment_of(
                    q, k_base, v_base, K_BOX, V_BOX, pages_of, position, left, right, low_most, high_least,
                    begin, stop, gone, length, pages, box_b, first_k, head, k_batch, v_batch, factor, cap, rate,
                    D, DV, WIDTH, WIDTH_V, K_STEP, V_STEP, PAGE, CAPPED, ROWS, BLOCK, GONE, GOES_ON,
                )  # fmt: skip
                top, total, acc = merge_states(top, total, acc, other_top, other_total, other_acc)
        out, lse = finish_rows(top, total, acc, SINKS, heads)
        out, lse = tl.where((t < used)[:, None], out, 0.0), tl.where(t < used, lse, float("-inf"))
        d = tl.arange(0, WIDTH_V)
        put(OUT, LSE, out, lse, batch, first_q + t, heads, d, t < count, queries, KV_HEADS * GROUP, DV)


@triton.jit(do_not_specialize=("queries", "keys", "tiles", "segments"))
def finish(
    OUT, LSE, SINKS, STARTS_Q, STARTS_K, FIRST_K, USED_Q, USED_K, TOPS, TOTALS, ACCS,
    queries, keys, tiles, segments,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, WIDTH_V: tl.constexpr,
    ROWS: tl.constexpr, LEFT: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Merge the states that ``attend`` wrote, in ascending order, for PART rows and COLUMNS columns.

    Grid: sequences x tiles of rows x parts of them x parts of the columns, key heads. AHEAD states are loaded at once,
    so that their latencies overlap.
    """
    program, head = tl.program_id(0), tl.program_id(1)
    column, program = program % (WIDTH_V // COLUMNS) * COLUMNS, program // (WIDTH_V // COLUMNS)
    part, program = program % (ROWS // PART) * PART, program // (ROWS // PART)
    b, tile = program // tiles, program % tiles
    first_q, count, used = queries_of(STARTS_Q, USED_Q, b, queries)
    batch = b if STARTS_Q is None else 0 * b
    if tile * ROWS + part >= count * GROUP:
        return
    _, length, _ = keys_of(STARTS_K, FIRST_K, USED_K, b, keys, LEFT)
    rows = tile * ROWS + part + tl.arange(0, PART)
    t = rows // GROUP
    heads = head * GROUP + rows % GROUP
    d = column + tl.arange(0, COLUMNS)
    state = ((b.to(tl.int64) * KV_HEADS + head) * tiles + tile) * segments * ROWS + part + tl.arange(0, PART)
    top, total, acc = empty_state(PART, COLUMNS)
    # Never more than were written, even if the maximum length was given too small and not validated.
    stop = tl.minimum(length, segments * SEGMENT)
    for first in range(0, stop, SEGMENT * AHEAD):
        for step in tl.static_range(AHEAD):
            at = tl.zeros([PART], tl.int32) + first + step * SEGMENT
            has_state = (at < stop) & (t < count)
            other_top = tl.load(TOPS + state, mask=has_state, other=float("-inf"))
            other_total = tl.load(TOTALS + state, mask=has_state, other=0.0)
            place = ACCS + state[:, None] * WIDTH_V + d[None, :]
            other_acc = tl.load(place, mask=has_state[:, None], other=0.0)
            top, total, acc = merge_states(top, total, acc, other_top, other_total, other_acc)
            state += ROWS
    out, lse = finish_rows(top, total, acc, SINKS, heads)
    out, lse = tl.where((t < used)[:, None], out, 0.0), tl.where(t < used, lse, float("-inf"))
    put(OUT, LSE, out, lse, batch, first_q + t, heads, d, t < count, queries, KV_HEADS * GROUP, DV)
