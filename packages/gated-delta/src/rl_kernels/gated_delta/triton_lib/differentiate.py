"""The kernels of the backward pass that need no other chunk: ``systems``, ``queries`` and ``keys``, all chunks at once.

``systems`` goes back through M, W and T of a value head. The others add up the gradients of a key head, its value heads
in ascending order. All take columns of Dv in parts of WIDTH, in ascending order. G_t is added to
what query t and key t have on the left side of a product, and subtracted from what key t has on the right side. So its
gradient is ``q_t dq_t`` plus ``k_t`` times the first part of its gradient, less that of the second.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib.arithmetic import product
from rl_kernels.gated_delta.triton_lib.tiles import (
    CHUNK,
    EPS,
    SIZES,
    between,
    dot,
    dot_rest,
    faded_inverse,
    minus,
    row_sum,
    rows_at,
    scaled,
    sequence_at,
    sequence_of,
    tile_at,
    times,
    whole_tile,
)


@triton.jit
def dense_at(X, token, head, is_token, columns, HV: tl.constexpr, DV: tl.constexpr):
    """Return rows of contiguous ``X[tokens, Hv, Dv]`` at tokens, at these columns, or 0 where ``is_token`` is False."""
    return rows_at(X, 0 * head, token, head, is_token, 0, HV * DV, DV, columns)


@triton.jit(do_not_specialize=SIZES)
def systems(
    UNIT_Q, UNIT_K, BETA, SUMS, INVERSE, DSTATES, RESIDUALS, GRAD, DQK, DKK, DFADED, DBETA,
    BOUNDS, STARTS, scale, tokens, chunks, sequences, halvings,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the gradients of beta, and of the products q k and k k of a chunk. Grid: slots, Hv.

    ``DQK, DKK[slots, Hv, 64, 64]``; ``DFADED[slots, Hv, 64, Dk]``: the keys' gradient through W; all rounded.
    """
    slot, head = tl.program_id(0), tl.program_id(1)
    s = sequence_of(slot, BOUNDS, chunks, tokens, sequences, halvings)
    batch, first, count, _, begin = sequence_at(s, BOUNDS, STARTS, None, tokens, chunks)
    chunk = slot - begin
    if (count <= 0) | (chunk * CHUNK >= count):
        return
    r, d = tl.arange(0, CHUNK), tl.arange(0, D)
    row, c = r[:, None], r[None, :]
    item, key_item = slot.to(tl.int64) * HV + head, slot.to(tl.int64) * HK + head // (HV // HK)
    is_token = chunk * CHUNK + r < count
    token = batch.to(tl.int64) * tokens + first + chunk * CHUNK + r
    dtype = UNIT_K.dtype.element_ty
    zeros = tl.zeros([CHUNK, CHUNK], tl.float32)
    dmixing, dweights = zeros, tl.zeros([CHUNK, D], tl.float32)
    for part in range(0, DV // WIDTH):
        columns = part * WIDTH + tl.arange(0, WIDTH)
        x = tile_at(RESIDUALS, item, columns, CHUNK, DV)
        dmixing = dot(dense_at(GRAD, token, head, is_token, columns, HV, DV), tl.trans(x), dmixing)
        dweights = dot(x, tl.trans(tile_at(DSTATES, item, columns, D, DV)), dweights)
    dweights = dweights.to(dtype)
    sums = tl.load(SUMS + item * CHUNK + r)
    fading = tl.exp(tl.load(SUMS + item * CHUNK + CHUNK - 1) - sums)
    beta = tl.load(BETA + token * HV + head, mask=is_token, other=0.0).to(tl.float32)
    unit_inverse = whole_tile(INVERSE, item, CHUNK, CHUNK)
    inverse = times(unit_inverse, beta[None, :])
    place = (item * CHUNK + row) * D + d[None, :]
    dkeys = dot(faded_inverse(inverse, sums, dtype), dweights, tl.zeros([CHUNK, D], tl.float32))
    tl.store(DFADED + place, dkeys.to(dtype))

    inverse, unit_inverse = inverse.to(dtype), unit_inverse.to(dtype)
    k = whole_tile(UNIT_K, key_item, CHUNK, D)
    decays = between(sums)
    scores = times(dot(whole_tile(UNIT_Q, key_item, CHUNK, D), tl.trans(k), zeros), decays)
    scores = tl.where(row >= c, scores, 0.0).to(dtype)
    dmixing = tl.where(row >= c, scaled(dmixing, scale), 0.0).to(dtype)
    dinverse = dot(tl.trans(scores), dmixing, times(dot(k, tl.trans(dweights), zeros), fading[:, None]))
    dinverse = tl.where(row >= c, dinverse, 0.0)
    square = (item * CHUNK + row) * CHUNK + c
    dscores = tl.where(row >= c, dot(dmixing, tl.trans(inverse), zeros), 0.0)
    tl.store(DQK + square, times(dscores, decays).to(dtype))
    pulled = dot_rest(tl.trans(unit_inverse), dinverse, dot(tl.trans(unit_inverse), dinverse.to(dtype), zeros))
    dsystem = tl.where(row > c, times(dot(pulled.to(dtype), tl.trans(inverse), zeros), -decays), 0.0)
    tl.store(DKK + square, times(dsystem, beta[:, None]).to(dtype))
    products = dot(k, tl.trans(k), zeros)
    dbeta = row_sum(tl.where(row == c, pulled, product(dsystem, products)))
    tl.store(DBETA + token * HV + head, dbeta.to(DBETA.dtype.element_ty), mask=is_token)


@triton.jit
def put_through_norm(OUT, X, grad, batch, place, token, key_head, is_token, x_batch, x_token, x_head,
                     HK: tl.constexpr, D: tl.constexpr, NORMALIZE: tl.constexpr):  # fmt: skip
    """Write to contiguous ``OUT[B, T, Hk, D]`` the gradient of X from that of its rows, divided by their norms."""
    d = tl.arange(0, D)
    if NORMALIZE:
        x = rows_at(X, batch, place, key_head, is_token, x_batch, x_token, x_head, d).to(tl.float32)
        inverse = tl.rsqrt(row_sum(product(x, x)) + EPS)[:, None]
        unit = times(x, inverse)
        along = row_sum(product(unit, grad))
        grad = times(minus(grad, along[:, None], unit), inverse)
    out = OUT + (token * HK + key_head)[:, None] * D + d[None, :]
    tl.store(out, grad.to(OUT.dtype.element_ty), mask=is_token[:, None])


@triton.jit
def through_state(
    ROWS, STATES, factor, token, head, item, is_token,
    HV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return rows at tokens times the transposed state, then times their factors: ``[64, D]``."""
    total = tl.zeros([CHUNK, D], tl.float32)
    for part in range(0, DV // WIDTH):
        columns = part * WIDTH + tl.arange(0, WIDTH)
        x = dense_at(ROWS, token, head, is_token, columns, HV, DV)
        total = dot(x, tl.trans(tile_at(STATES, item, columns, D, DV)), total)
    return times(total, factor[:, None])


@triton.jit
def sum_of(X, item, grad, D: tl.constexpr):
    """Return the sum of each row of ``X[item]`` times its gradient."""
    return row_sum(product(whole_tile(X, item, CHUNK, D).to(tl.float32), grad))


@triton.jit
def put_decays(DG, KEPT, moved, leaving, last, item, token, head, is_token, HV: tl.constexpr, SIZE: tl.constexpr):
    """Write the gradient of g, sums of that of G from each row on; ``leaving`` is what the last row's G takes."""
    r = tl.arange(0, CHUNK)
    kept = row_sum(tl.load(KEPT + item * SIZE + tl.arange(0, SIZE))[None, :])
    at_last = row_sum(leaving[None, :]) + times(kept, tl.exp(last))
    moved = tl.where(r == CHUNK - 1, moved + at_last, moved)
    dg = row_sum(tl.where(r[:, None] <= r[None, :], moved[None, :], 0.0))
    tl.store(DG + token * HV + head, dg.to(DG.dtype.element_ty), mask=is_token)


@triton.jit(do_not_specialize=SIZES)
def queries(
    Q, UNIT_Q, UNIT_K, SUMS, STATES, GRAD, DQK, MOVED, DQ, BOUNDS, STARTS, scale,
    tokens, chunks, sequences, halvings, q_batch, q_token, q_head,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the queries of a chunk, ``DQ[B, T, Hk, D]``. Grid: slots, Hk.

    ``MOVED[slots, Hv, 64]``, FP32: each query times its gradient.
    """
    slot, key_head = tl.program_id(0), tl.program_id(1)
    s = sequence_of(slot, BOUNDS, chunks, tokens, sequences, halvings)
    batch, first, count, _, begin = sequence_at(s, BOUNDS, STARTS, None, tokens, chunks)
    chunk = slot - begin
    if (count <= 0) | (chunk * CHUNK >= count):
        return
    r, key_item = tl.arange(0, CHUNK), slot.to(tl.int64) * HK + key_head
    is_token, place = chunk * CHUNK + r < count, first + chunk * CHUNK + r
    token = batch.to(tl.int64) * tokens + place
    total = tl.zeros([CHUNK, D], tl.float32)
    for member in range(0, HV // HK):
        head = key_head * (HV // HK) + member
        item = slot.to(tl.int64) * HV + head
        grown = scaled(tl.exp(tl.load(SUMS + item * CHUNK + r)), scale)
        dq = through_state(GRAD, STATES, grown, token, head, item, is_token, HV, D, DV, WIDTH)
        dq = dot(whole_tile(DQK, item, CHUNK, CHUNK), whole_tile(UNIT_K, key_item, CHUNK, D), dq)
        tl.store(MOVED + item * CHUNK + r, sum_of(UNIT_Q, key_item, dq, D))
        total += dq
    put_through_norm(DQ, Q, total, batch, place, token, key_head, is_token, q_batch, q_token, q_head, HK, D, NORMALIZE)


@triton.jit(do_not_specialize=SIZES)
def keys(
    K, UNIT_Q, UNIT_K, SUMS, STATES, DVALUES, DQK, DKK, DFADED, MOVED, KEPT, DK, DG, BOUNDS, STARTS,
    tokens, chunks, sequences, halvings, k_batch, k_token, k_head,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the keys of a chunk, ``DK[B, T, Hk, D]``, and of g, ``DG[B, T, Hv]``. Grid: slots, Hk.

    SIZE is the number of sums in KEPT of a chunk and value head.
    """
    slot, key_head = tl.program_id(0), tl.program_id(1)
    s = sequence_of(slot, BOUNDS, chunks, tokens, sequences, halvings)
    batch, first, count, _, begin = sequence_at(s, BOUNDS, STARTS, None, tokens, chunks)
    chunk = slot - begin
    if (count <= 0) | (chunk * CHUNK >= count):
        return
    r, key_item = tl.arange(0, CHUNK), slot.to(tl.int64) * HK + key_head
    is_token, place = chunk * CHUNK + r < count, first + chunk * CHUNK + r
    token = batch.to(tl.int64) * tokens + place
    total = tl.zeros([CHUNK, D], tl.float32)
    for member in range(0, HV // HK):
        head = key_head * (HV // HK) + member
        item = slot.to(tl.int64) * HV + head
        sums = tl.load(SUMS + item * CHUNK + r)
        dk = through_state(DVALUES, STATES, -tl.exp(sums), token, head, item, is_token, HV, D, DV, WIDTH)
        dk = dot(whole_tile(DKK, item, CHUNK, CHUNK), whole_tile(UNIT_K, key_item, CHUNK, D), dk)
        moved = tl.load(MOVED + item * CHUNK + r) + sum_of(UNIT_K, key_item, dk, D)
        total += dk
        dk = whole_tile(DFADED, item, CHUNK, D).to(tl.float32)
        leaving = sum_of(UNIT_K, key_item, dk, D)
        dk = dot(tl.trans(whole_tile(DKK, item, CHUNK, CHUNK)), whole_tile(UNIT_K, key_item, CHUNK, D), dk)
        dk = dot(tl.trans(whole_tile(DQK, item, CHUNK, CHUNK)), whole_tile(UNIT_Q, key_item, CHUNK, D), dk)
        moved -= sum_of(UNIT_K, key_item, dk, D)
        total += dk
        last = tl.load(SUMS + item * CHUNK + CHUNK - 1)
        put_decays(DG, KEPT, moved, leaving, last, item, token, head, is_token, HV, SIZE)
    put_through_norm(DK, K, total, batch, place, token, key_head, is_token, k_batch, k_token, k_head, HK, D, NORMALIZE)
