"""The reductions in Triton, bitwise identical to ``reductions``: each sum is the tree of ``rowwise.sums.tree_sum``."""

from __future__ import annotations

import triton
import triton.language as tl

AT_ONCE = tl.constexpr(16)
"""Segment sums that are loaded before the first one is added."""


@triton.jit(do_not_specialize=("columns", "row_stride", "column_stride"))
def log_softmax(X, NORM, OUT, columns, row_stride, column_stride, BLOCK: tl.constexpr):
    """Write ``X - NORM[:, 0] - NORM[:, 1]``, never above 0. Grid: rows, blocks of a row."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = d < columns
    x = tl.load(X + row * row_stride + d.to(tl.int64) * column_stride, mask=mask, other=0.0).to(tl.float32)
    result = (x - tl.load(NORM + 2 * row)) - tl.load(NORM + 2 * row + 1)
    result = tl.where(result > 0.0, 0.0, result)
    tl.store(OUT + row * columns + d, result.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def mean(total, count):
    """Return ``total / count``."""
    return tl.div_rn(total, tl.zeros(total.shape, tl.float32) + count)


@triton.jit
def fold_columns(ROW, d, here, columns, stride, AT: tl.constexpr, WIDTH: tl.constexpr):
    """Load WIDTH columns and fold them to AT columns: each step adds the second half to the first."""
    if AT == WIDTH:
        return tl.load(ROW + d * stride, mask=here & (d < columns), other=0.0).to(tl.float32)
    else:
        first = fold_columns(ROW, d, here, columns, stride, 2 * AT, WIDTH)
        return first + fold_columns(ROW, d + AT, here, columns, stride, 2 * AT, WIDTH)


@triton.jit(do_not_specialize=("rows", "columns", "row_stride", "column_stride", "segments"))
def segment_sums(
    X, OUT, rows, columns, row_stride, column_stride, segments,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, AT: tl.constexpr, LEVELS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Write to ``OUT[rows, segments]`` the sum of each WIDTH columns, or with WHOLE the mean of each row.

    Grid: segments of ROWS rows each. Each step adds the second half to the first: a tree of element-wise additions.
    ``AT = 2**LEVELS`` columns are left after loading.
    """
    segment = (tl.program_id(0) % segments).to(tl.int64)
    row = (tl.program_id(0) // segments).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = X + row[:, None] * row_stride + segment * WIDTH * column_stride
    here, d = (row < rows)[:, None], tl.arange(0, AT)[None, :].to(tl.int64)
    x = fold_columns(start, d, here, columns - segment * WIDTH, column_stride, AT, WIDTH)
    for level in tl.static_range(LEVELS):
        first, second = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, AT >> (level + 1))), (0, 2, 1)))
        x = first + second
    total = tl.reshape(x, (ROWS,))
    if WHOLE:
        total = mean(total + 0.0, columns)
    tl.store(OUT + row * segments + segment, total.to(OUT.dtype.element_ty), mask=row < rows)


@triton.jit(do_not_specialize=("rows", "segments", "count"))
def means(SUMS, OUT, rows, segments, count, ROWS: tl.constexpr):
    """Add ``SUMS[rows, segments]`` in ascending order and divide by ``count``. Grid: ROWS rows each."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, segments, AT_ONCE):
        for step in tl.static_range(AT_ONCE):
            there = here & (first + step < segments)
            total += tl.load(SUMS + row * segments + first + step, mask=there, other=0.0)
    tl.store(OUT + row, mean(total, count).to(OUT.dtype.element_ty), mask=here)
