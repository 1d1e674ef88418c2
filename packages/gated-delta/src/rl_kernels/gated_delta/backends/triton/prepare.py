"""The kernels that need no state, all chunks at once: sums of decays, normalized rows, and products of each chunk.

A slot is the place of a chunk in the tensors that these kernels write: ``sequence_at`` says which. Of a chunk with
decays ``fade_t = exp(G_63 - G_t)``, ``prepare`` solves ``T = (1 + A)^-1 diag(beta)`` by forward substitution, row s
after row s - 1 with fused multiply-adds: a term of s = 0 comes first. Then ``M = P T`` and ``W = (fade T)^T k``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.gated_delta.triton_lib.tiles import (
    CHUNK,
    SIZES,
    STEP,
    between,
    dot,
    faded_inverse,
    plus,
    row_of,
    rows_at,
    sequence_at,
    sequence_of,
    tile_at,
    times,
    unit,
)


@triton.jit(do_not_specialize=SIZES)
def sum_decays(
    G, SUMS, HELD, BOUNDS, STARTS, LENGTHS, tokens, chunks, sequences, halvings, HV: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Write ``SUMS[slots, Hv, 64]``: the sums of g from the first row of a chunk, added row by row. Grid: slots.

    HELD, the sums of the cache, stand for its rows; it is None without a cache.
    """
    slot = tl.program_id(0)
    s = sequence_of(slot, BOUNDS, chunks, tokens, sequences, halvings)
    batch, first, count, opened, begin = sequence_at(s, BOUNDS, STARTS, LENGTHS, tokens, chunks)
    chunk = slot - begin
    if (count <= 0) | (chunk * CHUNK >= opened + count):
        return
    head, r = tl.arange(0, HEADS), tl.arange(0, CHUNK)
    is_head = head < HV
    total = tl.zeros([HEADS], tl.float32)
    sums = tl.zeros([HEADS, CHUNK], tl.float32)
    for row in tl.range(0, CHUNK, loop_unroll_factor=16):
        j = chunk * CHUNK + row - opened + 0 * head
        place = (batch.to(tl.int64) * tokens + first + j) * HV
        total += tl.load(G + place + head, mask=is_head & (j >= 0) & (j < count), other=0.0).to(tl.float32)
        if HELD is not None:
            is_held = is_head & (j < 0)
            held = tl.load(HELD + (s.to(tl.int64) * HV + head) * CHUNK + row, mask=is_held, other=0.0)
            total = tl.where(is_held, held, total)
        sums = tl.where(r[None, :] == row, total[:, None], sums)
    tl.store(SUMS + (slot.to(tl.int64) * HV + head)[:, None] * CHUNK + r[None, :], sums, mask=is_head[:, None])


