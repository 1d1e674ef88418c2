"""The passes over the chunks of a sequence that the backward pass takes: ``replay`` forward, ``reverse`` backward.

``replay`` writes the rounded states at the start of chunks and the pseudo values, as ``scan`` has them. ``reverse``
holds WIDTH columns of the gradient of a head's state. Of each chunk, blocks of 16 rows in descending order: ``du =
scale P^T do``, then plus ``exp(G_64 - G) k dS``, then less what later blocks give; ``dx = inverse^T du``, the gradient
of ``beta x``. The state's gradient takes blocks in ascending order, a block's queries before its keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.gated_delta.backends.triton.scan import block_of, next_state, rows_of, unit_rows
from rl_kernels.gated_delta.backends.triton.tiles import BLOCK, CHUNK, dot, minus, scaled, sequence_at, times

SIZES = ("tokens", "chunks")


@triton.jit
def put_block(X, x, columns, INDEX: tl.constexpr, DV: tl.constexpr):
    """Write block INDEX of ``X[64, Dv]``."""
    row = tl.arange(0, BLOCK) + INDEX * BLOCK
    tl.store(X + row[:, None] * DV + columns[None, :], x)


@triton.jit(do_not_specialize=SIZES)
def replay(
    UNIT_K, V, BETA, SUMS, BELOW, INVERSE, INITIAL, STATES, U, BOUNDS, STARTS,
    tokens, chunks, v_batch, v_token, v_head,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write ``STATES[slots, Hv, Dk, Dv]`` at the start of chunks, rounded, and ``U``. Grid: DV / WIDTH, Hv, sequences.

    ``U[slots, Hv, 64, Dv]``; INITIAL may be None.
    """
    part, head, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, begin, count, none, slot = sequence_at(s, BOUNDS, STARTS, None, tokens, chunks)
    columns = part * WIDTH + tl.arange(0, WIDTH)
    place = tl.arange(0, D)[:, None] * DV + columns[None, :]
    state = tl.zeros([D, WIDTH], tl.float32)
    if INITIAL is not None:
        state = tl.load(INITIAL + (s.to(tl.int64) * HV + head) * (D * DV) + place)
    v_base = V + batch.to(tl.int64) * v_batch + begin.to(tl.int64) * v_token + head * v_head
    beta_base = BETA + (batch.to(tl.int64) * tokens + begin) * HV + head
    for chunk in range(0, tl.cdiv(count, CHUNK)):
        item = (slot + chunk).to(tl.int64)
        keys = UNIT_K + (item * HK + head // (HV // HK)) * (CHUNK * D)
        item = item * HV + head
        sums, values = SUMS + item * CHUNK, U + item * (CHUNK * DV)
        factor = state.to(UNIT_K.dtype.element_ty)
        tl.store(STATES + item * (D * DV) + place, factor)
        _, u0, _, u1, _, u2, _, u3 = rows_of(
            keys, v_base, sums, BELOW + item * (CHUNK * CHUNK), INVERSE + item * (CHUNK * BLOCK), beta_base, None,
            factor, none + chunk * CHUNK, count, v_token, columns, HV, D, DV, WIDTH,
        )  # fmt: skip
        put_block(values, u0, columns, 0, DV)
        put_block(values, u1, columns, 1, DV)
        put_block(values, u2, columns, 2, DV)
        put_block(values, u3, columns, 3, DV)
        state = next_state(state, keys, sums, u0, u1, u2, u3, D)


@triton.jit
def grad_block(GRAD, first, count, columns, INDEX: tl.constexpr, HV: tl.constexpr, DV: tl.constexpr):
    """Return a block of rows of the output's gradient; row 0 of the chunk is token ``first`` of GRAD."""
    j = first + tl.arange(0, BLOCK) + INDEX * BLOCK
    place = GRAD + j.to(tl.int64)[:, None] * (HV * DV) + columns[None, :]
    return tl.load(place, mask=(j < count)[:, None], other=0.0)


@triton.jit
def from_outside(du, KEYS, SUMS, factor, scale, INDEX: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Return a block's gradient of u: that through scores, not scaled yet, and that through the next state."""
    row = tl.arange(0, BLOCK) + INDEX * BLOCK
    fading = tl.exp(tl.load(SUMS + CHUNK - 1) - tl.load(SUMS + row))
    base = dot(unit_rows(KEYS, INDEX, D), factor, tl.zeros([BLOCK, WIDTH], tl.float32))
    return minus(scaled(du, scale), -fading[:, None], base)


@triton.jit
def solve_transposed(
    du, DX, DVALUES, INVERSE, BETA, first, count, columns, INDEX: tl.constexpr, HV: tl.constexpr, DV: tl.constexpr
):
    """Return a block's gradient of v, rounded; write it, and the gradient of ``beta x``."""
    row = tl.arange(0, BLOCK) + INDEX * BLOCK
    j, c = first + row, tl.arange(0, BLOCK)
    dtype = DX.dtype.element_ty
    beta = tl.load(BETA + j.to(tl.int64) * HV, mask=j < count, other=0.0).to(tl.float32)
    inverse = tl.load(INVERSE + row[:, None] * BLOCK + c[None, :]).to(dtype)
    dx = dot(tl.trans(inverse), du.to(dtype), tl.zeros(du.shape, tl.float32))
    dv = times(dx, beta[:, None]).to(dtype)
    put_block(DX, dx.to(dtype), columns, INDEX, DV)
    tl.store(DVALUES + j.to(tl.int64)[:, None] * (HV * DV) + columns[None, :], dv, mask=(j < count)[:, None])
    return dv


@triton.jit
def add_block_gradient(dstate, QUERIES, KEYS, SUMS, grad, dv, scale, INDEX: tl.constexpr, D: tl.constexpr):
    """Return the gradient of the state plus what a block's outputs and right sides give."""
    grown = tl.exp(tl.load(SUMS + tl.arange(0, BLOCK) + INDEX * BLOCK))
    left = times(grad.to(tl.float32), scaled(grown, scale)[:, None]).to(grad.dtype)
    dstate = dot(tl.trans(unit_rows(QUERIES, INDEX, D)), left, dstate)
    right = times(dv.to(tl.float32), -grown[:, None]).to(dv.dtype)
    return dot(tl.trans(unit_rows(KEYS, INDEX, D)), right, dstate)


@triton.jit(do_not_specialize=SIZES)
def reverse(
    UNIT_Q, UNIT_K, BETA, SUMS, BELOW, SCORES, INVERSE, GRAD, GRAD_STATE, DSTATES, DX, DVALUES, DINITIAL,
    BOUNDS, STARTS, scale, tokens, chunks,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the gradients of v, of ``beta x`` and of the states after chunks. Grid: DV / WIDTH, Hv, sequences.

    ``DX[slots, Hv, 64, Dv]``; ``DSTATES[slots, Hv, Dk, Dv]``, rounded; ``DVALUES[B, T, Hv, Dv]``. GRAD_STATE, and
    DINITIAL, which is that of the initial state, may be None.
    """
    part, head, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, begin, count, none, slot = sequence_at(s, BOUNDS, STARTS, None, tokens, chunks)
    columns = part * WIDTH + tl.arange(0, WIDTH)
    place = tl.arange(0, D)[:, None] * DV + columns[None, :]
    state_place = (s.to(tl.int64) * HV + head) * (D * DV) + place
    dstate = tl.zeros([D, WIDTH], tl.float32)
    if GRAD_STATE is not None:
        dstate = tl.load(GRAD_STATE + state_place)
    token_0 = (batch.to(tl.int64) * tokens + begin) * HV + head
    beta, grads, dvalues = BETA + token_0, GRAD + token_0 * DV, DVALUES + token_0 * DV
    zeros = tl.zeros([BLOCK, WIDTH], tl.float32)
    blocks = tl.cdiv(count, CHUNK)
    for back in range(0, blocks):
        chunk = blocks - 1 - back
        first, item = none + chunk * CHUNK, (slot + chunk).to(tl.int64)
        keys = UNIT_K + (item * HK + head // (HV // HK)) * (CHUNK * D)
        queries = UNIT_Q + (item * HK + head // (HV // HK)) * (CHUNK * D)
        item = item * HV + head
        sums, inverse, dx = SUMS + item * CHUNK, INVERSE + item * (CHUNK * BLOCK), DX + item * (CHUNK * DV)
        below, scores = BELOW + item * (CHUNK * CHUNK), SCORES + item * (CHUNK * CHUNK)
        factor = dstate.to(UNIT_K.dtype.element_ty)
        tl.store(DSTATES + item * (D * DV) + place, factor)
        g0 = grad_block(grads, first, count, columns, 0, HV, DV)
        g1 = grad_block(grads, first, count, columns, 1, HV, DV)
        g2 = grad_block(grads, first, count, columns, 2, HV, DV)
        g3 = grad_block(grads, first, count, columns, 3, HV, DV)

        du = dot(tl.trans(block_of(scores, 3, 3)), g3, zeros)
        du = from_outside(du, keys, sums, factor, scale, 3, D, WIDTH)
        dv3 = solve_transposed(du, dx, dvalues, inverse, beta, first, count, columns, 3, HV, DV)
        du = dot(tl.trans(block_of(scores, 3, 2)), g3, dot(tl.trans(block_of(scores, 2, 2)), g2, zeros))
        du = from_outside(du, keys, sums, factor, scale, 2, D, WIDTH)
        du = dot(tl.trans(block_of(below, 3, 2)), dv3, du)
        dv2 = solve_transposed(du, dx, dvalues, inverse, beta, first, count, columns, 2, HV, DV)
        du = dot(tl.trans(block_of(scores, 2, 1)), g2, dot(tl.trans(block_of(scores, 1, 1)), g1, zeros))
        du = dot(tl.trans(block_of(scores, 3, 1)), g3, du)
        du = from_outside(du, keys, sums, factor, scale, 1, D, WIDTH)
        du = dot(tl.trans(block_of(below, 2, 1)), dv2, dot(tl.trans(block_of(below, 3, 1)), dv3, du))
        dv1 = solve_transposed(du, dx, dvalues, inverse, beta, first, count, columns, 1, HV, DV)
        du = dot(tl.trans(block_of(scores, 1, 0)), g1, dot(tl.trans(block_of(scores, 0, 0)), g0, zeros))
        du = dot(tl.trans(block_of(scores, 3, 0)), g3, dot(tl.trans(block_of(scores, 2, 0)), g2, du))
        du = from_outside(du, keys, sums, factor, scale, 0, D, WIDTH)
        du = dot(tl.trans(block_of(below, 2, 0)), dv2, dot(tl.trans(block_of(below, 3, 0)), dv3, du))
        du = dot(tl.trans(block_of(below, 1, 0)), dv1, du)
        dv0 = solve_transposed(du, dx, dvalues, inverse, beta, first, count, columns, 0, HV, DV)

        dstate = times(dstate, tl.exp(tl.load(sums + CHUNK - 1)))
        dstate = add_block_gradient(dstate, queries, keys, sums, g0, dv0, scale, 0, D)
        dstate = add_block_gradient(dstate, queries, keys, sums, g1, dv1, scale, 1, D)
        dstate = add_block_gradient(dstate, queries, keys, sums, g2, dv2, scale, 2, D)
        dstate = add_block_gradient(dstate, queries, keys, sums, g3, dv3, scale, 3, D)
    if DINITIAL is not None:
        tl.store(DINITIAL + state_place, dstate)
