"""The passes over the chunks of a sequence that the backward pass takes: ``replay`` forward, ``reverse`` backward.

``replay`` writes the rounded states at the start of chunks and the residuals, as ``scan`` has them. ``reverse`` holds
WIDTH columns of the gradient of a head's state: ``dx = W dS' + scale M^T do``, ``dS = exp(G_63) dS' + q^T (scale exp(G)
do) - k^T (exp(G) dx)``. Only W dS' and the last product wait for the chunk after.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib.arithmetic import product
from rl_kernels.gated_delta.backends.triton.scan import next_state, residuals_of
from rl_kernels.gated_delta.triton_lib.tiles import (
    CHUNK,
    dot,
    dot_rest,
    row_sum,
    scaled,
    sequence_at,
    times,
    whole_tile,
)

SIZES = ("tokens", "chunks")


@triton.jit(do_not_specialize=SIZES)
def replay(
    UNIT_K, V, SUMS, WEIGHTS, INITIAL, STATES, RESIDUALS, BOUNDS, STARTS,
    tokens, chunks, v_batch, v_token, v_head,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write ``STATES[slots, Hv, Dk, Dv]`` at the start of chunks, rounded. Grid: DV / WIDTH, Hv, sequences.

    ``RESIDUALS[slots, Hv, 64, Dv]``; INITIAL may be None.
    """
    part, head, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, begin, count, _, slot = sequence_at(s, BOUNDS, STARTS, None, tokens, chunks)
    r, columns = tl.arange(0, CHUNK), part * WIDTH + tl.arange(0, WIDTH)
    place = tl.arange(0, D)[:, None] * DV + columns[None, :]
    state = tl.zeros([D, WIDTH], tl.float32)
    if INITIAL is not None:
        state = tl.load(INITIAL + (s.to(tl.int64) * HV + head) * (D * DV) + place)
    V += batch.to(tl.int64) * v_batch + begin.to(tl.int64) * v_token + head.to(tl.int64) * v_head
    for chunk in range(0, tl.cdiv(count, CHUNK)):
        key_item, item = (slot + chunk).to(tl.int64) * HK + head // (HV // HK), (slot + chunk).to(tl.int64) * HV + head
        sums, factor = tl.load(SUMS + item * CHUNK + r), state.to(UNIT_K.dtype.element_ty)
        tl.store(STATES + item * (D * DV) + place, factor)
        k = whole_tile(UNIT_K, key_item, CHUNK, D)
        x = residuals_of(k, V, sums, factor, r + chunk * CHUNK, count, v_token, columns)
        tl.store(RESIDUALS + item * (CHUNK * DV) + r[:, None] * DV + columns[None, :], x)
        state = next_state(state, whole_tile(WEIGHTS, item, CHUNK, D), x, SUMS + item * CHUNK)


@triton.jit(do_not_specialize=SIZES)
def reverse(
    UNIT_Q, UNIT_K, SUMS, MIXING, WEIGHTS, STATES, GRAD, GRAD_STATE, DSTATES, KEPT, DVALUES, DINITIAL,
    BOUNDS, STARTS, scale, tokens, chunks,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the gradients of v and of the states after chunks. Grid: DV / WIDTH, Hv, sequences.

    ``DVALUES[B, T, Hv, Dv]``; ``DSTATES[slots, Hv, Dk, Dv]``, rounded; ``KEPT[slots, Hv, Dv / WIDTH, Dk]``, FP32: sums
    of the state before a chunk times the gradient of that after it. GRAD_STATE, and DINITIAL, which is that of the
    initial state, may be None.
    """
    part, head, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, begin, count, _, slot = sequence_at(s, BOUNDS, STARTS, None, tokens, chunks)
    r, d, columns = tl.arange(0, CHUNK), tl.arange(0, D), part * WIDTH + tl.arange(0, WIDTH)
    place = d[:, None] * DV + columns[None, :]
    state_place = (s.to(tl.int64) * HV + head) * (D * DV) + place
    dstate = tl.zeros([D, WIDTH], tl.float32)
    if GRAD_STATE is not None:
        dstate = tl.load(GRAD_STATE + state_place)
    token_0 = ((batch.to(tl.int64) * tokens + begin) * HV + head) * DV
    zeros = tl.zeros([CHUNK, WIDTH], tl.float32)
    blocks = tl.cdiv(count, CHUNK)
    for back in range(0, blocks):
        chunk = blocks - 1 - back
        key_item, item = (slot + chunk).to(tl.int64) * HK + head // (HV // HK), (slot + chunk).to(tl.int64) * HV + head
        factor = dstate.to(UNIT_K.dtype.element_ty)
        tl.store(DSTATES + item * (D * DV) + place, factor)
        state = tl.load(STATES + item * (D * DV) + place)
        kept = row_sum(product(state.to(tl.float32), factor.to(tl.float32)))
        tl.store(KEPT + (item * (DV // WIDTH) + part) * D + d, kept)
        j = chunk * CHUNK + r
        token_place = token_0 + j.to(tl.int64)[:, None] * (HV * DV) + columns[None, :]
        grad = tl.load(GRAD + token_place, mask=(j < count)[:, None], other=0.0)
        grown, last = tl.exp(tl.load(SUMS + item * CHUNK + r)), tl.exp(tl.load(SUMS + item * CHUNK + CHUNK - 1))
        dx = scaled(dot(tl.trans(whole_tile(MIXING, item, CHUNK, CHUNK)), grad, zeros), scale)
        dqueries = times(grad.to(tl.float32), scaled(grown, scale)[:, None])
        q = tl.trans(whole_tile(UNIT_Q, key_item, CHUNK, D))
        dstate = dot(q, dqueries.to(factor.dtype), scaled(dstate, last))
        dstate = dot_rest(q, dqueries, dstate)
        dx = dot(whole_tile(WEIGHTS, item, CHUNK, D), factor, dx)
        tl.store(DVALUES + token_place, dx.to(factor.dtype), mask=(j < count)[:, None])
        dkeys = times(dx, -grown[:, None]).to(factor.dtype)
        dstate = dot(tl.trans(whole_tile(UNIT_K, key_item, CHUNK, D)), dkeys, dstate)
    if DINITIAL is not None:
        tl.store(DINITIAL + state_place, dstate)
