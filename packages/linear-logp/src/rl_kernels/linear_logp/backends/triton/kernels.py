"""The kernels of linear_logp's Triton backend: tiles of logits end in registers as softmax states, or as dz.

A program forms tiles of BLOCK_M rows x 256 columns by ``gemm_kernels.chain``; Triton places them in threads. Order
of the sums, which is the contract (``backend``): a logit is one canonical chain over D. Each row of a tile gives a
state, by Triton's reduction along the row; the 4 tiles of a unit are merged in ascending order, then the units.
For dbias Triton's reduction adds the rows of a tile, and ``add_tiles`` adds the tiles in ascending order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core import constants
from rl_kernels.core.triton_lib import gemm_kernels, softcap, softmax
from rl_kernels.core.triton_lib.min_logit import least_kept, load_least, or_0, or_lowest
from rl_kernels.linear_logp import vocabulary

UNIT = tl.constexpr(constants.UNIT)
"""Columns of a unit: its blocks are merged first, then the units."""
BLOCK = tl.constexpr(vocabulary.BLOCK)
"""Columns of a tile, a block: each row of it gives one state."""
ROWS = tl.constexpr(32)
"""Rows whose states one program merges."""
KEPT_COLUMNS = tl.constexpr(32)
"""Columns of a tile that are kept by one store."""
SELECTED = tl.constexpr(64)
"""Rows whose selected logits one program forms."""


@triton.jit
def _raw_logits(
    hidden,
    hidden_row,
    hidden_k,
    weight,
    weight_row,
    weight_k,
    bias,
    bias_stride,
    cap,
    rate,
    row,
    first,
    N,
    V,
    D,
    HIDDEN: tl.constexpr,
    WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return a tile of logits, capped, before the temperature."""
    x = gemm_kernels.chain(
        *(hidden, hidden_row, hidden_k, weight, weight_row, weight_k, row, first, N, V, D),
        tl.zeros((BLOCK_M, BLOCK), tl.float32),
        *(HIDDEN, WEIGHT, BLOCK_M, BLOCK, BLOCK_K),
    )
    if HAS_BIAS:
        columns = first + tl.arange(0, BLOCK)
        x += tl.load(bias + columns.to(tl.int64) * bias_stride, mask=columns < V, other=0.0).to(tl.float32)[None, :]
    return softcap.capped(x, cap, rate) if CAPPED else x


