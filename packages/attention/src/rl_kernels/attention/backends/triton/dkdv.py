"""The kernel of dk and dv.

A program holds BLOCK keys and values, and their dk and dv in FP32. Order of the sums, which is the contract: one chain
over the rows of the sequence, ROWS at a time, in ascending order, each added by ``tl.dot``; dk then times the scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.attention.backends.triton.backward import dscores_of, weights_of
from rl_kernels.attention.backends.triton.dq import MORE_SIZES
from rl_kernels.attention.backends.triton.loads import UNIT, keys_of, load_rows, queries_of, row_box, rows_at, within
from rl_kernels.attention.backends.triton.tiles import is_visible, product_of, scores_of
from rl_kernels.core.triton_lib.arithmetic import product

SIZES_OF_KEYS = tuple(name for name in MORE_SIZES if name not in ("pages", "table_step"))


@triton.jit
def weights_with_rows(
    k, q, r, LSES, at, full_from, full_to, used, shift, left, right, gone, length, factor, cap, rate,
    GROUP: tl.constexpr, CAPPED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return (scores, weights) of keys ``at`` and rows ``r`` to ``r + ROWS``.

    Rows from ``full_from`` to ``full_to`` see all these keys.
    """
    score = scores_of(k, tl.trans(q), cap, rate, CAPPED)
    rows = r + tl.arange(0, ROWS)
    t = rows // GROUP
    lse = tl.load(LSES + rows, mask=t < used, other=float("inf"))
    weights = weights_of(score, lse[None, :], factor)
    if (r < full_from) | (r + ROWS > full_to):
        visible = tl.trans(is_visible(t + shift, at, left, right, gone, length)) & (t < used)[None, :]
        weights = tl.where(visible, weights, 0.0)
    return score, weights


