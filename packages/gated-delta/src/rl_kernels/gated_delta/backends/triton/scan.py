"""The pass over the chunks of a sequence: a program holds WIDTH columns of one head's state.

Of each chunk, blocks of 16 rows in ascending order: ``x = v - exp(G) k S``, then less what earlier blocks give, one
product of 16 rows after the other; ``u = inverse (beta x)``; ``o = exp(G) q S``, then plus what blocks up to its own
give. The state takes blocks in ascending order. A chunk needs the state before it, so its chain of products is what
takes time: eight products of 16 x 16 and one over D.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib.arithmetic import product
from rl_kernels.gated_delta.backends.triton.tiles import BLOCK, CHUNK, dot, minus, rows_at, sequence_at, times

SIZES = ("tokens", "chunks")


@triton.jit
def block_of(X, ROW: tl.constexpr, COLUMN: tl.constexpr):
    """Return the block ``[16, 16]`` at a row and column of blocks of ``X[64, 64]``."""
    r, c = tl.arange(0, BLOCK) + ROW * BLOCK, tl.arange(0, BLOCK) + COLUMN * BLOCK
    return tl.load(X + r[:, None] * CHUNK + c[None, :])


@triton.jit
def unit_rows(X, INDEX: tl.constexpr, D: tl.constexpr):
    """Return block INDEX of the rows of ``X[64, D]``."""
    r, d = tl.arange(0, BLOCK) + INDEX * BLOCK, tl.arange(0, D)
    return tl.load(X + r[:, None] * D + d[None, :])


@triton.jit
def side_of(
    KEYS, V, SUMS, factor, first, count, v_token, columns, INDEX: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr
):
    """Return ``v - exp(G) k S`` of a block of rows; row 0 of the chunk is token ``first`` of V."""
    row = tl.arange(0, BLOCK) + INDEX * BLOCK
    j = first + row
    v = rows_at(V, 0 * first, j, 0 * first, (j >= 0) & (j < count), 0, v_token, 0, columns).to(tl.float32)
    keys_state = dot(unit_rows(KEYS, INDEX, D), factor, tl.zeros([BLOCK, WIDTH], tl.float32))
    return minus(v, tl.exp(tl.load(SUMS + row))[:, None], keys_state)


@triton.jit
def solve(
    x, factor, INVERSE, BETA, HELD, first, count, columns, INDEX: tl.constexpr, HV: tl.constexpr, DV: tl.constexpr
):
    """Return the scaled right sides and the pseudo values of a block, both rounded; those of the cache's rows are HELD.

    Before ``first`` of a sequence's first chunk are its rows in the cache.
    """
    row = tl.arange(0, BLOCK) + INDEX * BLOCK
    j = first + row
    beta = tl.load(BETA + j.to(tl.int64) * HV, mask=(j >= 0) & (j < count), other=0.0).to(tl.float32)
    side = times(x, beta[:, None]).to(factor.dtype)
    c = tl.arange(0, BLOCK)
    inverse = tl.load(INVERSE + row[:, None] * BLOCK + c[None, :]).to(factor.dtype)
    if HELD is not None:
        is_held = (j < 0)[:, None]
        held = tl.load(HELD + row[:, None] * DV + columns[None, :], mask=is_held, other=0.0)
        side = tl.where(is_held, held, side)
        u = dot(inverse, side, tl.zeros(x.shape, tl.float32)).to(factor.dtype)
        # A block that the cache has whole holds pseudo values.
        u = tl.where(first + INDEX * BLOCK + BLOCK <= 0, held, u)
    else:
        u = dot(inverse, side, tl.zeros(x.shape, tl.float32)).to(factor.dtype)
    return side, u


@triton.jit
def queries_state(QUERIES, SUMS, factor, INDEX: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Return ``exp(G) q S`` of a block of rows."""
    row = tl.arange(0, BLOCK) + INDEX * BLOCK
    base = dot(unit_rows(QUERIES, INDEX, D), factor, tl.zeros([BLOCK, WIDTH], tl.float32))
    return times(base, tl.exp(tl.load(SUMS + row))[:, None])