@triton.jit
def _keep(to, x, here, first, first_kept, WIDTH: tl.constexpr):
    """Store the rows of a tile from column ``first`` on, in parts: each goes through shared memory."""
    if WIDTH > KEPT_COLUMNS:
        pairs = tl.permute(tl.reshape(x, (x.shape[0], 2, WIDTH // 2)), (0, 2, 1))
        left, right = tl.split(pairs)
        _keep(to, left, here, first, first_kept, WIDTH // 2)
        _keep(to, right, here, first + WIDTH // 2, first_kept, WIDTH // 2)
    else:
        columns = first + tl.arange(0, WIDTH)
        tl.store(to + columns[None, :], x, mask=here[:, None] & (columns >= first_kept)[None, :])


@triton.jit
def _column(id, start, V):
    """Return which of the V columns from ``start`` on each id selects, counted from ``start``; -1 if it is none."""
    return tl.where((id >= start) & (id < start + V), id - start, -1).to(tl.int32)


@triton.jit(do_not_specialize=["count", "vocab"])
def find_least(
    min_logit,
    temperature,
    ids,
    norm,
    leasts,
    count,
    vocab,
    PER_ROW: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Write the smallest logit of each row that counts, before the temperature. Grid: tiles of rows.

    With HAS_NORM -inf, if the row is NaN as a whole: it has no distribution, or its id is not a column.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = rows < count
    least = least_kept(min_logit, temperature, rows, here, PER_ROW, True)
    if HAS_NORM:
        _, log_total = softmax.load_norm(norm, rows, here)
        number = log_total + softmax.zero_or_nan(tl.load(ids + rows, mask=here, other=0), vocab)
        least = tl.where(number == number, least, float("-inf"))
    tl.store(leasts + rows, least, mask=here)


@triton.jit(do_not_specialize=["first_kept", "N", "V", "width"])
def states(
    hidden,
    weight,
    bias,
    cap,
    rate,
    temperature,
    leasts,
    parts,
    kept,
    hidden_row,
    hidden_k,
    weight_row,
    weight_k,
    bias_stride,
    first_kept,
    kept_width,
    N,
    V,
    D,
    width,
    HIDDEN: tl.constexpr,
    WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CAPPED: tl.constexpr,
    PER_ROW: tl.constexpr,
    MIN_LOGIT: tl.constexpr,
    ENTROPY: tl.constexpr,
    RAGGED: tl.constexpr,
    KEEPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Write states of BLOCK_M rows over ``width`` columns, a unit or a block, to ``parts``. Grid: rows x columns.

    With KEEPS the logits of the columns from ``first_kept`` on are written to ``kept[N, kept_width]``.
    """
    row_tile, part = gemm_kernels.place_of(tl.program_id(0), tl.cdiv(N, BLOCK_M), tl.cdiv(V, width), GROUP)
    row = row_tile * BLOCK_M
    rows = row + tl.arange(0, BLOCK_M)
    here = rows < N
    c = softmax.inverse(temperature, rows, here, PER_ROW) * softmax.LOG2E
    least = load_least(leasts, rows, here, MIN_LOGIT)
    operands = (hidden, hidden_row, hidden_k, weight, weight_row, weight_k, bias, bias_stride, cap, rate)
    total, weighted = tl.zeros_like(c), tl.zeros_like(c)
    top = total + float("-inf")
    # flatten lets the loads of the next block run while this one's states are formed.
    for first in tl.range(part * width, tl.minimum(part * width + width, V), BLOCK, flatten=True):
        x = _raw_logits(*operands, row, first, N, V, D, HIDDEN, WEIGHT, HAS_BIAS, CAPPED, BLOCK_M, BLOCK_K)
        columns = first + tl.arange(0, BLOCK)
        if KEEPS:
            _keep(kept + rows.to(tl.int64)[:, None] * kept_width - first_kept, x, here, first, first_kept, BLOCK)
        if RAGGED:
            x = tl.where((columns < V)[None, :], x, float("-inf"))
        x = or_lowest(x, least, MIN_LOGIT)
        block_top, block_total, block_weighted = softmax.rows_state(x, c, ENTROPY)
        top, total, weighted = softmax.merge(top, total, weighted, block_top, block_total, block_weighted, c, ENTROPY)
    softmax.store_part(parts, part, N, rows, here, top, total, weighted, ENTROPY)


@triton.jit(do_not_specialize=["start", "N", "V"])
def selected(
    hidden,
    weight,
    bias,
    cap,
    rate,
    ids,
    temperature,
    leasts,
    chosen,
    hidden_row,
    hidden_k,
    weight_row,
    weight_k,
    bias_stride,
    start,
    N,
    V,
    D,
    HAS_BIAS: tl.constexpr,
    CAPPED: tl.constexpr,
    PER_ROW: tl.constexpr,
    MIN_LOGIT: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write the selected logits of SELECTED rows: the diagonal of their product with the weight rows that they select.

    A chain has the same bits in every tile, so this costs less than a search for the selected logit in each tile of
    ``states``. Grid: tiles of rows.
    """
    rows = tl.program_id(0) * SELECTED + tl.arange(0, SELECTED)
    column = _column(tl.load(ids + rows, mask=rows < N, other=-1), start, V)
    inner = tl.arange(0, BLOCK_K)
    left = hidden + rows.to(tl.int64)[:, None] * hidden_row
    right = weight + column.to(tl.int64)[:, None] * weight_row
    acc = tl.zeros((SELECTED, SELECTED), tl.float32)
    for k in range(0, D, BLOCK_K):
        at = (k + inner).to(tl.int64)[None, :]
        x = tl.load(left + at * hidden_k, mask=(rows < N)[:, None] & (at < D), other=0.0)
        y = tl.load(right + at * weight_k, mask=(column >= 0)[:, None] & (at < D), other=0.0)
        acc = gemm_kernels.step(x, y, acc)
    lanes = tl.arange(0, SELECTED)
    value = tl.sum(tl.where(lanes[:, None] == lanes[None, :], acc, 0.0), 1)
    if HAS_BIAS:
        value += tl.load(bias + column.to(tl.int64) * bias_stride, mask=column >= 0, other=0.0).to(tl.float32)
    if CAPPED:
        value = softcap.capped(value, cap, rate)
    least = load_least(leasts, rows, rows < N, MIN_LOGIT)
    tl.store(chosen + rows, or_lowest(value, least, MIN_LOGIT), mask=rows < N)


@triton.jit(do_not_specialize=["count", "blocks"])
def merge_blocks(parts, merged, temperature, count, blocks, PER_ROW: tl.constexpr, ENTROPY: tl.constexpr):
    """Merge the block states of ROWS rows in one unit, in ascending order. Grid: tiles of rows, units."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = rows < count
    c = softmax.inverse(temperature, rows, here, PER_ROW) * softmax.LOG2E
    begin = tl.program_id(1) * (UNIT // BLOCK)
    end = tl.minimum(begin + UNIT // BLOCK, blocks)
    top, total, weighted = softmax.merge_parts(parts, begin, end, count, rows, here, c, ENTROPY)
    softmax.store_part(merged, tl.program_id(1), count, rows, here, top, total, weighted, ENTROPY)


@triton.jit(do_not_specialize=["count", "units", "V", "ignore_index"])
def finish(
    parts,
    temperature,
    chosen,
    ids,
    logp,
    norm,
    lse,
    entropy,
    count,
    units,
    V,
    ignore_index,
    HAS_IGNORED: tl.constexpr,
    PER_ROW: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """Merge the units of ROWS rows in ascending order, and write their statistics. Grid: tiles of rows."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = rows < count
    id = tl.load(ids + rows, mask=here, other=0)
    active = here & (id != ignore_index) if HAS_IGNORED else here
    inv = softmax.inverse(temperature, rows, here, PER_ROW)
    c = inv * softmax.LOG2E
    top, total, weighted = softmax.merge_parts(parts, 0, units, count, rows, here, c, ENTROPY)
    x = tl.load(chosen + rows, mask=active & (id >= 0) & (id < V), other=float("nan"))
    softmax.store_statistics(x, top, total, weighted, inv, logp, norm, lse, entropy, rows, here, active, ENTROPY)


@triton.jit(do_not_specialize=["start", "vocab", "N", "V", "begin", "width", "ignore_index"])
def dlogits(
    hidden,
    weight,
    bias,
    cap,
    rate,
    ids,
    temperature,
    leasts,
    norm,
    entropies,
    grad_logp,
    grad_logsumexp,
    grad_entropy,
    dz,
    partial,
    kept,
    hidden_row,
    hidden_k,
    weight_row,
    weight_k,
    bias_stride,
    dz_row,
    kept_row,
    start,
    vocab,
    N,
    V,
    D,
    begin,
    width,
    ignore_index,
    HIDDEN: tl.constexpr,
    WEIGHT: tl.constexpr,
    STORED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CAPPED: tl.constexpr,
    PER_ROW: tl.constexpr,
    MIN_LOGIT: tl.constexpr,
    HAS_IGNORED: tl.constexpr,
    HAS_LOGP: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    DBIAS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PERSISTENT: tl.constexpr,
):
    """Write dz of columns ``begin`` to ``begin + width``, and with DBIAS its sums over a tile's rows. Grid: tiles.

    The V columns of the weight are those from ``start`` on, of ``vocab``. With KEPT the logits of the columns from
    ``begin`` on are read from ``kept``, whose rows are ``kept_row`` apart.
    """
    tiles_m, tiles_n = tl.cdiv(N, BLOCK_M), tl.cdiv(width, BLOCK)
    last = tiles_m * tiles_n if PERSISTENT else tl.program_id(0) + 1
    operands = (hidden, hidden_row, hidden_k, weight, weight_row, weight_k, bias, bias_stride, cap, rate)
    for index in tl.range(tl.program_id(0), last, tl.num_programs(0), flatten=PERSISTENT):
        tile_m, tile_n = gemm_kernels.place_of(index, tiles_m, tiles_n, GROUP)
        row, first = tile_m * BLOCK_M, tile_n * BLOCK
        rows, columns = row + tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK)
        here = rows < N
        if KEPT:
            place = kept + rows.to(tl.int64)[:, None] * kept_row + columns[None, :]
            x = tl.load(place, mask=here[:, None] & (columns < width)[None, :], other=0.0)
        else:
            x = _raw_logits(*operands, row, begin + first, N, V, D, HIDDEN, WEIGHT, HAS_BIAS, CAPPED, BLOCK_M, BLOCK_K)
        id = tl.load(ids + rows, mask=here, other=-1)
        column = _column(id, start, V) - begin
        active = here & (id != ignore_index) if HAS_IGNORED else here
        inv = softmax.inverse(temperature, rows, here, PER_ROW)
        c = inv * softmax.LOG2E
        top, log_total = softmax.load_norm(norm, rows, here)
        entropy = tl.load(entropies + rows, mask=here, other=0.0)
        chosen, slope, curve = softmax.upstream_of(
            grad_logp, grad_logsumexp, grad_entropy, rows, active, inv, HAS_LOGP, HAS_LSE, HAS_ENTROPY
        )
        least = load_least(leasts, rows, here, MIN_LOGIT)
        rest = softmax.zero_or_nan(id, vocab)
        if MIN_LOGIT:
            # A largest value of NaN does the same, and takes a register less.
            top, rest = top + rest, tl.zeros_like(rest)
        z = x
        if HAS_ENTROPY:
            # A power of 0 has a gradient of 0, and or_0 would need more registers.
            z = or_lowest(x, least, MIN_LOGIT)
        selected = columns[None, :] == column[:, None]
        d = softmax.dlogits(
            *(z, selected, rest[:, None], c[:, None], top[:, None], log_total[:, None]),
            *(entropy[:, None], chosen[:, None], slope[:, None], curve[:, None], HAS_ENTROPY),
        )
        if not HAS_ENTROPY:
            d = or_0(d, x, least, MIN_LOGIT)
        if CAPPED:
            d = d * softcap.slope(x, cap, rate)
        if HAS_IGNORED or DBIAS:
            d = tl.where(active[:, None], d, 0.0)
        if DBIAS:
            place = partial + tl.full((), tile_m, tl.int64) * width + columns
            tl.store(place, tl.sum(d, 0), mask=columns < width)
        if STORED:
            dz.store([row, first], d.to(dz.dtype))
        else:
            place = dz + rows.to(tl.int64)[:, None] * dz_row + columns[None, :]
            tl.store(place, d.to(dz.dtype.element_ty), mask=here[:, None] & (columns < width)[None, :])


@triton.jit(do_not_specialize=["tiles", "width"])
def add_tiles(partial, out, tiles, width):
    """Add the partial sums of all tiles of rows to ``out``, in ascending order. Grid: blocks of columns."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = columns < width
    total = tl.load(out + columns, mask=here, other=0.0)
    for tile in range(tiles):
        total += tl.load(partial + tl.full((), tile, tl.int64) * width + columns, mask=here, other=0.0)
    tl.store(out + columns, total, mask=here)
