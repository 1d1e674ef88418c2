"""The kernels of the backward pass: one for dq, one for dk and dv; each forms the scores again.

A sum over keys, or over rows, is one chain in ascending order, which a block that adds nothing leaves as it is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.attention.backends.triton.forward import SIZES
from rl_kernels.attention.backends.triton.tiles import (
    LOG2E,
    UNIT,
    keys_at,
    keys_of,
    loaded,
    product_of,
    queries_of,
    rows_at,
    scores_of,
    seen_from,
    seen_to,
    sees,
)
from rl_kernels.core.triton_lib.arithmetic import fma, product
from rl_kernels.core.triton_lib.softcap import slope

MORE_SIZES = (*(name for name in SIZES if name != "segments"), "g_batch")
SIZES_OF_KEYS = tuple(name for name in MORE_SIZES if name not in ("pages", "table_step"))


@triton.jit(do_not_specialize=("queries", "g_batch"))
def rows_of(
    OUT, GRAD, LSE, LSES, DELTAS, queries, g_batch,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, WIDTH_V: tl.constexpr,
    G_STEP: tl.constexpr, G_HEAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write what each row needs: ``LSES``, its lse in base 2, and ``DELTAS``, the sum of out times its gradient.

    Both are ``[B, KV_HEADS, queries, GROUP]``; an lse is inf where a row sees nothing, which makes its weights 0. Grid:
    sequences x tiles of queries x heads.
    """
    tiles = (queries * HEADS + ROWS - 1) // ROWS
    b, program = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    rows = program * ROWS + tl.arange(0, ROWS)
    t, head = rows // HEADS, rows % HEADS
    inside = t < queries
    out = loaded(OUT, ((b.to(tl.int64) * queries + t) * HEADS + head) * DV, inside, DV, WIDTH_V)
    offsets = b.to(tl.int64) * (g_batch * UNIT) + t.to(tl.int64) * (G_STEP * UNIT) + head * (G_HEAD * UNIT)
    grad = loaded(GRAD, offsets, inside, DV, WIDTH_V)
    delta = tl.sum(product(out.to(tl.float32), grad.to(tl.float32)), 1)
    lse = tl.load(LSE + (b.to(tl.int64) * HEADS + head) * queries + t, mask=inside, other=0.0)
    scaled = product(lse, tl.full(lse.shape, LOG2E, tl.float32))
    place = ((b.to(tl.int64) * (HEADS // GROUP) + head // GROUP) * queries + t) * GROUP + head % GROUP
    tl.store(LSES + place, tl.where(lse == float("-inf"), float("inf"), scaled), mask=inside)
    tl.store(DELTAS + place, delta, mask=inside)


@triton.jit
def weights_of(score, lse, factor):
    """Return ``2^(score factor - lse)``, for lse in base 2 beside score."""
    return tl.exp2(fma(score, tl.full(score.shape, factor, tl.float32), tl.broadcast_to(-lse, score.shape)))


@triton.jit
def dscores_of(score, weights, dweights, delta, cap, CAPPED: tl.constexpr):
    """Return the gradient of scores before their cap."""
    found = product(weights, dweights - delta)
    if CAPPED:
        found = product(found, slope(score, cap, 1.0 / cap))
    return found


@triton.jit(do_not_specialize=MORE_SIZES)
def of_queries(
    Q, K, V, GRAD, LSES, DELTAS, DQ, STARTS_Q, STARTS_K, FIRST_K, USED_Q, USED_K, TABLE,
    queries, keys, pages, table_step, tiles, left, right,
    q_batch, k_batch, k_head, v_batch, v_head, g_batch, factor, scale, cap, rate,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    Q_STEP: tl.constexpr, Q_HEAD: tl.constexpr, K_STEP: tl.constexpr, V_STEP: tl.constexpr,
    G_STEP: tl.constexpr, G_HEAD: tl.constexpr, PAGE: tl.constexpr, CAPPED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """Write dq of ROWS rows of one sequence and head of keys. Grid: sequences x tiles of rows, heads of keys."""
    program, head = tl.program_id(0), tl.program_id(1)
    b, tile = program // tiles, tiles - 1 - program % tiles
    first_q, count, used = queries_of(STARTS_Q, USED_Q, b, queries)
    batch = b if STARTS_Q is None else 0 * b
    if tile * ROWS >= count * GROUP:
        return
    first_k, length, gone = keys_of(STARTS_K, FIRST_K, USED_K, b, keys, LEFT)
    GONE: tl.constexpr = LEFT and FIRST_K is not None
    rows = tile * ROWS + tl.arange(0, ROWS)
    t = rows // GROUP
    shift = length - count
    t_first, t_last = tile * ROWS // GROUP, tl.minimum((tile * ROWS + ROWS - 1) // GROUP, used - 1)
    first, low_most = seen_from(t_first, shift, left, gone), seen_from(t_last, shift, left, gone)
    high_least, end = seen_to(t_first, shift, right, length), seen_to(t_last, shift, right, length)
    end = tl.where(t_first < used, end, 0)

    q_base = Q + batch.to(tl.int64) * (q_batch * UNIT) + head.to(tl.int64) * (GROUP * Q_HEAD * UNIT)
    q = rows_at(q_base, tile * ROWS, first_q, used, Q_STEP, Q_HEAD, GROUP, D, WIDTH, ROWS)
    g_base = GRAD + batch.to(tl.int64) * (g_batch * UNIT) + head.to(tl.int64) * (GROUP * G_HEAD * UNIT)
    grad = rows_at(g_base, tile * ROWS, first_q, used, G_STEP, G_HEAD, GROUP, DV, WIDTH_V, ROWS)
    place = ((batch.to(tl.int64) * KV_HEADS + head) * queries + first_q) * GROUP + rows
    lse = tl.load(LSES + place, mask=t < used, other=float("inf"))
    delta = tl.load(DELTAS + place, mask=t < used, other=0.0)
    pages_of = TABLE
    if TABLE is None:
        k_base, v_base = K + first_k.to(tl.int64) * (K_STEP * UNIT), V + first_k.to(tl.int64) * (V_STEP * UNIT)
        if STARTS_K is None:
            k_base, v_base = k_base + b.to(tl.int64) * (k_batch * UNIT), v_base + b.to(tl.int64) * (v_batch * UNIT)
    else:
        k_base, v_base, pages_of = K, V, TABLE + b.to(tl.int64) * table_step
    k_base, v_base = k_base + head.to(tl.int64) * (k_head * UNIT), v_base + head.to(tl.int64) * (v_head * UNIT)

    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for n in tl.range(first // BLOCK * BLOCK, end, BLOCK):
        at = n + tl.arange(0, BLOCK)
        k, _ = keys_at(k_base, pages_of, n, gone, length, pages, k_batch, K_STEP, D, WIDTH, PAGE, BLOCK, GONE)
        v, _ = keys_at(v_base, pages_of, n, gone, length, pages, v_batch, V_STEP, DV, WIDTH_V, PAGE, BLOCK, GONE)
        score = scores_of(q, tl.trans(k), cap, rate, CAPPED)
        weights = weights_of(score, lse[:, None], factor)
        if (n < low_most) | (n + BLOCK > high_least):
            weights = tl.where(sees(t + shift, at, left, right, gone, length), weights, 0.0)
        dweights = product_of(grad, tl.trans(v))
        dscore = dscores_of(score, weights, dweights, delta[:, None], cap, CAPPED)
        total = tl.dot(dscore.to(k.dtype), k, total, input_precision="ieee")
    total = product(total, tl.full(total.shape, scale, tl.float32))
    d = tl.arange(0, WIDTH)
    mask = (t < count)[:, None]
    if D != WIDTH:
        mask = mask & (d < D)[None, :]
    heads = head * GROUP + rows % GROUP
    out = ((batch.to(tl.int64) * queries + first_q + t) * (KV_HEADS * GROUP) + heads) * D
    tl.store(DQ + out[:, None] + d[None, :], total.to(DQ.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES_OF_KEYS)
def of_keys(
    Q, K, V, GRAD, LSES, DELTAS, DK, DV_, STARTS_Q, STARTS_K, FIRST_K, USED_Q,
    queries, keys, tiles, left, right,
    q_batch, k_batch, k_head, v_batch, v_head, g_batch, factor, scale, cap, rate,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    Q_STEP: tl.constexpr, Q_HEAD: tl.constexpr, K_STEP: tl.constexpr, V_STEP: tl.constexpr,
    G_STEP: tl.constexpr, G_HEAD: tl.constexpr, CAPPED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    LEFT: tl.constexpr,
):  # fmt: skip
    """Write dk and dv of BLOCK keys of one sequence and head. Grid: sequences x tiles of keys, heads of keys.

    Rows are taken ROWS at a time from the first query that may see a key of the sequence.
    """
    program, head = tl.program_id(0), tl.program_id(1)
    b, tile = program // tiles, program % tiles
    first_k, length, gone = keys_of(STARTS_K, FIRST_K, None, b, keys, LEFT)
    if (tile * BLOCK >= length) | (tile * BLOCK + BLOCK <= gone):
        return
    first_q, count, used = queries_of(STARTS_Q, USED_Q, b, queries)
    batch = b if STARTS_Q is None else 0 * b
    shift = length - count
    at = tile * BLOCK + tl.arange(0, BLOCK)
    of_batch = (b if STARTS_K is None else 0 * b).to(tl.int64)
    # Of the tile's first key; offsets from there are constants.
    row, ahead = (first_k + tile * BLOCK).to(tl.int64), tl.arange(0, BLOCK).to(tl.int64)
    k_base = K + of_batch * (k_batch * UNIT) + row * (K_STEP * UNIT) + head.to(tl.int64) * (k_head * UNIT)
    v_base = V + of_batch * (v_batch * UNIT) + row * (V_STEP * UNIT) + head.to(tl.int64) * (v_head * UNIT)
    known = at < length
    if LEFT and FIRST_K is not None:
        known = known & (at >= gone)
    k = loaded(k_base, ahead * (K_STEP * UNIT), known, D, WIDTH)
    v = loaded(v_base, ahead * (V_STEP * UNIT), known, DV, WIDTH_V)

    origin = tl.maximum(-shift - right, 0) * GROUP
    t_low = tl.maximum(tile * BLOCK - right - shift, 0)
    t_high = tl.minimum(tile * BLOCK + BLOCK + left - shift, used)
    begin = origin + tl.maximum(t_low * GROUP - origin, 0) // ROWS * ROWS
    # Rows from the one to the other see all keys of the tile.
    full_from = tl.maximum(tile * BLOCK + BLOCK - 1 - right - shift, 0) * GROUP
    full_to = (tl.minimum(tile * BLOCK + left - shift, used - 1) + 1) * GROUP
    whole = tile * BLOCK + BLOCK <= length
    q_base = Q + batch.to(tl.int64) * (q_batch * UNIT) + head.to(tl.int64) * (GROUP * Q_HEAD * UNIT)
    g_base = GRAD + batch.to(tl.int64) * (g_batch * UNIT) + head.to(tl.int64) * (GROUP * G_HEAD * UNIT)
    place = ((batch.to(tl.int64) * KV_HEADS + head) * queries + first_q) * GROUP
    dk, dv = tl.zeros([BLOCK, WIDTH], tl.float32), tl.zeros([BLOCK, WIDTH_V], tl.float32)
    for r in tl.range(begin, t_high * GROUP, ROWS):
        rows = r + tl.arange(0, ROWS)
        t = rows // GROUP
        q = rows_at(q_base, r, first_q, used, Q_STEP, Q_HEAD, GROUP, D, WIDTH, ROWS)
        grad = rows_at(g_base, r, first_q, used, G_STEP, G_HEAD, GROUP, DV, WIDTH_V, ROWS)
        lse = tl.load(LSES + place + rows, mask=t < used, other=float("inf"))
        delta = tl.load(DELTAS + place + rows, mask=t < used, other=0.0)
        score = scores_of(k, tl.trans(q), cap, rate, CAPPED)
        weights = weights_of(score, lse[None, :], factor)
        if (r < full_from) | (r + ROWS > full_to) | (not whole):
            seen = tl.trans(sees(t + shift, at, left, right, gone, length)) & (t < used)[None, :]
            weights = tl.where(seen, weights, 0.0)
        dv = tl.dot(weights.to(grad.dtype), grad, dv, input_precision="ieee")
        dweights = product_of(v, tl.trans(grad))
        dscore = dscores_of(score, weights, dweights, delta[None, :], cap, CAPPED)
        dk = tl.dot(dscore.to(q.dtype), q, dk, input_precision="ieee")
    dk = product(dk, tl.full(dk.shape, scale, tl.float32))
    place = (of_batch * keys + row) * KV_HEADS + head
    d, dd = tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    mask, mask_v = known[:, None], known[:, None]
    if D != WIDTH:
        mask = mask & (d < D)[None, :]
    if DV != WIDTH_V:
        mask_v = mask_v & (dd < DV)[None, :]
    out = ahead[:, None] * (KV_HEADS * D) + d[None, :]
    tl.store(DK + place * D + out, dk.to(DK.dtype.element_ty), mask=mask)
    out = ahead[:, None] * (KV_HEADS * DV) + dd[None, :]
    tl.store(DV_ + place * DV + out, dv.to(DV_.dtype.element_ty), mask=mask_v)
