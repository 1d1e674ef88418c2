"""The kernels of fused_logp's Triton backend: the statistics of rows of logits, and their gradient.

A program of the forward pass is one warp with one row, or with one segment of it, in blocks of 1024 columns, 32 to a
thread. Order of the sums, which is the contract (``backend``): Triton's reduction over the columns of a block; blocks
of a segment of 8192 columns in ascending order; segments in ascending order. The gradient has no sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib import softmax
from rl_kernels.core.triton_lib.min_logit import largest_or_nan, least_kept, or_lowest

SEGMENT = tl.constexpr(8192)
"""Columns of a segment, which has a state of its own."""
BLOCK = tl.constexpr(1024)
"""Columns that one warp takes at a time, 32 to a thread."""
ALIGNED = tl.constexpr(16)
"""Rows are read in wide loads where V is a multiple of this, in elements; their addresses then are, in bytes."""
ROWS = tl.constexpr(32)
"""Rows whose segments one program merges."""


@triton.jit
def _segment(
    logits, row, row_stride, first, V, c, least, WIDE: tl.constexpr, MIN_LOGIT: tl.constexpr, ENTROPY: tl.constexpr
):
    """Return the state of columns ``first`` to ``first + SEGMENT`` of a row; values below ``least`` count as -inf."""
    base = logits + row * row_stride + first
    if WIDE:
        base = tl.multiple_of(base, ALIGNED)
    columns = tl.arange(0, BLOCK)
    width = tl.minimum(V - first, SEGMENT)
    full = width // BLOCK * BLOCK
    top, total, weighted = softmax.empty()
    for start in range(0, full, BLOCK):
        x = tl.load(base + start + columns).to(tl.float32)
        if MIN_LOGIT:
            most = largest_or_nan(x)
            # A block of which nothing counts would add 0. Where all counts, nothing is compared: two branches, because
            # the compiler would turn one into a choice for each value.
            if ~(most < least):
                if least > float("-inf"):
                    x = or_lowest(x, least, MIN_LOGIT)
                    top, total, weighted = softmax.add_block_up_to(x, most, c, top, total, weighted, ENTROPY)
                else:
                    top, total, weighted = softmax.add_block_up_to(x, most, c, top, total, weighted, ENTROPY)
        else:
            top, total, weighted = softmax.add_block(x, c, top, total, weighted, ENTROPY)
    if full < width:
        x = tl.load(base + full + columns, mask=full + columns < width, other=float("-inf")).to(tl.float32)
        x = or_lowest(x, least, MIN_LOGIT)
        top, total, weighted = softmax.add_block(x, c, top, total, weighted, ENTROPY)
    return top, total, weighted


@triton.jit
def _active(ids, marks, rows, here, ignore_index, HAS_ROWS: tl.constexpr, HAS_IGNORED: tl.constexpr):
    """Return the ids of rows, and a mask of the rows that are computed."""
    id = tl.load(ids + rows, mask=here, other=0).to(tl.int64)
    if HAS_ROWS:
        here = here & (tl.load(marks + rows, mask=here, other=0) != 0)
    if HAS_IGNORED:
        here = here & (id != ignore_index)
    return id, here


@triton.jit
def _write(
    logits,
    rows,
    row_stride,
    id,
    V,
    top,
    total,
    weighted,
    inv,
    least,
    logp,
    norm,
    lse,
    entropy,
    here,
    active,
    MIN_LOGIT: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """Write the statistics of one row or of several; 0 if a row is not computed, NaN if its id is not a column."""
    inside = active & (id >= 0) & (id < V)
    x = tl.load(logits + rows * row_stride + id, mask=inside, other=float("nan")).to(tl.float32)
    x = or_lowest(x, least, MIN_LOGIT)
    softmax.store_statistics(x, top, total, weighted, inv, logp, norm, lse, entropy, rows, here, active, ENTROPY)


@triton.jit(do_not_specialize=["row_stride"], do_not_specialize_on_alignment=["logits"])
def forward_rows(
    logits,
    ids,
    temperature,
    marks,
    min_logit,
    logp,
    norm,
    lse,
    entropy,
    V,
    row_stride,
    ignore_index,
    WIDE: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_IGNORED: tl.constexpr,
    PER_ROW: tl.constexpr,
    MIN_LOGIT: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """Write the statistics of one row. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    id, active = _active(ids, marks, row, row >= 0, ignore_index, HAS_ROWS, HAS_IGNORED)
    inv = softmax.inverse(temperature, row, active, PER_ROW)
    c = inv * softmax.LOG2E
    least = least_kept(min_logit, temperature, row, active, PER_ROW, MIN_LOGIT)
    top, total, weighted = softmax.empty()
    if active:
        for first in range(0, V, SEGMENT):
            part_top, part_total, part_weighted = _segment(
                logits, row, row_stride, first, V, c, least, WIDE, MIN_LOGIT, ENTROPY
            )
            top, total, weighted = softmax.merge(top, total, weighted, part_top, part_total, part_weighted, c, ENTROPY)
    _write(
        *(logits, row, row_stride, id, V, top, total, weighted, inv, least, logp, norm, lse, entropy, row >= 0, active),
        *(MIN_LOGIT, ENTROPY),
    )


