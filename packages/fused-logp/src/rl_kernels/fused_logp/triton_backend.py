"""fused_logp in Triton: a row is read once in the forward pass, and read and written once in the backward pass.

Order of the sums, which is the contract of this backend: a row is cut into segments of 8192 columns, a segment into
blocks of 1024, both taken in ascending order; ``two_pass`` and ``online`` are the same here. Whether one program takes
a whole row or one each segment follows the number of rows and changes no bit. How a block lies in the registers follows
the alignment that the compiler may assume, so that is fixed by V, and rows that are aligned otherwise are copied first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rl_kernels.core.triton_lib import softmax
from rl_kernels.core.triton_lib.launch import device_of

SEGMENT = tl.constexpr(8192)
"""Columns whose state is formed at a time."""
BLOCK = tl.constexpr(1024)
"""Columns that one warp takes at a time, 32 to a thread."""
SPLIT_BELOW = 2048
"""Rows below which each segment has a program of its own, so that a few rows fill the chip."""
ALIGNED = tl.constexpr(16)
"""V is a multiple of this, in elements, and addresses, in bytes, where rows are read in wide loads."""
ROWS = tl.constexpr(32)
"""Rows whose segments one program merges."""
GRADIENT_WIDTHS = {True: 4096, False: 1024}
"""Columns of the gradient that one program works on, by whether rows are read in wide loads: no bit depends on it."""


def forward(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    temperature: torch.Tensor,
    ignore_index: int | None,
    row_indices: torch.Tensor | None,
    reduction: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (logp, logsumexp), each ``[N]``."""
    logp, lse, _ = _statistics(logits, token_ids, temperature, ignore_index, row_indices, entropy=False)
    return logp, lse


