"""One token of each sequence with a cache: the row that ``scan`` would compute, from the state and the open chunk.

``weigh`` computes what does not depend on columns of the state: the key, its sums of decays, the row of the inverse,
and the weights of earlier rows. ``decode`` reads the state once, and writes it once in 64 tokens. Row 0 of a product of
16 rows is the key, row 1 the query; a row has the bits that it has among others. Sums of decays, the inverse and the
chains are those of ``prepare`` and ``scan``: rows that are not there yet are zeros, which change no bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib.arithmetic import INTERPRETED
from rl_kernels.gated_delta.backends.triton.tiles import BLOCK, CHUNK, dot, minus, times, unit

_KEY, _QUERY = tl.constexpr(0), tl.constexpr(1)


@triton.jit
def only(x, row, INDEX):
    """Return row INDEX of x: a sum of one row and zeros."""
    return tl.sum(tl.where(row[:, None] == INDEX, x, 0.0), 0)


@triton.jit
def new_row(held, system, i):
    """Return row i of the inverse ``[16, 16]``: that of 1, less the system's row times the rows before it.

    FP32 products add their terms in ascending order, so these are the steps of ``inverse_of``.
    """
    row = tl.arange(0, BLOCK)
    is_new = row == i
    start = tl.where(is_new[:, None] & (row[None, :] == i), 1.0, 0.0)
    left = tl.where(is_new[:, None], -system[None, :], 0.0)
    if INTERPRETED:
        for s in tl.static_range(BLOCK - 1):
            factor = tl.sum(tl.where(row[None, :] == s, left, 0.0), 1)
            start = minus(start, -factor[:, None], only(held, row, s)[None, :])
    else:
        start = tl.dot(left, held, start, input_precision="ieee")
    return only(start, row, i)


@triton.jit
def weigh(
    Q, K, G, BETA, KEYS, SUMS, INVERSE, LENGTHS, UNIT_Q, WEIGHTS, COUNTS, q_batch, q_head, k_batch, k_head,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Write what one token adds to the cache but for its value, and the weights of rows. Grid: Hk, sequences.

    ``UNIT_Q[B, Hk, D]``; ``WEIGHTS[B, Hv, 2, 64]``: what ``BELOW`` and ``SCORES`` have in the token's row;
    ``COUNTS[B, Hk]``: a copy of LENGTHS, which ``decode`` counts on.
    """
    key_head, s = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key_item, length = s * HK + key_head, tl.load(LENGTHS + s)
    t = length % CHUNK
    begin = t // BLOCK * BLOCK
    row, d, r = tl.arange(0, BLOCK), tl.arange(0, D), tl.arange(0, CHUNK)
    dtype = KEYS.dtype.element_ty
    KEYS += key_item * (CHUNK * D)
    q = tl.load(Q + s * q_batch + key_head * q_head + d)
    k = tl.load(K + s * k_batch + key_head * k_head + d)
    keys = tl.load(KEYS + r[:, None] * D + d[None, :], mask=(r < t)[:, None], other=0.0)
    if NORMALIZE:
        q = tl.reshape(unit(q[None, :].to(tl.float32)).to(dtype), [D])
        k = tl.reshape(unit(k[None, :].to(tl.float32)).to(dtype), [D])
    tl.store(KEYS + t * D + d, k)
    tl.store(UNIT_Q + key_item * D + d, q)
    tl.store(COUNTS + key_item, length)
    keys = tl.where((r == t)[:, None], k[None, :], keys)
    x = tl.where((row == _KEY)[:, None], k[None, :], tl.where((row == _QUERY)[:, None], q[None, :], 0.0).to(dtype))
    products = dot(x, tl.trans(keys), tl.zeros([BLOCK, CHUNK], tl.float32))
    of_key, of_query = only(products, row, _KEY), only(products, row, _QUERY)

    for member in range(0, HV // HK):
        item = s * HV + key_head * (HV // HK) + member
        sums = tl.load(SUMS + item * CHUNK + r, mask=r < t, other=0.0)
        total = tl.load(SUMS + item * CHUNK + t - 1, mask=t > 0, other=0.0) + tl.load(G + item).to(tl.float32)
        between = tl.exp(tl.where(r < t, total - sums, 0.0))
        below = tl.where(r < t, times(of_key, between), 0.0)
        tl.store(WEIGHTS + item * (2 * CHUNK) + r, (-below).to(dtype))
        tl.store(WEIGHTS + item * (2 * CHUNK) + CHUNK + r, tl.where(r <= t, times(of_query, between), 0.0).to(dtype))
        tl.store(SUMS + item * CHUNK + t, total)
        # Sums of one term and zeros.
        below = tl.sum(tl.where(r[None, :] == begin + row[:, None], below[None, :], 0.0), 1)
        place, i = INVERSE + item * (BLOCK * BLOCK) + row[:, None] * BLOCK + row[None, :], t - begin
        held = tl.load(place, mask=(row < i)[:, None] & (row[None, :] <= row[:, None]), other=0.0)
        inverse = new_row(held, times(below, tl.load(BETA + item).to(tl.float32)), i)
        tl.store(INVERSE + item * (BLOCK * BLOCK) + i * BLOCK + row, inverse)


@triton.jit
def close(STATE, KEYS, VALUES, SUMS, u, grown, total, c, D: tl.constexpr, DV: tl.constexpr):
    """Add the chunk to the state; ``u`` are the pseudo values of its last block."""
    r, row, d = tl.arange(0, CHUNK), tl.arange(0, BLOCK) + CHUNK - BLOCK, tl.arange(0, D)
    is_closed = r < CHUNK - BLOCK
    place = STATE + d[:, None] * DV + c[None, :]
    keys = tl.load(KEYS + r[:, None] * D + d[None, :], mask=is_closed[:, None], other=0.0)
    values = tl.load(VALUES + r[:, None] * DV + c[None, :], mask=is_closed[:, None], other=0.0)
    fading = tl.exp(tl.where(is_closed, total - tl.load(SUMS + r), 0.0))
    state = times(tl.load(place), grown)
    state = dot(tl.trans(keys), times(values.to(tl.float32), fading[:, None]).to(u.dtype), state)
    fading = tl.exp(total - tl.load(SUMS + row))
    keys = tl.load(KEYS + row[:, None] * D + d[None, :])
    state = dot(tl.trans(keys), times(u.to(tl.float32), fading[:, None]).to(u.dtype), state)
    tl.store(place, state)


@triton.jit
def decode(
    V, BETA, OUT, STATE, KEYS, VALUES, SUMS, INVERSE, LENGTHS, UNIT_Q, WEIGHTS, COUNTS, scale, v_batch, v_head,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the output of one token, value head and WIDTH columns, and the cache. Grid: DV / WIDTH, Hv, sequences."""
    part, head, s = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    key_item, item = s * HK + head // (HV // HK), s * HV + head
    length = tl.load(COUNTS + key_item)
    t = length % CHUNK
    begin = t // BLOCK * BLOCK
    i = t - begin
    row, d, c, r = tl.arange(0, BLOCK), tl.arange(0, D), part * WIDTH + tl.arange(0, WIDTH), tl.arange(0, CHUNK)
    dtype = KEYS.dtype.element_ty
    KEYS, SUMS, STATE = KEYS + key_item * (CHUNK * D), SUMS + item * CHUNK, STATE + item * (D * DV)
    VALUES, WEIGHTS = VALUES + item * (CHUNK * DV), WEIGHTS + item * (2 * CHUNK)
    is_key, is_query, is_new, is_closed = row == _KEY, row == _QUERY, row == i, r < begin
    # All loads first: none is moved up past a barrier, and most products have one.
    factor = tl.load(STATE + d[:, None] * DV + c[None, :]).to(dtype)
    closed = tl.load(VALUES + r[:, None] * DV + c[None, :], mask=is_closed[:, None], other=0.0)
    block_place = (begin + row)[:, None] * DV + c[None, :]
    sides = tl.load(VALUES + block_place, mask=(row < i)[:, None], other=0.0)
    x = tl.load(KEYS + t * D + 0 * row[:, None] + d[None, :], mask=is_key[:, None], other=0.0)
    query = tl.load(UNIT_Q + key_item * D + 0 * row[:, None] + d[None, :], mask=is_query[:, None], other=0.0)
    x = tl.where(is_key[:, None], x, query)
    weights_place = WEIGHTS + tl.minimum(row, _QUERY)[:, None] * CHUNK
    weights = tl.load(weights_place + r[None, :], mask=(row <= _QUERY)[:, None] & is_closed[None, :], other=0.0)
    scores = tl.load(weights_place + begin + row[None, :], mask=is_query[:, None] & (row <= i)[None, :], other=0.0)
    is_inverse = (row <= i)[:, None] & (row[None, :] <= row[:, None])
    inverse_place = INVERSE + item * (BLOCK * BLOCK) + row[:, None] * BLOCK + row[None, :]
    inverse = tl.load(inverse_place, mask=is_inverse, other=0.0).to(dtype)
    v = tl.load(V + s * v_batch + head * v_head + c).to(tl.float32)
    total, beta = tl.load(SUMS + t), tl.load(BETA + item).to(tl.float32)
    grown = tl.exp(total)

    base = dot(x, factor, tl.zeros([BLOCK, WIDTH], tl.float32))
    side = minus(tl.broadcast_to(v[None, :], base.shape), grown, base)
    acc = tl.where(is_query[:, None], times(base, grown), side)
    acc = dot(weights, closed, acc)
    side = times(only(acc, row, _KEY), beta).to(dtype)
    sides = tl.where(is_new[:, None], side[None, :], sides)
    u = dot(inverse, sides, tl.zeros([BLOCK, WIDTH], tl.float32)).to(dtype)
    o = only(dot(scores, u, acc), row, _QUERY) * scale
    tl.store(OUT + item * DV + c, o.to(OUT.dtype.element_ty))
    is_whole = i == BLOCK - 1
    tl.store(VALUES + block_place, tl.where(is_whole, u, sides), mask=(is_new | is_whole)[:, None])
    if (part == 0) & (head == 0):
        tl.store(LENGTHS + s, length + 1)
    if t == CHUNK - 1:
        close(STATE, KEYS, VALUES, SUMS, u, grown, total, c, D, DV)