@triton.jit(do_not_specialize=["row_stride"], do_not_specialize_on_alignment=["logits"])
def forward_segments(
    logits,
    ids,
    temperature,
    marks,
    min_logit,
    parts,
    count,
    V,
    row_stride,
    ignore_index,
    WIDE: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_IGNORED: tl.constexpr,
    PER_ROW: tl.constexpr,
    MIN_LOGIT: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """Write the state of one segment of a row to ``parts[segment, 3, row]``. Grid: rows, segments."""
    row = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    _, active = _active(ids, marks, row, row >= 0, ignore_index, HAS_ROWS, HAS_IGNORED)
    if active:
        c = softmax.inverse(temperature, row, active, PER_ROW) * softmax.LOG2E
        least = least_kept(min_logit, temperature, row, active, PER_ROW, MIN_LOGIT)
        top, total, weighted = _segment(
            logits, row, row_stride, segment * SEGMENT, V, c, least, WIDE, MIN_LOGIT, ENTROPY
        )
        softmax.store_part(parts, segment, count, row, row >= 0, top, total, weighted, ENTROPY)


@triton.jit(do_not_specialize=["row_stride"], do_not_specialize_on_alignment=["logits"])
def forward_merge(
    logits,
    ids,
    temperature,
    marks,
    min_logit,
    parts,
    logp,
    norm,
    lse,
    entropy,
    count,
    segments,
    V,
    row_stride,
    ignore_index,
    WIDE: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_IGNORED: tl.constexpr,
    PER_ROW: tl.constexpr,
    MIN_LOGIT: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """Merge the segments of ROWS rows in ascending order, and write their statistics. Grid: tiles of rows."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = rows < count
    id, active = _active(ids, marks, rows, here, ignore_index, HAS_ROWS, HAS_IGNORED)
    inv = softmax.inverse(temperature, rows, active, PER_ROW)
    c = inv * softmax.LOG2E
    least = least_kept(min_logit, temperature, rows, active, PER_ROW, MIN_LOGIT)
    top, total, weighted = softmax.merge_parts(parts, 0, segments, count, rows, active, c, ENTROPY)
    _write(
        *(logits, rows, row_stride, id, V, top, total, weighted, inv, least, logp, norm, lse, entropy, here, active),
        *(MIN_LOGIT, ENTROPY),
    )


@triton.jit(do_not_specialize=["count", "V", "row_stride", "column_stride"])
def find_kept(
    logits,
    ids,
    temperature,
    min_logit,
    norm,
    grad_logp,
    kept,
    count,
    V,
    row_stride,
    column_stride,
    PER_ROW: tl.constexpr,
    HAS_LOGP: tl.constexpr,
):
    """Write, for ``backward``, the smallest raw value of a row that counts and its upstream gradient of logp.

    The former is -inf in a row that is NaN as a whole, the latter 0 if the target does not count. Grid: tiles of rows.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = rows < count
    id = tl.load(ids + rows, mask=here, other=0).to(tl.int64)
    rest = softmax.zero_or_nan(id, V)
    least = least_kept(min_logit, temperature, rows, here, PER_ROW, True)
    _, log_total = softmax.load_norm(norm, rows, here)
    x = tl.load(logits + rows * row_stride + id * column_stride, mask=here & (rest == 0.0), other=0.0).to(tl.float32)
    number = log_total + rest
    tl.store(kept + 2 * rows, tl.where(number == number, least, float("-inf")), mask=here)
    if HAS_LOGP:
        grad = tl.load(grad_logp + rows, mask=here, other=0.0)
        tl.store(kept + 2 * rows + 1, tl.where(x < least, 0.0, grad), mask=here)


@triton.jit
def backward(
    logits,
    out,
    ids,
    temperature,
    marks,
    kept,
    norm,
    entropies,
    grad_logp,
    grad_logsumexp,
    grad_entropy,
    V,
    row_stride,
    column_stride,
    out_row_stride,
    out_column_stride,
    ignore_index,
    HAS_ROWS: tl.constexpr,
    HAS_IGNORED: tl.constexpr,
    PER_ROW: tl.constexpr,
    MIN_LOGIT: tl.constexpr,
    HAS_LOGP: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write the gradient of WIDTH columns of a row. Grid: rows, tiles of columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    here = columns < V
    id, active = _active(ids, marks, row, row >= 0, ignore_index, HAS_ROWS, HAS_IGNORED)
    if UNIT:
        source, target = logits + row * row_stride + columns, out + row * out_row_stride + columns
    else:
        source = logits + row * row_stride + columns.to(tl.int64) * column_stride
        target = out + row * out_row_stride + columns.to(tl.int64) * out_column_stride
    dtype = out.dtype.element_ty
    if active:
        inv = softmax.inverse(temperature, row, active, PER_ROW)
        c = inv * softmax.LOG2E
        top, log_total = softmax.load_norm(norm, row, active)
        entropy = tl.load(entropies + row)
        # Beside the smallest value that counts is the gradient of logp.
        place = (kept + row + 1) if MIN_LOGIT else grad_logp
        chosen, slope, curve = softmax.upstream_of(
            place, grad_logsumexp, grad_entropy, row, active, inv, HAS_LOGP, HAS_LSE, HAS_ENTROPY
        )
        x = tl.load(source, mask=here, other=0.0).to(tl.float32)
        least = tl.load(kept + 2 * row) if MIN_LOGIT else 0.0
        if HAS_ENTROPY:
            # A power of 0 has a gradient of 0. With a choice at the end, as below, x would be in registers up to there.
            x = or_lowest(x, least, MIN_LOGIT)
        zero_or_nan = softmax.zero_or_nan(id, V)
        dz = softmax.dlogits(
            x, columns == id, zero_or_nan, c, top, log_total, entropy, chosen, slope, curve, HAS_ENTROPY
        )
        if MIN_LOGIT and not HAS_ENTROPY:
            dz = tl.where(x < least, 0.0, dz)
        tl.store(target, dz.to(dtype), mask=here)
    else:
        tl.store(target, tl.zeros((WIDTH,), tl.float32).to(dtype), mask=here)
