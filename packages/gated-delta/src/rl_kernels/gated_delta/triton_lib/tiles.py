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

HALVINGS = tl.constexpr(12)
"""Steps that add up the longest row: 256 numbers of each of 16 columns of programs."""
CHUNK, EPS = tl.constexpr(constants.CHUNK), tl.constexpr(constants.EPS)
STEP = tl.constexpr(16)
"""Terms that a tensor core adds in a step."""
SIZES = ("tokens", "chunks", "sequences", "halvings")
"""Sizes of a call, on which kernels of all chunks at once do not specialize."""


@triton.jit
def dot(a, b, acc):
    """Return ``acc + a @ b``; FP32 operands are multiplied in IEEE FP32, not TF32.

    No operand may come from ``tl.join``: Triton would then permute the terms of the chain.
    """
    if INTERPRETED:
        # The interpreter multiplies by a library, in its own order, which FP64 hides; steps of 16 terms are rounded.
        step = tl.arange(0, a.shape[1]) // STEP
        for k in tl.static_range(a.shape[1] // STEP):
            left = tl.where((step == k)[None, :], a.to(tl.float64), 0.0)
            acc = tl.dot(left, b.to(tl.float64), acc.to(tl.float64), out_dtype=tl.float64).to(tl.float32)
        return acc
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def dot_rest(a, b, acc):
    """Return ``acc`` plus ``a`` times what FP32 ``b`` loses when it is rounded to the dtype of ``a``."""
    if a.dtype != tl.float32:
        acc = dot(a, (b - b.to(a.dtype).to(tl.float32)).to(a.dtype), acc)
    return acc


@triton.jit
def times(x, factor):
    """Return ``x`` times ``factor``, which is broadcast, rounded before anything is added to it."""
    return product(x, tl.broadcast_to(factor, x.shape))


@triton.jit
def scaled(x, scale):
    """Return ``x`` times a number, rounded before anything is added to it."""
    return product(x, tl.full(x.shape, scale, tl.float32))


@triton.jit
def plus(x, a, b):
    """Return ``x + a b``, rounded once; a and b are broadcast."""
    return fma(tl.broadcast_to(a, x.shape), tl.broadcast_to(b, x.shape), x)


@triton.jit
def minus(x, a, b):
    """Return ``x - a b``, rounded once; a and b are broadcast."""
    return plus(x, -a, b)


@triton.jit
def between(sums):
    """Return the decays ``exp(G_t - G_s)`` from row s of a chunk to row t >= s, else 1."""
    r = tl.arange(0, CHUNK)
    return tl.exp(tl.where(r[:, None] >= r[None, :], sums[:, None] - sums[None, :], 0.0))


@triton.jit
def row_sum(x):
    """Return the sum of each row by a balanced tree of neighbors.

    Every step adds just two numbers, so the bits do not depend on the number of warps or on the layout of the tile.
    """
    for _ in tl.static_range(HALVINGS):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), 2)
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def row_of(x, index):
    """Return row ``index`` of FP32 x: its bits plus integer zeros, which a compiler drops if it knows the row."""
    is_row = tl.arange(0, x.shape[0])[:, None] == index
    return tl.sum(tl.where(is_row, x.to(tl.int32, bitcast=True), 0), 0).to(tl.float32, bitcast=True)


@triton.jit
def column_of(x, index):
    """Return column ``index`` of FP32 x, as ``row_of`` does."""
    is_column = tl.arange(0, x.shape[1])[None, :] == index
    return tl.sum(tl.where(is_column, x.to(tl.int32, bitcast=True), 0), 1).to(tl.float32, bitcast=True)


@triton.jit
def unit(x):
    """Return the rows of FP32 ``x``, divided by their norms."""
    squares = row_sum(product(x, x))
    return times(x, tl.rsqrt(squares + EPS)[:, None])


@triton.jit
def faded_inverse(inverse, sums, dtype: tl.constexpr):
    """Return ``F = fade T``, rounded: each row of T with its decay to the end of the chunk."""
    last = tl.sum(tl.where(tl.arange(0, CHUNK) == CHUNK - 1, sums, 0.0), 0)
    return times(inverse, tl.exp(last - sums)[:, None]).to(dtype)


@triton.jit
def sequence_at(s, BOUNDS, STARTS, LENGTHS, tokens, chunks):
    """Return the batch row, the first token, the tokens, the rows in the cache, and the first slot of sequence s.

    A chunk of a packed sequence has a slot of its own even if the cache adds a part of a chunk; slots may be empty.
    """
    opened = 0 * s
    if LENGTHS is not None:
        opened = tl.load(LENGTHS + s) & (CHUNK - 1)
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
def tile_at(X, item, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return columns of ``X[item]`` of ``X[items, ROWS, COLUMNS]``."""
    return tl.load(X + (item * ROWS + tl.arange(0, ROWS))[:, None] * COLUMNS + columns[None, :])


@triton.jit
def whole_tile(X, item, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return ``X[item]`` of ``X[items, ROWS, COLUMNS]``."""
    return tile_at(X, item, tl.arange(0, COLUMNS), ROWS, COLUMNS)


@triton.jit
def rows_at(X, batch, token, head, is_token, x_batch, x_token, x_head, columns):
    """Return rows of ``X[B, T, H, D]`` at tokens, at these columns, or 0 where ``is_token`` is False."""
    base = X + batch.to(tl.int64) * x_batch + head.to(tl.int64) * x_head
    return tl.load(base + token.to(tl.int64)[:, None] * x_token + columns[None, :], mask=is_token[:, None], other=0.0)
