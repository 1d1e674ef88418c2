"""One token of each sequence with a cache: the row that ``scan`` would compute, from the state and the open chunk.

The state is read once, and written once in 64 tokens. Row 0 of a product of 16 rows is the key, row 1 the query; a row
has the bits that it has among others. Sums of decays, the inverse and the chains are those of ``prepare`` and ``scan``:
rows that are not there yet are zeros, which change no bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib.arithmetic import product
from rl_kernels.gated_delta.backends.triton.tiles import BLOCK, CHUNK, dot, minus, times, unit

_KEY, _QUERY = tl.constexpr(0), tl.constexpr(1)


@triton.jit
def only(x, row, INDEX):
    """Return row INDEX of x: a sum of one row and zeros."""
    return tl.sum(tl.where(row[:, None] == INDEX, x, 0.0), 0)


@triton.jit
def inverse_row(system, HELD, i):
    """Return row i of the inverse of a block, from the rows before it."""
    column = tl.arange(0, BLOCK)
    row = tl.where(column == i, 1.0, 0.0)
    for s in tl.static_range(BLOCK - 1):
        factor = tl.sum(tl.where(column == s, system, 0.0), 0)
        solved = tl.load(HELD + s * BLOCK + column, mask=(column <= s) & (s < i), other=0.0)
        row = tl.where(s < i, minus(row, factor, solved), row)
    return row


@triton.jit
def decode(
    Q, K, V, G, BETA, OUT, STATE, KEYS, VALUES, SUMS, INVERSE, LENGTHS, scale,
    q_batch, q_head, k_batch, k_head, v_batch, v_head,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Write the output of one token, value head and WIDTH columns, and the cache. Grid: DV / WIDTH, Hv, sequences."""
    part, head, s = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    key_head, item = head // (HV // HK), s * HV + head
    t = tl.load(LENGTHS + s) % CHUNK
    begin = t // BLOCK * BLOCK
    i = t - begin
    row, d, c, r = tl.arange(0, BLOCK), tl.arange(0, D), part * WIDTH + tl.arange(0, WIDTH), tl.arange(0, CHUNK)
    dtype = KEYS.dtype.element_ty
    state_place = STATE + (item * D + d)[:, None] * DV + c[None, :]
    state = tl.load(state_place)
    q = tl.load(Q + s * q_batch + key_head * q_head + d)
    k = tl.load(K + s * k_batch + key_head * k_head + d)
    x = tl.where((row == _KEY)[:, None], k[None, :], tl.where((row == _QUERY)[:, None], q[None, :], 0.0).to(dtype))
    if NORMALIZE:
        x = unit(x.to(tl.float32), BLOCK, D).to(dtype)
    key = only(x.to(tl.float32), row, _KEY).to(dtype)

    SUMS, KEYS, VALUES = SUMS + item * CHUNK, KEYS + (s * HK + key_head) * (CHUNK * D), VALUES + item * (CHUNK * DV)
    INVERSE += item * (BLOCK * BLOCK)
    before = tl.load(SUMS + t - 1, mask=t > 0, other=0.0)
    total = before + tl.load(G + item).to(tl.float32)
    beta, grown = tl.load(BETA + item).to(tl.float32), tl.exp(total)
    is_closed = r < begin
    closed_keys = tl.load(KEYS + r[:, None] * D + d[None, :], mask=is_closed[:, None], other=0.0)
    closed_u = tl.load(VALUES + r[:, None] * DV + c[None, :], mask=is_closed[:, None], other=0.0)
    closed_sums = tl.load(SUMS + r, mask=is_closed, other=0.0)
    is_held, is_new = row < i, row == i
    block_keys = tl.load(KEYS + (begin + row)[:, None] * D + d[None, :], mask=is_held[:, None], other=0.0)
    block_keys = tl.where(is_new[:, None], key[None, :], block_keys)
    sides = tl.load(VALUES + (begin + row)[:, None] * DV + c[None, :], mask=is_held[:, None], other=0.0)
    block_sums = tl.load(SUMS + begin + row, mask=is_held, other=0.0)
    block_sums = tl.where(is_new, total, block_sums)

    base = dot(x, state.to(dtype), tl.zeros([BLOCK, WIDTH], tl.float32))
    v = tl.load(V + s * v_batch + head * v_head + c).to(tl.float32)
    is_query = tl.broadcast_to((row == _QUERY)[:, None], base.shape)
    acc = tl.where(is_query, times(base, grown), minus(tl.broadcast_to(v[None, :], base.shape), grown, base))
    between = tl.exp(tl.where(is_closed, total - closed_sums, 0.0))
    mixed = times(dot(x, tl.trans(closed_keys), tl.zeros([BLOCK, CHUNK], tl.float32)), between[None, :])
    mixed = tl.where(is_closed[None, :], tl.where((row == _QUERY)[:, None], mixed, -mixed), 0.0)
    acc = dot(mixed.to(dtype), closed_u, acc)

    between = tl.exp(tl.where(row <= i, total - block_sums, 0.0))
    mixed = times(dot(x, tl.trans(block_keys), tl.zeros([BLOCK, BLOCK], tl.float32)), between[None, :])
    below = tl.where(is_held, only(mixed, row, _KEY), 0.0)
    new = inverse_row(times(below, beta), INVERSE, i)
    inverse_place = INVERSE + row[:, None] * BLOCK + row[None, :]
    inverse = tl.load(inverse_place, mask=is_held[:, None] & (row[None, :] <= row[:, None]), other=0.0)
    inverse = tl.where(is_new[:, None], new[None, :], inverse)
    side = times(only(acc, row, _KEY), beta).to(dtype)
    sides = tl.where(is_new[:, None], side[None, :], sides)
    u = dot(inverse.to(dtype), sides, tl.zeros([BLOCK, WIDTH], tl.float32)).to(dtype)
    scores = tl.where((row == _QUERY)[:, None] & (row <= i)[None, :], mixed, 0.0).to(dtype)
    o = only(dot(scores, u, acc), row, _QUERY) * scale
    tl.store(OUT + item * DV + c, o.to(OUT.dtype.element_ty))

    is_whole = i == BLOCK - 1
    value_place = VALUES + (begin + row)[:, None] * DV + c[None, :]
    tl.store(value_place, tl.where(is_whole, u, sides), mask=(is_new | is_whole)[:, None])
    if part == 0:
        tl.store(SUMS + t, total)
        tl.store(INVERSE + i * BLOCK + row, new)
        if head % (HV // HK) == 0:
            tl.store(KEYS + t * D + d, key)
    if t == CHUNK - 1:
        state = times(state, grown)
        fading = tl.exp(tl.where(is_closed, total - closed_sums, 0.0))
        faded = times(closed_u.to(tl.float32), fading[:, None]).to(dtype)
        state = dot(tl.trans(closed_keys), faded, state)
        faded = times(u.to(tl.float32), tl.exp(total - block_sums)[:, None]).to(dtype)
        state = dot(tl.trans(block_keys), faded, state)
        tl.store(state_place, state)
