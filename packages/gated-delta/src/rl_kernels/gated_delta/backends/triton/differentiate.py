"""The kernels of the backward pass that need no other chunk: gradients of gates, queries and keys, all chunks at once.

Sums over Dv take parts of WIDTH columns in ascending order, those over value heads that share a key ascend too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib.arithmetic import product
from rl_kernels.gated_delta.backends.triton.prepare import SIZES
from rl_kernels.gated_delta.backends.triton.tiles import (
    CHUNK,
    EPS,
    dot,
    minus,
    row_sum,
    rows_at,
    scaled,
    sequence_at,
    sequence_of,
    times,
)


@triton.jit
def square_at(X, item):
    """Return ``X[item]`` of ``X[items, 64, 64]``."""
    row = tl.arange(0, CHUNK)
    return tl.load(X + (item * CHUNK + row)[:, None] * CHUNK + row[None, :])


@triton.jit
def part_at(X, item, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return columns of ``X[item]`` of ``X[items, ROWS, COLUMNS]``."""
    return tl.load(X + (item * ROWS + tl.arange(0, ROWS))[:, None] * COLUMNS + columns[None, :])


@triton.jit
def dense_at(X, token, head, is_token, columns, HV: tl.constexpr, DV: tl.constexpr):
    """Return rows of contiguous ``X[tokens, Hv, Dv]`` at tokens, at these columns, or 0 where ``is_token`` is False."""
    return rows_at(X, 0 * head, token, head, is_token, 0, HV * DV, DV, columns)