@triton.jit
def put_rows(OUT, o, scale, first, count, out_token, columns, INDEX: tl.constexpr):
    """Write a block of rows of the output."""
    j = first + tl.arange(0, BLOCK) + INDEX * BLOCK
    place = OUT + j.to(tl.int64)[:, None] * out_token + columns[None, :]
    tl.store(place, (o * scale).to(OUT.dtype.element_ty), mask=((j >= 0) & (j < count))[:, None])


@triton.jit
def add_block(state, KEYS, SUMS, u, last, INDEX: tl.constexpr, D: tl.constexpr):
    """Return the state plus what a block of rows adds at the end of the chunk."""
    row = tl.arange(0, BLOCK) + INDEX * BLOCK
    faded = times(u.to(tl.float32), tl.exp(last - tl.load(SUMS + row))[:, None]).to(u.dtype)
    return dot(tl.trans(unit_rows(KEYS, INDEX, D)), faded, state)


@triton.jit
def hold_block(HELD, side, u, used, columns, INDEX: tl.constexpr, DV: tl.constexpr):
    """Write a block to the cache's values: pseudo values if it is whole, else right sides."""
    row = tl.arange(0, BLOCK) + INDEX * BLOCK
    value = tl.where(used >= INDEX * BLOCK + BLOCK, u, side)
    tl.store(HELD + row[:, None] * DV + columns[None, :], value)


@triton.jit
def hold_chunk(
    KEYS, SUMS, INVERSE, HELD_KEYS, HELD_SUMS, HELD_INVERSE, used, is_leader, D: tl.constexpr
):
    """Copy the keys of a chunk, its sums of decays, and the inverse of its open block to the cache."""
    row, d = tl.arange(0, CHUNK), tl.arange(0, D)
    if is_leader:
        place = row[:, None] * D + d[None, :]
        tl.store(HELD_KEYS + place, tl.load(KEYS + place))
    tl.store(HELD_SUMS + row, tl.load(SUMS + row))
    opened = used // BLOCK % (CHUNK // BLOCK)
    at = tl.arange(0, BLOCK * BLOCK)
    tl.store(HELD_INVERSE + at, tl.load(INVERSE + opened * (BLOCK * BLOCK) + at))