@triton.jit
def with_rows(
    dk, dv, score, weights, q, grad, v, r, DELTAS, used, cap,
    GROUP: tl.constexpr, CAPPED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return dk and dv with rows ``r`` to ``r + ROWS`` added."""
    dv = tl.dot(weights.to(grad.dtype), grad, dv, input_precision="ieee")
    dweights = product_of(v, tl.trans(grad))
    rows = r + tl.arange(0, ROWS)
    delta = tl.load(DELTAS + rows, mask=rows // GROUP < used, other=0.0)
    dscore = dscores_of(score, weights, dweights, delta[None, :], cap, CAPPED)
    return tl.dot(dscore.to(q.dtype), q, dk, input_precision="ieee"), dv


@triton.jit(do_not_specialize=SIZES_OF_KEYS)
def of_keys(
    Q, K, V, GRAD, LSES, DELTAS, DK, DV_, STARTS_Q, STARTS_K, FIRST_K, USED_Q, Q_BOX, G_BOX,
    queries, keys, tiles, left, right,
    q_batch, k_batch, k_head, v_batch, v_head, g_batch, factor, scale, cap, rate,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    Q_STEP: tl.constexpr, Q_HEAD: tl.constexpr, K_STEP: tl.constexpr, V_STEP: tl.constexpr,
    G_STEP: tl.constexpr, G_HEAD: tl.constexpr, CAPPED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    LEFT: tl.constexpr,
):  # fmt: skip
    """Write dk and dv of BLOCK keys of one sequence and head. Grid: sequences x tiles of keys, key heads.

    Tiles of ROWS rows are counted from the first query that may see a key of the sequence.
    """
    program, head = tl.program_id(0), tl.program_id(1)
    # Tiles with the most rows start first.
    batches = tl.num_programs(0) // tiles
    b, tile = program % batches, program // batches
    first_k, length, gone = keys_of(STARTS_K, FIRST_K, None, b, keys, LEFT)
    if (tile * BLOCK >= length) | (tile * BLOCK + BLOCK <= gone):
        return
    first_q, count, used = queries_of(STARTS_Q, USED_Q, b, queries)
    batch = b if STARTS_Q is None else 0 * b
    GOES_ON: tl.constexpr = STARTS_Q is not None or USED_Q is not None
    shift = length - count
    at = tile * BLOCK + tl.arange(0, BLOCK)
    key_batch = (b if STARTS_K is None else 0 * b).to(tl.int64)
    # Row of the tile's first key; offsets from it are constants.
    row, ahead = (first_k + tile * BLOCK).to(tl.int64), tl.arange(0, BLOCK).to(tl.int64)
    k_base = K + key_batch * k_batch * UNIT + row * (K_STEP * UNIT) + head.to(tl.int64) * k_head * UNIT
    v_base = V + key_batch * v_batch * UNIT + row * (V_STEP * UNIT) + head.to(tl.int64) * v_head * UNIT
    valid = at < length
    if LEFT and FIRST_K is not None:
        valid = valid & (at >= gone)
    k = load_rows(k_base, ahead * (K_STEP * UNIT), valid, D, WIDTH)
    v = load_rows(v_base, ahead * (V_STEP * UNIT), valid, DV, WIDTH_V)

    origin = tl.maximum(-shift - right, 0) * GROUP
    t_low = tl.maximum(tile * BLOCK - right - shift, 0)
    t_high = tl.minimum(tile * BLOCK + BLOCK + left - shift, used)
    begin = origin + tl.maximum(t_low * GROUP - origin, 0) // ROWS * ROWS
    # Rows full_from to full_to see all keys of the tile.
    full_from = tl.maximum(tile * BLOCK + BLOCK - 1 - right - shift, 0) * GROUP
    full_to = (tl.minimum(tile * BLOCK + left - shift, used - 1) + 1) * GROUP
    full_to = tl.where(tile * BLOCK + BLOCK <= length, full_to, 0)
    q_base = Q + batch.to(tl.int64) * q_batch * UNIT + head.to(tl.int64) * (GROUP * Q_HEAD * UNIT)
    g_base = GRAD + batch.to(tl.int64) * g_batch * UNIT + head.to(tl.int64) * (GROUP * G_HEAD * UNIT)
    place = ((batch.to(tl.int64) * KV_HEADS + head) * queries + first_q) * GROUP
    dk, dv = tl.zeros([BLOCK, WIDTH], tl.float32), tl.zeros([BLOCK, WIDTH_V], tl.float32)
    end = t_high * GROUP
    if Q_BOX is not None:
        # First the tiles that end within the sequence, then the one that does not.
        whole = tl.minimum(end, begin + tl.maximum(used * GROUP - begin, 0) // ROWS * ROWS) if GOES_ON else end
        for r in tl.range(begin, whole, ROWS):
            q = row_box(Q_BOX, r, batch, first_q, head, GROUP, WIDTH, ROWS)
            score, weights = weights_with_rows(
                k, q, r, LSES + place, at, full_from, full_to, used, shift, left, right, gone, length,
                factor, cap, rate, GROUP, CAPPED, ROWS,
            )  # fmt: skip
            grad = row_box(G_BOX, r, batch, first_q, head, GROUP, WIDTH_V, ROWS)
            dk, dv = with_rows(dk, dv, score, weights, q, grad, v, r, DELTAS + place, used, cap, GROUP, CAPPED, ROWS)
        if (whole < end) & (begin < end):
            q = within(row_box(Q_BOX, whole, batch, first_q, head, GROUP, WIDTH, ROWS), whole, used * GROUP, ROWS)
            score, weights = weights_with_rows(
                k, q, whole, LSES + place, at, full_from, full_to, used, shift, left, right, gone, length,
                factor, cap, rate, GROUP, CAPPED, ROWS,
            )  # fmt: skip
            grad = row_box(G_BOX, whole, batch, first_q, head, GROUP, WIDTH_V, ROWS)
            grad = within(grad, whole, used * GROUP, ROWS)
            dk, dv = with_rows(
                dk, dv, score, weights, q, grad, v, whole, DELTAS + place, used, cap, GROUP, CAPPED, ROWS
            )
    else:
        for r in tl.range(begin, end, ROWS):
            q = rows_at(q_base, r, first_q, used, Q_STEP, Q_HEAD, GROUP, D, WIDTH, ROWS)
            score, weights = weights_with_rows(
                k, q, r, LSES + place, at, full_from, full_to, used, shift, left, right, gone, length,
                factor, cap, rate, GROUP, CAPPED, ROWS,
            )  # fmt: skip
            grad = rows_at(g_base, r, first_q, used, G_STEP, G_HEAD, GROUP, DV, WIDTH_V, ROWS)
            dk, dv = with_rows(dk, dv, score, weights, q, grad, v, r, DELTAS + place, used, cap, GROUP, CAPPED, ROWS)
    dk = product(dk, tl.full(dk.shape, scale, tl.float32))
    place = (key_batch * keys + row) * KV_HEADS + head
    d, dd = tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    mask, mask_v = valid[:, None], valid[:, None]
    if D != WIDTH:
        mask = mask & (d < D)[None, :]
    if DV != WIDTH_V:
        mask_v = mask_v & (dd < DV)[None, :]
    out = ahead[:, None] * (KV_HEADS * D) + d[None, :]
    tl.store(DK + place * D + out, dk.to(DK.dtype.element_ty), mask=mask)
    out = ahead[:, None] * (KV_HEADS * DV) + dd[None, :]
    tl.store(DV_ + place * DV + out, dv.to(DV_.dtype.element_ty), mask=mask_v)
