"""The kernels that need no state: sums of decays, and products and inverses of each chunk, all chunks at once.

A slot is the place of a chunk in the tensors that these kernels write: ``sequence_at`` says which.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.gated_delta.backends.triton.tiles import (
    BLOCK,
    CHUNK,
    dot,
    minus,
    rows_at,
    sequence_at,
    sequence_of,
    times,
    unit,
)

SIZES = ("tokens", "chunks", "sequences", "halvings")


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
    head = tl.arange(0, HEADS)
    is_head = head < HV
    total = tl.zeros([HEADS], tl.float32)
    for row in tl.static_range(CHUNK):
        j = chunk * CHUNK + row - opened
        place = (batch.to(tl.int64) * tokens + first + j) * HV
        total += tl.load(G + place + head, mask=is_head & (j >= 0) & (j < count), other=0.0).to(tl.float32)
        if HELD is not None:
            is_held = is_head & (j < 0)
            held = tl.load(HELD + (s.to(tl.int64) * HV + head) * CHUNK + row, mask=is_held, other=0.0)
            total = tl.where(is_held, held, total)
        tl.store(SUMS + (slot.to(tl.int64) * HV + head) * CHUNK + row, total, mask=is_head)


@triton.jit
def inverse_of(system, start, is_held):
    """Return the inverses of ``1 + system`` for ``system[4, 16, 16]``, strictly lower; held rows are those of start."""
    row, column = tl.arange(0, BLOCK)[None, :, None], tl.arange(0, BLOCK)[None, None, :]
    system = tl.where(is_held, 0.0, system)
    inverse = tl.where(is_held, start, tl.where(row == column, 1.0, 0.0) + tl.zeros_like(system))
    for s in tl.static_range(BLOCK - 1):
        # Sums of one term and zeros.
        factor = tl.sum(tl.where(column == s, system, 0.0), 2)
        solved = tl.sum(tl.where(row == s, inverse, 0.0), 1)
        inverse = tl.where(row > s, minus(inverse, factor[:, :, None], solved[:, None, :]), inverse)
    return inverse


@triton.jit(do_not_specialize=SIZES)
def prepare(
    Q, K, BETA, SUMS, UNIT_Q, UNIT_K, BELOW, SCORES, INVERSE, HELD_KEYS, HELD_INVERSE, BOUNDS, STARTS, LENGTHS,
    tokens, chunks, sequences, halvings, q_batch, q_token, q_head, k_batch, k_token, k_head,
    HK: tl.constexpr, HV: tl.constexpr, D: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Write what the pass over chunks reads of one chunk and value head. Grid: slots, Hv.

    ``UNIT_Q, UNIT_K[slots, Hk, 64, D]``; ``BELOW, SCORES[slots, Hv, 64, 64]``: minus the decayed products of keys, and
    those of queries and keys, rounded; ``INVERSE[slots, Hv, 4, 16, 16]``, FP32.
    """
    slot, head = tl.program_id(0), tl.program_id(1)
    s = sequence_of(slot, BOUNDS, chunks, tokens, sequences, halvings)
    batch, first, count, opened, begin = sequence_at(s, BOUNDS, STARTS, LENGTHS, tokens, chunks)
    chunk = slot - begin
    if (count <= 0) | (chunk * CHUNK >= opened + count):
        return
    key_head = head // (HV // HK)
    row, d = tl.arange(0, CHUNK), tl.arange(0, D)
    j = chunk * CHUNK + row - opened
    is_token = (j >= 0) & (j < count)
    dtype = UNIT_Q.dtype.element_ty
    q = rows_at(Q, batch, first + j, key_head, is_token, q_batch, q_token, q_head, d)
    k = rows_at(K, batch, first + j, key_head, is_token, k_batch, k_token, k_head, d)
    if NORMALIZE:
        q = unit(q.to(tl.float32), CHUNK, D).to(dtype)
        k = unit(k.to(tl.float32), CHUNK, D).to(dtype)
    if HELD_KEYS is not None:
        held_row = (s.to(tl.int64) * HK + key_head) * CHUNK + row
        held = tl.load(HELD_KEYS + held_row[:, None] * D + d[None, :], mask=(j < 0)[:, None], other=0.0)
        k = tl.where((j < 0)[:, None], held, k)
    if head % (HV // HK) == 0:
        unit_place = ((slot.to(tl.int64) * HK + key_head) * CHUNK + row)[:, None] * D + d[None, :]
        tl.store(UNIT_Q + unit_place, q)
        tl.store(UNIT_K + unit_place, k)

    item = slot.to(tl.int64) * HV + head
    sums = tl.load(SUMS + item * CHUNK + row)
    is_past = row[:, None] >= row[None, :]
    between = tl.exp(tl.where(is_past, sums[:, None] - sums[None, :], 0.0))
    zeros = tl.zeros([CHUNK, CHUNK], tl.float32)
    below = tl.where(row[:, None] > row[None, :], times(dot(k, tl.trans(k), zeros), between), 0.0)
    scores = tl.where(is_past, times(dot(q, tl.trans(k), zeros), between), 0.0)
    place = (item * CHUNK + row)[:, None] * CHUNK + row[None, :]
    tl.store(BELOW + place, -below.to(dtype))
    tl.store(SCORES + place, scores.to(dtype))

    beta_place = (batch.to(tl.int64) * tokens + first + j) * HV + head
    beta = tl.load(BETA + beta_place, mask=is_token, other=0.0).to(tl.float32)
    blocks = tl.reshape(times(below, beta[:, None]), [CHUNK // BLOCK, BLOCK, CHUNK // BLOCK, BLOCK])
    block = tl.arange(0, CHUNK // BLOCK)
    is_diagonal = (block[:, None] == block[None, :])[:, None, :, None]
    # A sum of one term and zeros.
    system = tl.sum(tl.where(is_diagonal, blocks, 0.0), 2)
    row_16, column = tl.arange(0, BLOCK)[None, :, None], tl.arange(0, BLOCK)[None, None, :]
    row_64 = block[:, None, None] * BLOCK + row_16
    is_held = row_64 + chunk * CHUNK < opened
    start = tl.zeros_like(system)
    if HELD_INVERSE is not None:
        # Only the block that is open has rows that count.
        held_place = (s.to(tl.int64) * HV + head) * (BLOCK * BLOCK) + row_16 * BLOCK + column
        start = tl.load(HELD_INVERSE + held_place + 0 * row_64, mask=is_held & (column >= 0), other=0.0)
    inverse = inverse_of(system, start, is_held)
    tl.store(INVERSE + item * (CHUNK * BLOCK) + row_64 * BLOCK + column, inverse)
