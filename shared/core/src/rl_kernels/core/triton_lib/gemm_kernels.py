"""The kernel of the canonical chain in Triton, and its parts, which other kernels use.

Order of every sum, which is the contract: ``acc = acc + A[:, k:k+16] B[k:k+16, :]`` for k = 0, 16, 32, ... in one FP32
accumulator, K padded with zeros, rounded once at the end. With segments of K each segment is such a chain from 0, and
a balanced tree merges them. FP32 operands are multiplied in FP32 (no TF32); the 16 terms of a step are summed from zero
and then added to acc.

A program holds BLOCK_M x BLOCK_N accumulators and loads BLOCK_K terms at a time; which thread holds what is Triton's
choice. Both operands are taken as ``[rows, K]``, the right one as its transpose.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core import constants
from rl_kernels.core.triton_lib.arithmetic import INTERPRETED, fma

ROWS, COLUMNS, POINTERS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Ways to read an operand ``[rows, K]``: through its descriptor, through a descriptor of its transpose, by pointers."""
BY_ROW, BY_COLUMN = tl.constexpr(1), tl.constexpr(2)
"""Dim of a tile along which a bias runs; 0 is no bias."""
STEP = tl.constexpr(constants.STEP)
"""Terms that one step of the chain adds."""


@triton.jit
def tile(source, row, k, rows, K, row_stride, k_stride, KIND: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return ``[BLOCK, BLOCK_K]`` of an operand ``[rows, K]``; 0 beyond its edges."""
    if KIND == ROWS:
        value = source.load([row, k])
    elif KIND == COLUMNS:
        value = source.load([k, row]).T
    else:
        r, c = row + tl.arange(0, BLOCK), k + tl.arange(0, BLOCK_K)
        place = source + r.to(tl.int64)[:, None] * row_stride + c.to(tl.int64)[None, :] * k_stride
        value = tl.load(place, mask=(r < rows)[:, None] & (c < K)[None, :], other=0.0)
    return value


@triton.jit
def step(left, right, acc):
    """Return ``acc`` plus the products of these terms of both operands."""
    if INTERPRETED:
        # The interpreter multiplies by a library, in its own order, which FP64 hides; it would take BF16 for integers.
        return tl.dot(left.to(tl.float64), right.T.to(tl.float64), acc.to(tl.float64), out_dtype=tl.float64).to(
            tl.float32
        )
    elif left.dtype == tl.float32:
        # Added one term at a time, a long chain would lose digits, so a step is summed from zero.
        tl.static_assert(left.shape[1] == STEP, "FP32 operands are loaded one step at a time")
        return _join(tl.dot(left, right.T, input_precision="ieee"), acc)
    else:
        return tl.dot(left, right.T, acc)


@triton.jit
def _join(part, acc):
    """Return ``part + acc`` by an fma: Triton would turn a plain sum into a dot that accumulates onto ``acc``."""
    return fma(part, tl.full(acc.shape, 1.0, tl.float32), acc)


@triton.jit
def chain(
    a,
    a_row_stride,
    a_k_stride,
    b,
    b_row_stride,
    b_k_stride,
    row,
    column,
    M,
    N,
    K,
    acc,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPAN: tl.constexpr = STEP,
    begin=0,
):
    """Return ``acc`` continued by the chain of ``a[M, K]`` and ``b[N, K]`` from ``begin`` on, at row and column."""
    if SPAN > STEP:
        for first in range(begin, K, SPAN):
            part = tl.zeros(acc.shape, tl.float32)
            for k in range(first, tl.minimum(first + SPAN, K), BLOCK_K):
                left = tile(a, row, k, M, K, a_row_stride, a_k_stride, LEFT, BLOCK_M, BLOCK_K)
                right = tile(b, column, k, N, K, b_row_stride, b_k_stride, RIGHT, BLOCK_N, BLOCK_K)
                part = step(left, right, part)
            acc = _join(part, acc)
    else:
        for k in range(begin, K, BLOCK_K):
            left = tile(a, row, k, M, K, a_row_stride, a_k_stride, LEFT, BLOCK_M, BLOCK_K)
            right = tile(b, column, k, N, K, b_row_stride, b_k_stride, RIGHT, BLOCK_N, BLOCK_K)
            acc = step(left, right, acc)
    return acc


@triton.jit
def _segments(
    a,
    a_row_stride,
    a_k_stride,
    b,
    b_row_stride,
    b_k_stride,
    row,
    column,
    M,
    N,
    K,
    length,
    index: tl.constexpr,
    COUNT: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the tree sum of COUNT segments of K, a power of two, from number ``index`` on."""
    if COUNT == 1:
        # BLOCK_K divides the length, so no block reaches into the next segment.
        total = chain(
            *(a, a_row_stride, a_k_stride, b, b_row_stride, b_k_stride, row, column, M, N),
            *(tl.minimum((index + 1) * length, K), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)),
            *(LEFT, RIGHT, BLOCK_M, BLOCK_N, BLOCK_K, STEP, index * length),
        )
    else:
        operands = (a, a_row_stride, a_k_stride, b, b_row_stride, b_k_stride, row, column, M, N, K, length)
        half: tl.constexpr = COUNT // 2
        first = _segments(*operands, index, half, LEFT, RIGHT, BLOCK_M, BLOCK_N, BLOCK_K)
        second = _segments(*operands, index + half, half, LEFT, RIGHT, BLOCK_M, BLOCK_N, BLOCK_K)
        total = _join(first, second)
    return total