@triton.jit(do_not_specialize=SIZES)
def scan(
    UNIT_Q, UNIT_K, V, BETA, SUMS, BELOW, SCORES, INVERSE, INITIAL, OUT, STATE,
    HELD_KEYS, HELD_VALUES, HELD_SUMS, HELD_INVERSE, BOUNDS, STARTS, LENGTHS, scale,
    tokens, chunks, v_batch, v_token, v_head,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the output of one sequence, value head and WIDTH columns, and the last state. Grid: DV / WIDTH, Hv, sequences.

    INITIAL and STATE may be None. With a cache, LENGTHS is not None, STATE is the cache's state at the start of the
    last chunk, and the rows of that chunk are written.
    """
    part, head, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, begin, count, opened, slot = sequence_at(s, BOUNDS, STARTS, LENGTHS, tokens, chunks)
    row_of_state = (s.to(tl.int64) * HV + head) * D + tl.arange(0, D)
    columns = part * WIDTH + tl.arange(0, WIDTH)
    state_place = row_of_state[:, None] * DV + columns[None, :]
    state = tl.zeros([D, WIDTH], tl.float32)
    if INITIAL is not None:
        state = tl.load(INITIAL + state_place)
    total = tl.where(count > 0, opened + count, 0)
    token_0 = batch.to(tl.int64) * tokens + begin
    v_base = V + batch.to(tl.int64) * v_batch + begin.to(tl.int64) * v_token + head * v_head
    beta_base, out_base = BETA + token_0 * HV + head, OUT + (token_0 * HV + head) * DV
    key_head, sequence_head = head // (HV // HK), s.to(tl.int64) * HV + head
    held = None
    if LENGTHS is not None:
        held = HELD_VALUES + sequence_head * (CHUNK * DV)
    for chunk in range(0, tl.cdiv(total, CHUNK)):
        item = (slot + chunk).to(tl.int64)
        keys, queries = UNIT_K + (item * HK + key_head) * (CHUNK * D), UNIT_Q + (item * HK + key_head) * (CHUNK * D)
        item = item * HV + head
        sums, inverse = SUMS + item * CHUNK, INVERSE + item * (CHUNK * BLOCK)
        below, scores = BELOW + item * (CHUNK * CHUNK), SCORES + item * (CHUNK * CHUNK)
        first = chunk * CHUNK - opened
        factor = state.to(UNIT_K.dtype.element_ty)

        x0 = side_of(keys, v_base, sums, factor, first, count, v_token, columns, 0, D, WIDTH)
        x1 = side_of(keys, v_base, sums, factor, first, count, v_token, columns, 1, D, WIDTH)
        x2 = side_of(keys, v_base, sums, factor, first, count, v_token, columns, 2, D, WIDTH)
        x3 = side_of(keys, v_base, sums, factor, first, count, v_token, columns, 3, D, WIDTH)
        side0, u0 = solve(x0, factor, inverse, beta_base, held, first, count, columns, 0, HV, DV)
        x1 = dot(block_of(below, 1, 0), u0, x1)
        side1, u1 = solve(x1, factor, inverse, beta_base, held, first, count, columns, 1, HV, DV)
        x2 = dot(block_of(below, 2, 1), u1, dot(block_of(below, 2, 0), u0, x2))
        side2, u2 = solve(x2, factor, inverse, beta_base, held, first, count, columns, 2, HV, DV)
        x3 = dot(block_of(below, 3, 1), u1, dot(block_of(below, 3, 0), u0, x3))
        x3 = dot(block_of(below, 3, 2), u2, x3)
        side3, u3 = solve(x3, factor, inverse, beta_base, held, first, count, columns, 3, HV, DV)

        o = dot(block_of(scores, 0, 0), u0, queries_state(queries, sums, factor, 0, D, WIDTH))
        put_rows(out_base, o, scale, first, count, HV * DV, columns, 0)
        o = dot(block_of(scores, 1, 0), u0, queries_state(queries, sums, factor, 1, D, WIDTH))
        o = dot(block_of(scores, 1, 1), u1, o)
        put_rows(out_base, o, scale, first, count, HV * DV, columns, 1)
        o = dot(block_of(scores, 2, 0), u0, queries_state(queries, sums, factor, 2, D, WIDTH))
        o = dot(block_of(scores, 2, 2), u2, dot(block_of(scores, 2, 1), u1, o))
        put_rows(out_base, o, scale, first, count, HV * DV, columns, 2)
        o = dot(block_of(scores, 3, 0), u0, queries_state(queries, sums, factor, 3, D, WIDTH))
        o = dot(block_of(scores, 3, 2), u2, dot(block_of(scores, 3, 1), u1, o))
        o = dot(block_of(scores, 3, 3), u3, o)
        put_rows(out_base, o, scale, first, count, HV * DV, columns, 3)

        used = tl.minimum(total - chunk * CHUNK, CHUNK)
        if LENGTHS is not None:
            if chunk * CHUNK + used == total:
                hold_block(held, side0, u0, used, columns, 0, DV)
                hold_block(held, side1, u1, used, columns, 1, DV)
                hold_block(held, side2, u2, used, columns, 2, DV)
                hold_block(held, side3, u3, used, columns, 3, DV)
                if part == 0:
                    held_keys = HELD_KEYS + (s.to(tl.int64) * HK + key_head) * (CHUNK * D)
                    hold_chunk(
                        keys, sums, inverse, held_keys, HELD_SUMS + sequence_head * CHUNK,
                        HELD_INVERSE + sequence_head * (BLOCK * BLOCK), used, head % (HV // HK) == 0, D,
                    )  # fmt: skip
        # An open chunk is not added to the cache's state.
        if (LENGTHS is None) | (used == CHUNK):
            last = tl.load(sums + CHUNK - 1)
            state = times(state, tl.exp(last))
            state = add_block(state, keys, sums, u0, last, 0, D)
            state = add_block(state, keys, sums, u1, last, 1, D)
            state = add_block(state, keys, sums, u2, last, 2, D)
            state = add_block(state, keys, sums, u3, last, 3, D)
    if STATE is not None:
        tl.store(STATE + state_place, state)
