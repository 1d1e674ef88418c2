"""The pass over the chunks of a sequence: a program holds WIDTH columns of one head's state in registers.

Of each chunk four products: ``x = v - exp(G) (k S)``, ``o = exp(G) (q S) + M x``, ``S' = exp(G_63) S + W^T x``. Only
k S and W^T x wait for the chunk before; loads depend on no product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.gated_delta.triton_lib.tiles import (
    CHUNK,
    dot,
    minus,
    rows_at,
    scaled,
    sequence_at,
    times,
    whole_tile,
)

SIZES = ("tokens", "chunks")


@triton.jit
def residuals_of(k, V, sums, factor, j, count, v_token, columns):
    """Return ``v - exp(G) (k S)``, rounded; row t is token ``j_t`` of V."""
    v = rows_at(V, 0 * count, j, 0 * count, (j >= 0) & (j < count), 0, v_token, 0, columns).to(tl.float32)
    keys_state = dot(k, factor, tl.zeros(v.shape, tl.float32))
    return minus(v, tl.exp(sums)[:, None], keys_state).to(factor.dtype)


@triton.jit
def next_state(state, weights, x, sums_at):
    """Return the state after a chunk with these residuals."""
    return dot(tl.trans(weights), x, scaled(state, tl.exp(tl.load(sums_at + CHUNK - 1))))


@triton.jit
def hold_chunk(KEYS, SUMS, INVERSE, HELD_KEYS, HELD_SUMS, HELD_INVERSE, is_leader, D: tl.constexpr):
    """Copy the keys of a chunk, its sums of decays, and its inverse to the cache."""
    r, d = tl.arange(0, CHUNK), tl.arange(0, D)
    if is_leader:
        place = r[:, None] * D + d[None, :]
        tl.store(HELD_KEYS + place, tl.load(KEYS + place))
    tl.store(HELD_SUMS + r, tl.load(SUMS + r))
    square = r[:, None] * CHUNK + r[None, :]
    tl.store(HELD_INVERSE + square, tl.load(INVERSE + square))


@triton.jit(do_not_specialize=SIZES)
def scan(
    UNIT_Q, UNIT_K, V, SUMS, MIXING, WEIGHTS, INVERSE, INITIAL, OUT, STATE,
    HELD_KEYS, HELD_RESIDUALS, HELD_SUMS, HELD_INVERSE, BOUNDS, STARTS, LENGTHS, scale,
    tokens, chunks, v_batch, v_token, v_head,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the output of one sequence, head and WIDTH columns, and the last state. Grid: DV / WIDTH, Hv, sequences.

    INITIAL and STATE may be None. With a cache, LENGTHS is not None, STATE is the cache's state at the start of the
    last chunk, and the rows of that chunk are written.
    """
    part, head, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, begin, count, opened, slot = sequence_at(s, BOUNDS, STARTS, LENGTHS, tokens, chunks)
    r, columns = tl.arange(0, CHUNK), part * WIDTH + tl.arange(0, WIDTH)
    state_place = ((s.to(tl.int64) * HV + head) * D + tl.arange(0, D))[:, None] * DV + columns[None, :]
    state = tl.zeros([D, WIDTH], tl.float32)
    if INITIAL is not None:
        state = tl.load(INITIAL + state_place)
    total = tl.where(count > 0, opened + count, 0)
    V += batch.to(tl.int64) * v_batch + begin.to(tl.int64) * v_token + head.to(tl.int64) * v_head
    OUT += ((batch.to(tl.int64) * tokens + begin) * HV + head) * DV
    key_head, sequence_head = head // (HV // HK), s.to(tl.int64) * HV + head
    held_place = (sequence_head * CHUNK + r)[:, None] * DV + columns[None, :]
    zeros = tl.zeros([CHUNK, WIDTH], tl.float32)
    for chunk in range(0, tl.cdiv(total, CHUNK)):
        key_item, item = (slot + chunk).to(tl.int64) * HK + key_head, (slot + chunk).to(tl.int64) * HV + head
        j = chunk * CHUNK - opened + r
        sums, factor = tl.load(SUMS + item * CHUNK + r), state.to(UNIT_K.dtype.element_ty)
        x = residuals_of(whole_tile(UNIT_K, key_item, CHUNK, D), V, sums, factor, j, count, v_token, columns)
        if LENGTHS is not None:
            held = tl.load(HELD_RESIDUALS + held_place, mask=(j < 0)[:, None], other=0.0)
            x = tl.where((j < 0)[:, None], held, x)
        queries_state = dot(whole_tile(UNIT_Q, key_item, CHUNK, D), factor, zeros)
        o = dot(whole_tile(MIXING, item, CHUNK, CHUNK), x, times(queries_state, tl.exp(sums)[:, None]))
        place = OUT + j.to(tl.int64)[:, None] * (HV * DV) + columns[None, :]
        tl.store(place, (o * scale).to(OUT.dtype.element_ty), mask=((j >= 0) & (j < count))[:, None])
        later = next_state(state, whole_tile(WEIGHTS, item, CHUNK, D), x, SUMS + item * CHUNK)
        if LENGTHS is None:
            state = later
        else:
            # An open chunk is not added to the cache's state.
            state = tl.where(total - chunk * CHUNK >= CHUNK, later, state)
            if total - chunk * CHUNK <= CHUNK:
                tl.store(HELD_RESIDUALS + held_place, x)
                if part == 0:
                    hold_chunk(
                        UNIT_K + key_item * (CHUNK * D), SUMS + item * CHUNK,
                        INVERSE + item * (CHUNK * CHUNK),
                        HELD_KEYS + (s.to(tl.int64) * HK + key_head) * (CHUNK * D), HELD_SUMS + sequence_head * CHUNK,
                        HELD_INVERSE + sequence_head * (CHUNK * CHUNK), head % (HV // HK) == 0, D,
                    )  # fmt: skip
    if STATE is not None:
        tl.store(STATE + state_place, state)
