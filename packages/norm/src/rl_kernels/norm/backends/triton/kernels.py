"""The kernels of the Triton backend of rms_norm and layer_norm.

A program holds tiles of ROWS whole rows, whose D columns are padded to WIDTH. Order of the sums, which is the contract
(``backend``): Triton's reduction over the columns of a row. dweight and dbias: Triton's reduction over the rows of a
tile, then the tiles of a step, then the steps, both in ascending order. Roundings are explicit (``fma``, ``product``),
so that no compiler may fuse in one kernel and not in another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib.arithmetic import fma, product, rounded, sigmoid_parts

REST = tl.constexpr(16)
"""Parts that ``chain`` loads at once where fewer than AHEAD are left; a multiple of INNER."""


@triton.jit
def spread(value, like):
    """Return one number per row, broadcast to a tile of rows."""
    return tl.broadcast_to(value[:, None], like.shape)


@triton.jit
def columns(POINTER, d, inside, like):
    """Load one number per column as FP32, broadcast to a tile of rows."""
    return tl.broadcast_to(tl.load(POINTER + d, mask=inside, other=0.0).to(tl.float32)[None, :], like.shape)


@triton.jit
def mean_of(x, D: tl.constexpr):
    """Return the mean of each row over its D columns; the padding must hold zeros."""
    if D & (D - 1) == 0:
        # Exact, so the same bits as a division, which takes many instructions.
        return tl.sum(x, 1) * (1.0 / D)
    else:
        return tl.div_rn(tl.sum(x, 1), tl.full([x.shape[0]], D, tl.float32))


@triton.jit
def weighted(x, WEIGHT, d, inside, offset):
    """Return rows times ``weight + offset``; unchanged without a weight."""
    if WEIGHT is not None:
        x = product(x, columns(WEIGHT, d, inside, x) + offset)
    return x


@triton.jit
def gated(x, gate, X, WEIGHT, CAST_FIRST: tl.constexpr):
    """Return rows times ``silu(gate)``; with CAST_FIRST they are rounded before, if the weight has the dtype of X."""
    if WEIGHT is not None:
        is_alike: tl.constexpr = WEIGHT.dtype == X.dtype
        if CAST_FIRST and is_alike:
            x = rounded(x, X.dtype.element_ty)
    gate = gate.to(tl.float32)
    return product(x, tl.div_rn(gate, sigmoid_parts(gate)))


@triton.jit
def through_gate(grad, norm, gate, DGATE, place, mask):
    """Write the gradient of the gate, for the gradient of the result; return the gradient of the norm."""
    one = tl.full(gate.shape, 1.0, tl.float32)
    sigmoid = tl.div_rn(one, sigmoid_parts(gate))
    slope = product(sigmoid, fma(gate, one - sigmoid, one))
    tl.store(DGATE + place, product(product(grad, norm), slope).to(DGATE.dtype.element_ty), mask=mask)
    return product(grad, product(gate, sigmoid))


@triton.jit(do_not_specialize=("count",))
def forward(
    X, RESIDUAL, WEIGHT, BIAS, GATE, Y, SUM, STATS, count, eps, offset,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, CENTERED: tl.constexpr, CAST_FIRST: tl.constexpr,
):  # fmt: skip
    """Write the norm of ROWS rows of X; with RESIDUAL of X + RESIDUAL, which goes to SUM. Grid: tiles of rows."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < count
    d = tl.arange(0, WIDTH)
    inside = d < D
    place = rows.to(tl.int64)[:, None] * D + d[None, :]
    mask = there[:, None] & inside[None, :]
    x = tl.load(X + place, mask=mask, other=0.0).to(tl.float32)
    if GATE is not None:
        # Beside the rows: a load stays behind the stores before it, and its latency would come on top of theirs.
        gate = tl.load(GATE + place, mask=mask, other=0.0)
    if RESIDUAL is not None:
        total = (x + tl.load(RESIDUAL + place, mask=mask, other=0.0).to(tl.float32)).to(SUM.dtype.element_ty)
        tl.store(SUM + place, total, mask=mask)
        x = total.to(tl.float32)
    mean = tl.zeros([ROWS], tl.float32)
    if CENTERED:
        mean = mean_of(x, D)
        x = tl.where(inside[None, :], x - spread(mean, x), 0.0)
    inverse = tl.div_rn(tl.full([ROWS], 1.0, tl.float32), tl.sqrt_rn(mean_of(product(x, x), D) + eps))
    tl.store(STATS + rows, inverse, mask=there)
    tl.store(STATS + count + rows, mean, mask=there)
    x = product(x, spread(inverse, x))
    if CAST_FIRST:
        x = rounded(x, X.dtype.element_ty) if GATE is not None else x.to(X.dtype.element_ty).to(tl.float32)
    x = weighted(x, WEIGHT, d, inside, offset)
    if BIAS is not None:
        x = x + columns(BIAS, d, inside, x)
    if GATE is not None:
        x = gated(x, gate, X, WEIGHT, CAST_FIRST)
    tl.store(Y + place, x.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def _of_tile(
    GRAD, GRAD_SUM, X, WEIGHT, STATS, GATE, DX, DGATE, PARTS_WEIGHT, PARTS_BIAS, count, offset, first,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, CENTERED: tl.constexpr, TURNS: tl.constexpr,
    ALIKE: tl.constexpr, TURN: tl.constexpr = 0, APART: tl.constexpr = 1,
):  # fmt: skip
    """Write dx of the rows of turns TURN, TURN + APART, ... of a tile; return the sums of their terms.

    The sums of turns are added as Triton adds those of warps: first those that are farthest apart.
    """
    if APART < TURNS:
        operands = (GRAD, GRAD_SUM, X, WEIGHT, STATS, GATE, DX, DGATE, PARTS_WEIGHT, PARTS_BIAS, count, offset, first)
        low, low_bias = _of_tile(*operands, D, WIDTH, ROWS, CENTERED, TURNS, ALIKE, TURN, 2 * APART)
        high, high_bias = _of_tile(*operands, D, WIDTH, ROWS, CENTERED, TURNS, ALIKE, TURN + APART, 2 * APART)
        of_weight, of_bias = low + high, low_bias + high_bias
    else:
        d = tl.arange(0, WIDTH)
        inside = d < D
        row = tl.arange(0, ROWS // TURNS)
        rows = first + row % ALIKE + TURN * ALIKE + row // ALIKE * (ALIKE * TURNS)
        there = rows < count
        place = rows.to(tl.int64)[:, None] * D + d[None, :]
        mask = there[:, None] & inside[None, :]
        x = tl.load(X + place, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(GRAD + place, mask=mask, other=0.0).to(tl.float32)
        if GATE is not None:
            gate = tl.load(GATE + place, mask=mask, other=0.0).to(tl.float32)
        if GRAD_SUM is not None:
            of_sum = tl.load(GRAD_SUM + place, mask=mask, other=0.0).to(tl.float32)
        inverse = spread(tl.load(STATS + rows, mask=there, other=0.0), x)
        if CENTERED:
            x = x - spread(tl.load(STATS + count + rows, mask=there, other=0.0), x)
        x = product(x, inverse)
        if GATE is not None:
            grad = through_gate(grad, weighted(x, WEIGHT, d, inside, offset), gate, DGATE, place, mask)
        pull = weighted(grad, WEIGHT, d, inside, offset)
        shared = mean_of(product(pull, x), D)
        dx = fma(-x, spread(shared, x), pull)
        if CENTERED:
            dx = dx - spread(mean_of(pull, D), dx)
        dx = product(dx, inverse)
        if GRAD_SUM is not None:
            dx = dx + of_sum
        tl.store(DX + place, dx.to(DX.dtype.element_ty), mask=mask)
        of_weight, of_bias = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
        if PARTS_WEIGHT is not None:
            of_weight = tl.sum(product(grad, x), 0)
        if PARTS_BIAS is not None:
            of_bias = tl.sum(grad, 0)
    return of_weight, of_bias


@triton.jit(do_not_specialize=("count",))
def backward(
    GRAD, GRAD_SUM, X, WEIGHT, STATS, GATE, DX, DGATE, PARTS_WEIGHT, PARTS_BIAS, count, offset,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PER: tl.constexpr, CENTERED: tl.constexpr,
    STAGES: tl.constexpr, TURNS: tl.constexpr, ALIKE: tl.constexpr,
):  # fmt: skip
    """Write dx of PER rows, and the sums of their terms of dweight and dbias. Grid: parts of PER rows.

    The terms of a tile of ROWS rows are added to each other, then the tiles in ascending order. TURNS > 1: one warp
    takes in turn what TURNS warps of a tile would, ALIKE neighboring rows at once, and adds as they would.
    """
    part = tl.program_id(0)
    d = tl.arange(0, WIDTH)
    inside = d < D
    of_weight, of_bias = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    for first in tl.range(0, PER, ROWS, num_stages=STAGES):
        of_tile, of_tile_bias = _of_tile(
            GRAD, GRAD_SUM, X, WEIGHT, STATS, GATE, DX, DGATE, PARTS_WEIGHT, PARTS_BIAS, count, offset,
            part * PER + first, D, WIDTH, ROWS, CENTERED, TURNS, ALIKE,
        )  # fmt: skip
        of_weight += of_tile
        of_bias += of_tile_bias
    place = part.to(tl.int64) * D + d
    if PARTS_WEIGHT is not None:
        tl.store(PARTS_WEIGHT + place, of_weight, mask=inside)
    if PARTS_BIAS is not None:
        tl.store(PARTS_BIAS + place, of_bias, mask=inside)


@triton.jit(do_not_specialize=("count", "stride"))
def chain(
    PARTS, OUT, count, stride,
    D: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr, INNER: tl.constexpr, CONTINUED: tl.constexpr,
):  # fmt: skip
    """Write the sum of PARTS ``[count, D]`` to OUT; if CONTINUED, add it to OUT. Grid: tiles of columns.

    Parts ascend: INNER of them are added to each other, then that sum to the total. AHEAD parts are loaded at once, so
    that their latencies overlap.
    """
    d = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = d < D
    # Columns beyond the last one read the last one, so the loads need no mask.
    place = PARTS + tl.minimum(d, D - 1)
    target = OUT + d.to(tl.int64) * stride
    total = tl.zeros([COLUMNS], tl.float32)
    if CONTINUED:
        total = tl.load(target, mask=inside, other=0.0)
    full = count // AHEAD
    for _ in range(full):
        for _ in tl.static_range(0, AHEAD, INNER):
            inner = tl.zeros([COLUMNS], tl.float32)
            for _ in tl.static_range(INNER):
                inner += tl.load(place)
                place += D
            total += inner
    for first in range(full * AHEAD, count, REST):
        for group in tl.static_range(0, REST, INNER):
            inner = tl.zeros([COLUMNS], tl.float32)
            for ahead in tl.static_range(INNER):
                there = tl.full([COLUMNS], first + group + ahead, tl.int32) < count
                inner += tl.load(place, mask=there, other=0.0)
                place += D
            total += inner
    tl.store(target, total, mask=inside)
