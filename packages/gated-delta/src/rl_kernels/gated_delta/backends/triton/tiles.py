"""Functions shared by the kernels: products, norms, and the places of sequences, chunks and rows.

No result depends on tiles or warps: products are chains of 16 terms in tensor cores (for FP32 operands a sum in
ascending order), sums of a row a tree whose steps add two numbers, other sums have one term that is not zero.
Roundings are explicit (``fma``, ``product``), so that no compiler may fuse in one kernel and not in another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib.arithmetic import INTERPRETED, fma, product
from rl_kernels.gated_delta import constants

CHUNK, BLOCK, EPS = tl.constexpr(constants.CHUNK), tl.constexpr(constants.BLOCK), tl.constexpr(constants.EPS)


@triton.jit
def dot(a, b, acc):
    """Return ``acc + a @ b``; FP32 operands are multiplied in IEEE FP32, not TF32."""
    if INTERPRETED:
        # The interpreter multiplies by a library, in its own order, which FP64 hides; steps of 16 terms are rounded.
        step = tl.arange(0, a.shape[1]) // BLOCK
        for k in tl.static_range(a.shape[1] // BLOCK):
            left = tl.where((step == k)[None, :], a.to(tl.float64), 0.0)
            acc = tl.dot(left, b.to(tl.float64), acc.to(tl.float64), out_dtype=tl.float64).to(tl.float32)
        return acc
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def times(x, factor):
    """Return ``x`` times ``factor``, which is broadcast, rounded before anything is added to it."""
    return product(x, tl.broadcast_to(factor, x.shape))


@triton.jit
def minus(x, a, b):
    """Return ``x - a b``, rounded once; a and b are broadcast."""
    return fma(tl.broadcast_to(-a, x.shape), tl.broadcast_to(b, x.shape), x)


@triton.jit
def row_sum(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the sum of each row by a tree: neighbors are added first, then in each step the two halves of the rest."""
    x = tl.sum(tl.reshape(x, [ROWS, COLUMNS // 2, 2]), 2)
    HALVINGS: tl.constexpr = (COLUMNS // 2).bit_length() - 1
    for step in tl.static_range(HALVINGS):
        x = tl.sum(tl.reshape(x, [ROWS, 2, COLUMNS // (4 << step)]), 1)
    return tl.reshape(x, [ROWS])


@triton.jit
def unit(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the rows of FP32 ``x``, divided by their norms."""
    squares = row_sum(product(x, x), ROWS, COLUMNS)
    return times(x, tl.rsqrt(squares + EPS)[:, None])


@triton.jit
def sequence_at(s, BOUNDS, STARTS, LENGTHS, tokens, chunks):
    """Return the batch row, the first token, the tokens, the rows in the cache, and the first slot of sequence s.

    A chunk of a packed sequence has a slot of its own even if the cache adds a part of a chunk; slots may be empty.
    """
    opened = 0 * s
    if LENGTHS is not None:
        opened = tl.load(LENGTHS + s) % CHUNK
    if BOUNDS is None:
        first = 0 * s
        if STARTS is not None:
            first = tl.minimum(tl.maximum(tl.load(STARTS + s), 0), tokens).to(tl.int32)
        batch, count, slot = s, tokens - first, s * chunks
    else:
        first = tl.minimum(tl.maximum(tl.load(BOUNDS + s), 0), tokens).to(tl.int32)
        end = tl.minimum(tl.maximum(tl.load(BOUNDS + s + 1), first), tokens).to(tl.int32)
        batch, count, slot = 0 * s, end - first, first // CHUNK + 2 * s
    return batch, first, count, opened, slot


@triton.jit
def sequence_of(slot, BOUNDS, chunks, tokens, sequences, halvings):
    """Return the sequence whose chunk has this slot; ``2^halvings`` is more than the number of sequences."""
    low = slot // chunks
    if BOUNDS is not None:
        low, high = 0 * slot, 0 * slot + sequences - 1
        for _ in range(halvings):
            middle = (low + high + 1) // 2
            first = tl.minimum(tl.maximum(tl.load(BOUNDS + middle), 0), tokens).to(tl.int32)
            is_low = first // CHUNK + 2 * middle <= slot
            low, high = tl.where(is_low, middle, low), tl.where(is_low, high, middle - 1)
    return low


@triton.jit
def rows_at(X, batch, token, head, is_token, x_batch, x_token, x_head, columns):
    """Return rows of ``X[B, T, H, D]`` at tokens, at these columns, or 0 where ``is_token`` is False."""
    base = X + batch.to(tl.int64) * x_batch + head.to(tl.int64) * x_head
    return tl.load(base + token.to(tl.int64)[:, None] * x_token + columns[None, :], mask=is_token[:, None], other=0.0)