def forward_stats(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    temperature: torch.Tensor,
    ignore_index: int | None,
    row_indices: torch.Tensor | None,
    reduction: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (logp, logsumexp, entropy), each ``[N]``."""
    return _statistics(logits, token_ids, temperature, ignore_index, row_indices, entropy=True)


def _statistics(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    temperature: torch.Tensor,
    ignore_index: int | None,
    row_indices: torch.Tensor | None,
    *,
    entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count, vocab = logits.shape
    logp, lse = (logits.new_empty(count, dtype=torch.float32) for _ in range(2))
    row_entropy = logits.new_empty(count, dtype=torch.float32) if entropy else lse
    if not count:
        return logp, lse, row_entropy
    rows = _canonical(logits)
    inputs = (rows, *_rows(token_ids, temperature, ignore_index, row_indices))
    sizes = (vocab, rows.stride(0), ignore_index or 0)
    flags = {
        "WIDE": vocab % ALIGNED.value == 0,
        "HAS_ROWS": row_indices is not None,
        "HAS_IGNORED": ignore_index is not None,
        "PER_ROW": temperature.ndim > 0,
        "ENTROPY": entropy,
    }
    segments = triton.cdiv(vocab, SEGMENT.value)
    with device_of(logits):
        if segments == 1 or count >= SPLIT_BELOW:
            _forward_rows[(count,)](*inputs, logp, lse, row_entropy, *sizes, **flags, num_warps=1)
        else:
            parts = logits.new_empty((segments, 3, count), dtype=torch.float32)
            _forward_segments[(count, segments)](*inputs, parts, count, *sizes, **flags, num_warps=1)
            merged = (parts, logp, lse, row_entropy, count, segments)
            _forward_merge[(triton.cdiv(count, ROWS.value),)](*inputs, *merged, *sizes, **flags, num_warps=1)
    return logp, lse, row_entropy


def _canonical(logits: torch.Tensor) -> torch.Tensor:
    """Return the rows contiguous, and where V allows it at addresses for wide loads; a copy if they are not."""
    aligned = logits.shape[1] % ALIGNED.value or not (logits.stride(0) | logits.data_ptr()) % ALIGNED.value
    if logits.stride(1) == 1 and aligned:
        return logits
    return torch.empty_like(logits, memory_format=torch.contiguous_format).copy_(logits)


def _rows(
    token_ids: torch.Tensor,
    temperature: torch.Tensor,
    ignore_index: int | None,
    row_indices: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | float, torch.Tensor]:
    """Return ids, temperature (a number, or one a row) and a mark for each row that is computed."""
    ids = token_ids.contiguous()
    marks = ids
    if row_indices is not None:
        # Marks, not indices: a row that is given twice is computed, and overwritten, once.
        inside = row_indices.long().clamp(0, len(ids) - 1)
        marks = torch.zeros_like(ids, dtype=torch.int8).index_fill_(0, inside, 1)
    return ids, temperature.contiguous() if temperature.ndim else float(temperature), marks


def backward(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    temperature: torch.Tensor,
    ignore_index: int | None,
    row_indices: torch.Tensor | None,
    logsumexp: torch.Tensor,
    *upstream: torch.Tensor | None,
) -> torch.Tensor:
    """Return dlogits ``[N, V]`` in the dtype of logits; ``upstream`` is entropy and the three upstream gradients."""
    grad = logits.new_empty(logits.shape)
    _gradient(logits, grad, token_ids, temperature, ignore_index, row_indices, logsumexp, *upstream)
    return grad


def backward_inplace(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    temperature: torch.Tensor,
    ignore_index: int | None,
    row_indices: torch.Tensor | None,
    logsumexp: torch.Tensor,
    *upstream: torch.Tensor | None,
) -> None:
    """Overwrite logits with dlogits."""
    _gradient(logits, logits, token_ids, temperature, ignore_index, row_indices, logsumexp, *upstream)


def _gradient(
    logits: torch.Tensor,
    out: torch.Tensor,
    token_ids: torch.Tensor,
    temperature: torch.Tensor,
    ignore_index: int | None,
    row_indices: torch.Tensor | None,
    logsumexp: torch.Tensor,
    entropy: torch.Tensor | None,
    grad_logp: torch.Tensor | None,
    grad_logsumexp: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
) -> None:
    count, vocab = logits.shape
    if not count:
        return
    # Where one is missing its place is taken by a tensor that is not read.
    grads = [logsumexp if grad is None else grad.contiguous() for grad in (grad_logp, grad_logsumexp, grad_entropy)]
    saved = (logsumexp, logsumexp if entropy is None else entropy, *grads)
    sizes = (vocab, *logits.stride(), *out.stride(), ignore_index or 0)
    width = GRADIENT_WIDTHS[vocab % ALIGNED.value == 0]
    with device_of(logits):
        _backward[(count, triton.cdiv(vocab, width))](
            logits,
            out,
            *_rows(token_ids, temperature, ignore_index, row_indices),
            *saved,
            *sizes,
            HAS_ROWS=row_indices is not None,
            HAS_IGNORED=ignore_index is not None,
            PER_ROW=temperature.ndim > 0,
            HAS_LOGP=grad_logp is not None,
            HAS_LSE=grad_logsumexp is not None,
            HAS_ENTROPY=grad_entropy is not None,
            UNIT=logits.stride(1) == out.stride(1) == 1,
            WIDTH=width,
            num_warps=4,
        )


@triton.jit
def _segment(logits, row, row_stride, first, V, c, WIDE: tl.constexpr, ENTROPY: tl.constexpr):
    """Return the state of columns ``first`` to ``first + SEGMENT`` of a row."""
    base = logits + row * row_stride + first
    if WIDE:
        base = tl.multiple_of(base, ALIGNED)
    columns = tl.arange(0, BLOCK)
    width = tl.minimum(V - first, SEGMENT)
    whole = width // BLOCK * BLOCK
    top, total, weighted = softmax.empty()
    for start in range(0, whole, BLOCK):
        x = tl.load(base + start + columns).to(tl.float32)
        top, total, weighted = softmax.add_block(x, c, top, total, weighted, ENTROPY)
    if whole < width:
        x = tl.load(base + whole + columns, mask=whole + columns < width, other=float("-inf")).to(tl.float32)
        top, total, weighted = softmax.add_block(x, c, top, total, weighted, ENTROPY)
    return top, total, weighted


@triton.jit
def _active(ids, marks, rows, here, ignore_index, HAS_ROWS: tl.constexpr, HAS_IGNORED: tl.constexpr):
    """Return the ids of rows, and which of the rows are computed."""
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
    logp,
    lse,
    entropy,
    here,
    active,
    ENTROPY: tl.constexpr,
):
    """Write the statistics of one row or of several; 0 where a row is not computed, NaN where its id is no column."""
    inside = active & (id >= 0) & (id < V)
    x = tl.load(logits + rows * row_stride + id, mask=inside, other=float("nan")).to(tl.float32)
    softmax.store_statistics(x, top, total, weighted, inv, logp, lse, entropy, rows, here, active, ENTROPY)


@triton.jit(do_not_specialize=["row_stride"], do_not_specialize_on_alignment=["logits"])
def _forward_rows(
    logits,
    ids,
    temperature,
    marks,
    logp,
    lse,
    entropy,
    V,
    row_stride,
    ignore_index,
    WIDE: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_IGNORED: tl.constexpr,
    PER_ROW: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    id, active = _active(ids, marks, row, row >= 0, ignore_index, HAS_ROWS, HAS_IGNORED)
    inv = softmax.inverse(temperature, row, active, PER_ROW)
    c = inv * softmax.LOG2E
    top, total, weighted = softmax.empty()
    if active:
        for first in range(0, V, SEGMENT):
            part_top, part_total, part_weighted = _segment(logits, row, row_stride, first, V, c, WIDE, ENTROPY)
            top, total, weighted = softmax.merge(top, total, weighted, part_top, part_total, part_weighted, c, ENTROPY)
    _write(logits, row, row_stride, id, V, top, total, weighted, inv, logp, lse, entropy, row >= 0, active, ENTROPY)


@triton.jit(do_not_specialize=["row_stride"], do_not_specialize_on_alignment=["logits"])
def _forward_segments(
    logits,
    ids,
    temperature,
    marks,
    parts,
    count,
    V,
    row_stride,
    ignore_index,
    WIDE: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_IGNORED: tl.constexpr,
    PER_ROW: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """One program a segment of a row; its state goes to ``parts[segment, 3, row]``."""
    row = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    _, active = _active(ids, marks, row, row >= 0, ignore_index, HAS_ROWS, HAS_IGNORED)
    if active:
        c = softmax.inverse(temperature, row, active, PER_ROW) * softmax.LOG2E
        top, total, weighted = _segment(logits, row, row_stride, segment * SEGMENT, V, c, WIDE, ENTROPY)
        softmax.store_part(parts, segment, count, row, row >= 0, top, total, weighted, ENTROPY)


@triton.jit(do_not_specialize=["row_stride"], do_not_specialize_on_alignment=["logits"])
def _forward_merge(
    logits,
    ids,
    temperature,
    marks,
    parts,
    logp,
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
    ENTROPY: tl.constexpr,
):
    """One program for some rows: their segments, in ascending order."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = rows < count
    id, active = _active(ids, marks, rows, here, ignore_index, HAS_ROWS, HAS_IGNORED)
    inv = softmax.inverse(temperature, rows, active, PER_ROW)
    c = inv * softmax.LOG2E
    top, total, weighted = softmax.merge_parts(parts, 0, segments, count, rows, active, c, ENTROPY)
    _write(logits, rows, row_stride, id, V, top, total, weighted, inv, logp, lse, entropy, here, active, ENTROPY)


@triton.jit
def _backward(
    logits,
    out,
    ids,
    temperature,
    marks,
    logsumexp,
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
    HAS_LOGP: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program some columns of a row."""
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
        lse, entropy = tl.load(logsumexp + row), tl.load(entropies + row)
        chosen, slope, curve = softmax.upstream_of(
            grad_logp, grad_logsumexp, grad_entropy, row, active, inv, HAS_LOGP, HAS_LSE, HAS_ENTROPY
        )
        x = tl.load(source, mask=here, other=0.0).to(tl.float32)
        rest = softmax.nothing_or_nan(id, V)
        dz = softmax.dlogits(x, columns == id, rest, inv, lse, entropy, chosen, slope, curve, HAS_ENTROPY)
        tl.store(target, dz.to(dtype), mask=here)
    else:
        tl.store(target, tl.zeros((WIDTH,), tl.float32).to(dtype), mask=here)