@triton.jit(do_not_specialize=SIZES)
def normalize(
    Q, K, UNIT_Q, UNIT_K, HELD_KEYS, BOUNDS, STARTS, LENGTHS,
    tokens, chunks, sequences, halvings, q_batch, q_token, q_head, k_batch, k_token, k_head,
    HK: tl.constexpr, D: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Write ``UNIT_Q, UNIT_K[slots, Hk, 64, D]``: the rows of a chunk, zeros where it has none. Grid: slots, Hk."""
    slot, head = tl.program_id(0), tl.program_id(1)
    s = sequence_of(slot, BOUNDS, chunks, tokens, sequences, halvings)
    batch, first, count, opened, begin = sequence_at(s, BOUNDS, STARTS, LENGTHS, tokens, chunks)
    chunk = slot - begin
    if (count <= 0) | (chunk * CHUNK >= opened + count):
        return
    row, d = tl.arange(0, CHUNK), tl.arange(0, D)
    j = chunk * CHUNK + row - opened
    is_token = (j >= 0) & (j < count)
    dtype = UNIT_Q.dtype.element_ty
    q = rows_at(Q, batch, first + j, head, is_token, q_batch, q_token, q_head, d)
    k = rows_at(K, batch, first + j, head, is_token, k_batch, k_token, k_head, d)
    if NORMALIZE:
        q = unit(q.to(tl.float32)).to(dtype)
        k = unit(k.to(tl.float32)).to(dtype)
    if HELD_KEYS is not None:
        held_row = (s.to(tl.int64) * HK + head) * CHUNK + row
        held = tl.load(HELD_KEYS + held_row[:, None] * D + d[None, :], mask=(j < 0)[:, None], other=0.0)
        k = tl.where((j < 0)[:, None], held, k)
    place = ((slot.to(tl.int64) * HK + head) * CHUNK + row)[:, None] * D + d[None, :]
    tl.store(UNIT_Q + place, q)
    tl.store(UNIT_K + place, k)


@triton.jit
def right_side(diagonal, HELD, held, INDEX: tl.constexpr):
    """Return 16 rows of a diagonal matrix; the first ``held`` rows of the chunk are those of T in the cache."""
    row, c = (tl.arange(0, STEP) + INDEX * STEP)[:, None], tl.arange(0, CHUNK)[None, :]
    x = tl.where(row == c, diagonal[None, :], 0.0)
    if HELD is not None:
        is_held = row < held
        x = tl.where(is_held, tl.load(HELD + row * CHUNK + c, mask=is_held & (row >= c), other=0.0), x)
    return x


@triton.jit
def add_rows(x, block, SYSTEM):
    """Return 16 rows plus multiples of the rows of a block, in ascending order; the factors are columns of SYSTEM."""
    r = tl.arange(0, STEP)
    for s in tl.static_range(STEP):
        x = plus(x, tl.load(SYSTEM + s * CHUNK + r)[:, None], row_of(block, s)[None, :])
    return x


@triton.jit
def solve(x0, x1, x2, x3, SYSTEM):
    """Overwrite SYSTEM, the transpose of -A, with T, where ``(1 + A) T = x``, x in blocks of 16 rows.

    Each thread of two warps holds a column of T and reads all of A, so that no step needs a barrier. The block that is
    solved is x0, then those that were solved follow behind x3. T goes through memory: the terms of a product of joined
    blocks would be in another order.
    """
    r, c = tl.arange(0, STEP), tl.arange(0, CHUNK)
    system = SYSTEM
    for block in range(0, CHUNK // STEP):
        for s in tl.static_range(STEP - 1):
            later = plus(x0, tl.load(system + s * CHUNK + r)[:, None], row_of(x0, s)[None, :])
            x0 = tl.where(r[:, None] > s, later, x0)
        if block < 3:
            x1 = add_rows(x1, x0, system + STEP)
        if block < 2:
            x2 = add_rows(x2, x0, system + 2 * STEP)
        if block < 1:
            x3 = add_rows(x3, x0, system + 3 * STEP)
        x0, x1, x2, x3 = x1, x2, x3, x0
        system += STEP * CHUNK + STEP
    tl.debug_barrier()
    place = SYSTEM + r[:, None] * CHUNK + c[None, :]
    tl.store(place, x0)
    tl.store(place + STEP * CHUNK, x1)
    tl.store(place + 2 * STEP * CHUNK, x2)
    tl.store(place + 3 * STEP * CHUNK, x3)
    tl.debug_barrier()


@triton.jit
def products_of(X, UNIT_K, item, D: tl.constexpr, PART: tl.constexpr):
    """Return ``X[item] UNIT_K[item]^T``, ``[64, 64]``."""
    total = tl.zeros([CHUNK, CHUNK], tl.float32)
    for part in range(0, D // PART):
        columns = part * PART + tl.arange(0, PART)
        k = tile_at(UNIT_K, item, columns, CHUNK, D)
        total = dot(tile_at(X, item, columns, CHUNK, D), tl.trans(k), total)
    return total


@triton.jit(do_not_specialize=SIZES)
def prepare(
    UNIT_Q, UNIT_K, BETA, SUMS, MIXING, WEIGHTS, INVERSE, HELD_INVERSE, BOUNDS, STARTS, LENGTHS,
    tokens, chunks, sequences, halvings,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, FOR_GRADIENTS: tl.constexpr,
):  # fmt: skip
    """Write what the pass over chunks reads of one chunk and value head. Grid: slots, Hv.

    ``MIXING[slots, Hv, 64, 64]``: M; ``WEIGHTS[slots, Hv, 64, D]``: W; both rounded. ``INVERSE[slots, Hv, 64, 64]``,
    FP32: T, or ``(1 + A)^-1`` for gradients.
    """
    slot, head = tl.program_id(0), tl.program_id(1)
    s = sequence_of(slot, BOUNDS, chunks, tokens, sequences, halvings)
    batch, first, count, opened, begin = sequence_at(s, BOUNDS, STARTS, LENGTHS, tokens, chunks)
    chunk = slot - begin
    if (count <= 0) | (chunk * CHUNK >= opened + count):
        return
    r = tl.arange(0, CHUNK)
    row, c = r[:, None], r[None, :]
    dtype = UNIT_K.dtype.element_ty
    key_item, item = slot.to(tl.int64) * HK + head // (HV // HK), slot.to(tl.int64) * HV + head
    j = chunk * CHUNK + r - opened
    beta_place = (batch.to(tl.int64) * tokens + first + j) * HV + head
    beta = tl.load(BETA + beta_place, mask=(j >= 0) & (j < count), other=0.0).to(tl.float32)
    sums = tl.load(SUMS + item * CHUNK + r)
    products = times(products_of(UNIT_K, UNIT_K, key_item, D, PART), between(sums))
    held = tl.maximum(opened - chunk * CHUNK, 0)
    system = tl.where((row > c) & (row >= held), times(products, -beta[:, None]), 0.0)
    INVERSE += item * (CHUNK * CHUNK)
    tl.store(INVERSE + c * CHUNK + row, system)
    tl.debug_barrier()
    if HELD_INVERSE is not None:
        HELD_INVERSE += (s.to(tl.int64) * HV + head) * (CHUNK * CHUNK)
    diagonal = tl.full([CHUNK], 1.0, tl.float32) if FOR_GRADIENTS else beta
    x0, x1 = right_side(diagonal, HELD_INVERSE, held, 0), right_side(diagonal, HELD_INVERSE, held, 1)
    x2, x3 = right_side(diagonal, HELD_INVERSE, held, 2), right_side(diagonal, HELD_INVERSE, held, 3)
    solve(x0, x1, x2, x3, INVERSE)
    inverse = tl.load(INVERSE + row * CHUNK + c)
    if FOR_GRADIENTS:
        inverse = times(inverse, beta[None, :])
    # Loaded again, or the decays would take registers meanwhile.
    sums = tl.load(SUMS + item * CHUNK + r)
    scores = times(products_of(UNIT_Q, UNIT_K, key_item, D, PART), between(sums))
    scores = tl.where(row >= c, scores, 0.0).to(dtype)
    mixing = dot(scores, inverse.to(dtype), tl.zeros([CHUNK, CHUNK], tl.float32))
    tl.store(MIXING + item * (CHUNK * CHUNK) + row * CHUNK + c, mixing.to(dtype))
    faded = tl.trans(faded_inverse(inverse, sums, dtype))
    for part in range(0, D // PART):
        d = part * PART + tl.arange(0, PART)
        weights = dot(faded, tile_at(UNIT_K, key_item, d, CHUNK, D), tl.zeros([CHUNK, PART], tl.float32))
        tl.store(WEIGHTS + item * (CHUNK * D) + row * D + d[None, :], weights.to(dtype))