@triton.jit(do_not_specialize=SIZES)
def gates(
    UNIT_Q, UNIT_K, V, SUMS, BELOW, SCORES, STATES, DSTATES, U, DX, GRAD, DVALUES, DQK, DKK, DG, DBETA,
    BOUNDS, STARTS, scale, tokens, chunks, sequences, halvings, v_batch, v_token, v_head,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the gradients of g and beta, and of the products q k and k k of a chunk. Grid: slots, Hv.

    ``DQK, DKK[slots, Hv, 64, 64]``: rounded; ``DG, DBETA[B, T, Hv]``.
    """
    slot, head = tl.program_id(0), tl.program_id(1)
    s = sequence_of(slot, BOUNDS, chunks, tokens, sequences, halvings)
    batch, first, count, _, begin = sequence_at(s, BOUNDS, STARTS, None, tokens, chunks)
    chunk = slot - begin
    if (count <= 0) | (chunk * CHUNK >= count):
        return
    row, d, item = tl.arange(0, CHUNK), tl.arange(0, D), slot.to(tl.int64) * HV + head
    is_token = chunk * CHUNK + row < count
    place = first + chunk * CHUNK + row
    dtype = UNIT_Q.dtype.element_ty
    token = batch.to(tl.int64) * tokens + place
    key_item = slot.to(tl.int64) * HK + head // (HV // HK)
    sums, last = tl.load(SUMS + item * CHUNK + row), tl.load(SUMS + item * CHUNK + CHUNK - 1)
    grown, fading = tl.exp(sums), tl.exp(last - sums)
    zeros = tl.zeros([CHUNK, WIDTH], tl.float32)
    dscores, dbelow = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    dbeta, dgrown, leaving = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    kept = tl.zeros([D], tl.float32)
    for part in range(0, DV // WIDTH):
        c = part * WIDTH + tl.arange(0, WIDTH)
        u, dx = part_at(U, item, c, CHUNK, DV), part_at(DX, item, c, CHUNK, DV)
        grad = dense_at(GRAD, token, head, is_token, c, HV, DV)
        dv = dense_at(DVALUES, token, head, is_token, c, HV, DV)
        dscores = dot(grad, tl.trans(u), dscores)
        dbelow = dot(dv, tl.trans(u), dbelow)
        factor = part_at(STATES, item, c, D, DV)
        queries_state = dot(part_at(UNIT_Q, key_item, d, CHUNK, D), factor, zeros)
        k = part_at(UNIT_K, key_item, d, CHUNK, D)
        keys_state = dot(k, factor, zeros)
        from_queries = row_sum(product(grad.to(tl.float32), queries_state))
        from_keys = row_sum(product(dv.to(tl.float32), keys_state))
        dgrown += scaled(from_queries, scale) - from_keys
        v = rows_at(V, batch, place, head, is_token, v_batch, v_token, v_head, c).to(tl.float32)
        x = dot(square_at(BELOW, item), u, minus(v, grown[:, None], keys_state))
        dbeta += row_sum(product(dx.to(tl.float32), x))
        dfactor = part_at(DSTATES, item, c, D, DV)
        faded = times(u.to(tl.float32), fading[:, None])
        leaving += row_sum(product(dot(k, dfactor, zeros), faded))
        kept += row_sum(product(factor.to(tl.float32), dfactor.to(tl.float32)))

    is_past, is_before = row[:, None] >= row[None, :], row[:, None] > row[None, :]
    between = tl.exp(tl.where(is_past, sums[:, None] - sums[None, :], 0.0))
    dscores = tl.where(is_past, scaled(dscores, scale), 0.0)
    # BELOW has the opposite sign.
    dbelow = tl.where(is_before, dbelow, 0.0)
    square = (item * CHUNK + row)[:, None] * CHUNK + row[None, :]
    tl.store(DQK + square, times(dscores, between).to(dtype))
    tl.store(DKK + square, (-times(dbelow, between)).to(dtype))
    moved = product(dscores, square_at(SCORES, item).to(tl.float32))
    moved += product(dbelow, square_at(BELOW, item).to(tl.float32))
    moved = row_sum(moved) - row_sum(tl.trans(moved))
    dsums = product(grown, dgrown) + moved - leaving
    at_last = row_sum(leaving[None, :]) + times(row_sum(kept[None, :]), tl.exp(last))
    dsums = tl.where(row == CHUNK - 1, dsums + at_last, dsums)
    dg = row_sum(tl.where(row[:, None] <= row[None, :], dsums[None, :], 0.0))
    tl.store(DG + token * HV + head, dg.to(DG.dtype.element_ty), mask=is_token)
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


@triton.jit(do_not_specialize=SIZES)
def queries(
    Q, UNIT_K, SUMS, STATES, GRAD, DQK, DQ, BOUNDS, STARTS, scale,
    tokens, chunks, sequences, halvings, q_batch, q_token, q_head,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the queries of a chunk, ``DQ[B, T, Hk, D]``. Grid: slots, Hk."""
    slot, key_head = tl.program_id(0), tl.program_id(1)
    s = sequence_of(slot, BOUNDS, chunks, tokens, sequences, halvings)
    batch, first, count, _, begin = sequence_at(s, BOUNDS, STARTS, None, tokens, chunks)
    chunk = slot - begin
    if (count <= 0) | (chunk * CHUNK >= count):
        return
    row = tl.arange(0, CHUNK)
    is_token, place = chunk * CHUNK + row < count, first + chunk * CHUNK + row
    token = batch.to(tl.int64) * tokens + place
    k = part_at(UNIT_K, slot.to(tl.int64) * HK + key_head, tl.arange(0, D), CHUNK, D)
    total = tl.zeros([CHUNK, D], tl.float32)
    for member in range(0, HV // HK):
        head = key_head * (HV // HK) + member
        item = slot.to(tl.int64) * HV + head
        total = dot(square_at(DQK, item), k, total)
        grown = scaled(tl.exp(tl.load(SUMS + item * CHUNK + row)), scale)
        for part in range(0, DV // WIDTH):
            c = part * WIDTH + tl.arange(0, WIDTH)
            grad = dense_at(GRAD, token, head, is_token, c, HV, DV)
            left = times(grad.to(tl.float32), grown[:, None]).to(grad.dtype)
            total = dot(left, tl.trans(part_at(STATES, item, c, D, DV)), total)
    put_through_norm(DQ, Q, total, batch, place, token, key_head, is_token, q_batch, q_token, q_head, HK, D, NORMALIZE)


@triton.jit(do_not_specialize=SIZES)
def keys(
    K, UNIT_Q, UNIT_K, SUMS, STATES, DSTATES, U, DVALUES, DQK, DKK, DK, BOUNDS, STARTS,
    tokens, chunks, sequences, halvings, k_batch, k_token, k_head,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the keys of a chunk, ``DK[B, T, Hk, D]``. Grid: slots, Hk."""
    slot, key_head = tl.program_id(0), tl.program_id(1)
    s = sequence_of(slot, BOUNDS, chunks, tokens, sequences, halvings)
    batch, first, count, _, begin = sequence_at(s, BOUNDS, STARTS, None, tokens, chunks)
    chunk = slot - begin
    if (count <= 0) | (chunk * CHUNK >= count):
        return
    row, key_item = tl.arange(0, CHUNK), slot.to(tl.int64) * HK + key_head
    is_token, place = chunk * CHUNK + row < count, first + chunk * CHUNK + row
    token = batch.to(tl.int64) * tokens + place
    total = tl.zeros([CHUNK, D], tl.float32)
    for member in range(0, HV // HK):
        head = key_head * (HV // HK) + member
        item = slot.to(tl.int64) * HV + head
        k = part_at(UNIT_K, key_item, tl.arange(0, D), CHUNK, D)
        dkk = square_at(DKK, item)
        total = dot(tl.trans(dkk), k, dot(dkk, k, total))
        q = part_at(UNIT_Q, key_item, tl.arange(0, D), CHUNK, D)
        total = dot(tl.trans(square_at(DQK, item)), q, total)
        sums, last = tl.load(SUMS + item * CHUNK + row), tl.load(SUMS + item * CHUNK + CHUNK - 1)
        grown, fading = tl.exp(sums), tl.exp(last - sums)
        for part in range(0, DV // WIDTH):
            c = part * WIDTH + tl.arange(0, WIDTH)
            dv = dense_at(DVALUES, token, head, is_token, c, HV, DV)
            left = times(dv.to(tl.float32), -grown[:, None]).to(dv.dtype)
            total = dot(left, tl.trans(part_at(STATES, item, c, D, DV)), total)
            u = part_at(U, item, c, CHUNK, DV)
            faded = times(u.to(tl.float32), fading[:, None]).to(u.dtype)
            total = dot(faded, tl.trans(part_at(DSTATES, item, c, D, DV)), total)
    put_through_norm(DK, K, total, batch, place, token, key_head, is_token, k_batch, k_token, k_head, HK, D, NORMALIZE)