@triton.jit
def place_of(index, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Return row and column of the index-th tile; GROUP rows of tiles make a panel, which stays in the L2 cache."""
    group = index // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP, GROUP)
    within = index % (GROUP * tiles_n)
    return group * GROUP + within % height, within // height


@triton.jit
def _pointers(c, row, column, M, N, row_stride, column_stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return pointers to a tile of ``c[M, N]``, and which of them are inside ``c``."""
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    base = c + tl.full((), row, tl.int64) * row_stride + tl.full((), column, tl.int64) * column_stride
    place = base + rows.to(tl.int64)[:, None] * row_stride + columns.to(tl.int64)[None, :] * column_stride
    return place, (rows < M - row)[:, None] & (columns < N - column)[None, :]


@triton.jit
def _store(
    acc,
    c,
    c_row_stride,
    c_column_stride,
    bias,
    bias_stride,
    row,
    column,
    M,
    N,
    STORED: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add the bias in FP32, round once, and store a tile."""
    if BIAS == BY_ROW:
        rows = row + tl.arange(0, BLOCK_M)
        acc += tl.load(bias + rows.to(tl.int64) * bias_stride, mask=rows < M, other=0.0).to(tl.float32)[:, None]
    elif BIAS == BY_COLUMN:
        columns = column + tl.arange(0, BLOCK_N)
        acc += tl.load(bias + columns.to(tl.int64) * bias_stride, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if STORED:
        c.store([row, column], acc.to(c.dtype))
    else:
        place, inside = _pointers(c, row, column, M, N, c_row_stride, c_column_stride, BLOCK_M, BLOCK_N)
        tl.store(place, acc.to(c.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "N", "K", "length"])
def multiply(
    a,
    b,
    c,
    bias,
    a_row_stride,
    a_k_stride,
    b_row_stride,
    b_k_stride,
    c_row_stride,
    c_column_stride,
    bias_stride,
    M,
    N,
    K,
    length,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    STORED: tl.constexpr,
    BIAS: tl.constexpr,
    CONTINUES: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PERSISTENT: tl.constexpr,
    PARTS: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """One program per tile; if PERSISTENT, fewer programs, each of which takes tile after tile."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    last = tiles_m * tiles_n if PERSISTENT else tl.program_id(0) + 1
    # flatten lets the loads of the next tile run while this one is stored.
    for index in tl.range(tl.program_id(0), last, tl.num_programs(0), flatten=PERSISTENT):
        tile_m, tile_n = place_of(index, tiles_m, tiles_n, GROUP)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        operands = (a, a_row_stride, a_k_stride, b, b_row_stride, b_k_stride, row, column, M, N, K)
        if SEGMENTS > 1:
            acc = _segments(*operands, length, 0, SEGMENTS, LEFT, RIGHT, BLOCK_M, BLOCK_N, BLOCK_K)
        else:
            if CONTINUES:
                place, inside = _pointers(c, row, column, M, N, c_row_stride, c_column_stride, BLOCK_M, BLOCK_N)
                acc = tl.load(place, mask=inside, other=0.0)
            else:
                acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            acc = chain(*operands, acc, LEFT, RIGHT, BLOCK_M, BLOCK_N, BLOCK_K, SPAN)
        target = (c, c_row_stride, c_column_stride, bias, bias_stride)
        if PARTS == 2:
            first, second = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
            _store(first, *target, row, column, M, N, STORED, BIAS, BLOCK_M, BLOCK_N // 2)
            _store(second, *target, row, column + BLOCK_N // 2, M, N, STORED, BIAS, BLOCK_M, BLOCK_N // 2)
        else:
            _store(acc, *target, row, column, M, N, STORED, BIAS, BLOCK_M, BLOCK_N)
