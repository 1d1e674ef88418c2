"""The kernel of dq.

A program holds ROWS rows of q, of the gradient and of dq in FP32. Order of the sum, which is the contract: one chain
over blocks of BLOCK keys in ascending order, each added by ``tl.dot``; then times the scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.attention.backends.triton.backward import dscores_of, weights_of
from rl_kernels.attention.backends.triton.forward import SIZES
from rl_kernels.attention.backends.triton.loads import UNIT, key_box, keys_at, keys_of, queries_of, rows_at, within
from rl_kernels.attention.backends.triton.tiles import end_visible, first_visible, is_visible, product_of, scores_of
from rl_kernels.core.triton_lib.arithmetic import product

MORE_SIZES = (*(name for name in SIZES if name != "segments"), "g_batch")


@triton.jit
def weights_with_keys(
    q, k, n, lse, position, left, right, low_most, high_least, gone, length, factor, cap, rate,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return (scores, weights) of rows with the block of keys that begins at ``n``."""
    score = scores_of(q, tl.trans(k), cap, rate, CAPPED)
    weights = weights_of(score, lse[:, None], factor)
    if (n < low_most) | (n + BLOCK > high_least):
        at = n + tl.arange(0, BLOCK)
        weights = tl.where(is_visible(position, at, left, right, gone, length), weights, 0.0)
    return score, weights


@triton.jit
def with_keys(total, score, weights, grad, delta, k, v, cap, CAPPED: tl.constexpr):
    """Return ``total``, dq before the scale, with a block of keys added."""
    dweights = product_of(grad, tl.trans(v))
    dscore = dscores_of(score, weights, dweights, delta[:, None], cap, CAPPED)
    return tl.dot(dscore.to(k.dtype), k, total, input_precision="ieee")


@triton.jit(do_not_specialize=MORE_SIZES)
def of_queries(
    Q, K, V, GRAD, LSES, DELTAS, DQ, STARTS_Q, STARTS_K, FIRST_K, USED_Q, USED_K, TABLE, K_BOX, V_BOX,
    queries, keys, pages, table_step, tiles, left, right,
    q_batch, k_batch, k_head, v_batch, v_head, g_batch, factor, scale, cap, rate,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    Q_STEP: tl.constexpr, Q_HEAD: tl.constexpr, K_STEP: tl.constexpr, V_STEP: tl.constexpr,
    G_STEP: tl.constexpr, G_HEAD: tl.constexpr, PAGE: tl.constexpr, CAPPED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """Write dq of ROWS rows of one sequence and key head. Grid: sequences x tiles of rows, key heads."""
    program, head = tl.program_id(0), tl.program_id(1)
    # Tiles with the most keys start first.
    batches = tl.num_programs(0) // tiles
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
    shift = length - count
    t_first, t_last = tile * ROWS // GROUP, tl.minimum((tile * ROWS + ROWS - 1) // GROUP, used - 1)
    first, low_most = first_visible(t_first, shift, left, gone), first_visible(t_last, shift, left, gone)
    high_least, end = end_visible(t_first, shift, right, length), end_visible(t_last, shift, right, length)
    end = tl.where(t_first < used, end, 0)

    q_base = Q + batch.to(tl.int64) * q_batch * UNIT + head.to(tl.int64) * (GROUP * Q_HEAD * UNIT)
    q = rows_at(q_base, tile * ROWS, first_q, used, Q_STEP, Q_HEAD, GROUP, D, WIDTH, ROWS)
    g_base = GRAD + batch.to(tl.int64) * g_batch * UNIT + head.to(tl.int64) * (GROUP * G_HEAD * UNIT)
    grad = rows_at(g_base, tile * ROWS, first_q, used, G_STEP, G_HEAD, GROUP, DV, WIDTH_V, ROWS)
    place = ((batch.to(tl.int64) * KV_HEADS + head) * queries + first_q) * GROUP + rows
    lse = tl.load(LSES + place, mask=t < used, other=float("inf"))
    delta = tl.load(DELTAS + place, mask=t < used, other=0.0)
    pages_of, box_b = TABLE, 0 * b
    if TABLE is None:
        k_base, v_base = K + first_k.to(tl.int64) * (K_STEP * UNIT), V + first_k.to(tl.int64) * (V_STEP * UNIT)
        if STARTS_K is None:
            box_b = b
            k_base, v_base = k_base + b.to(tl.int64) * k_batch * UNIT, v_base + b.to(tl.int64) * v_batch * UNIT
    else:
        k_base, v_base, pages_of = K, V, TABLE + b.to(tl.int64) * table_step
    k_base, v_base = k_base + head.to(tl.int64) * k_head * UNIT, v_base + head.to(tl.int64) * v_head * UNIT

    total = tl.zeros([ROWS, WIDTH], tl.float32)
    begin = first // BLOCK * BLOCK
    if K_BOX is not None:
        # First the blocks that end within the sequence, then the one that does not.
        whole = tl.minimum(end, length // BLOCK * BLOCK) if GOES_ON else end
        for n in tl.range(begin, whole, BLOCK):
            k, _ = key_box(K_BOX, pages_of, n, box_b, first_k, head, pages, WIDTH, PAGE, BLOCK)
            score, weights = weights_with_keys(
                q, k, n, lse, t + shift, left, right, low_most, high_least, gone, length, factor, cap, rate, CAPPED,
                BLOCK,
            )  # fmt: skip
            v, _ = key_box(V_BOX, pages_of, n, box_b, first_k, head, pages, WIDTH_V, PAGE, BLOCK)
            total = with_keys(total, score, weights, grad, delta, k, v, cap, CAPPED)
        if (whole < end) & (begin < end):
            k, _ = key_box(K_BOX, pages_of, whole, box_b, first_k, head, pages, WIDTH, PAGE, BLOCK)
            k = within(k, whole, length, BLOCK)
            score, weights = weights_with_keys(
                q, k, whole, lse, t + shift, left, right, low_most, high_least, gone, length, factor, cap, rate, CAPPED,
                BLOCK,
            )  # fmt: skip
            v, _ = key_box(V_BOX, pages_of, whole, box_b, first_k, head, pages, WIDTH_V, PAGE, BLOCK)
            v = within(v, whole, length, BLOCK)
            total = with_keys(total, score, weights, grad, delta, k, v, cap, CAPPED)
    else:
        for n in tl.range(begin, end, BLOCK):
            k, _ = keys_at(k_base, pages_of, n, gone, length, pages, k_batch, K_STEP, D, WIDTH, PAGE, BLOCK, GONE)
            score, weights = weights_with_keys(
                q, k, n, lse, t + shift, left, right, low_most, high_least, gone, length, factor, cap, rate, CAPPED,
                BLOCK,
            )  # fmt: skip
            v, _ = keys_at(v_base, pages_of, n, gone, length, pages, v_batch, V_STEP, DV, WIDTH_V, PAGE, BLOCK, GONE)
            total = with_keys(total, score, weights, grad, delta, k, v, cap, CAPPED)
    total = product(total, tl.full(total.shape, scale, tl.float32))
    d = tl.arange(0, WIDTH)
    mask = (t < count)[:, None]
    if D != WIDTH:
        mask = mask & (d < D)[None, :]
    heads = head * GROUP + rows % GROUP
    out = ((batch.to(tl.int64) * queries + first_q + t) * (KV_HEADS * GROUP) + heads) * D
    tl.store(DQ + out[:, None] + d[None, :], total.to(DQ.dtype.element_ty), mask=mask)
