"""The products of experts in Triton: rows of one expert at a time, sums as in ``core.triton_lib.gemm_kernels``.

Rows are routes, sorted by expert. A tile has BLOCK_M routes of one expert, of which the last tile of an expert may have
fewer, and BLOCK_N columns; ``gate_up`` forms the BLOCK_N columns of gate and those of up together, and applies the
activation to them. Order of every sum, which is the contract: the canonical chain over K, so a route has the bits of
det_gemm whatever tile it is in. The gradient of a weight is that chain over the routes of an expert, from its first one
on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib.gemm_kernels import COLUMNS, ROWS, step, tile
from rl_kernels.moe.triton_lib.rows import activated, rounded


@triton.jit
def tile_of(index, ROUTES, TILES, E, size, SLOTS: tl.constexpr):
    """Return the expert of the index-th tile, its first route, and the end of the expert's; E beyond the last tile.

    TILES may be None for a single token, each of whose SLOTS routes is a tile; ROUTES then has their experts.
    """
    if TILES is None:
        expert = tl.load(ROUTES + index, mask=index < SLOTS, other=E).to(tl.int32)
        expert = tl.where((expert >= 0) & (expert < E), expert, E)
        first, end = index, index + 1
    else:
        expert = tl.load(TILES + index)
        first, end = tl.load(TILES + size + index), tl.load(TILES + 2 * size + index)
    return expert, first, end


@triton.jit
def routes_at(positions, end, ROUTES, TILES):
    """Return the routes at positions before ``end``."""
    routes = positions
    if TILES is not None:
        routes = tl.load(ROUTES + positions, mask=positions < end, other=0)
    return routes


@triton.jit
def sources(positions, ROUTES, GATHERED: tl.constexpr, SLOTS: tl.constexpr):
    """Return the rows of an operand: positions themselves, or the tokens of their routes."""
    rows = positions
    if GATHERED:
        rows = tl.load(ROUTES + positions) // SLOTS
    return rows.to(tl.int64)


@triton.jit
def left_tile(left, first, k, K, KIND: tl.constexpr, WHOLE: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return ``[BLOCK_M, BLOCK_K]`` of the left operand; 0 beyond K, which no block reaches if WHOLE."""
    inner = k + tl.arange(0, BLOCK_K)
    if KIND == ROWS:
        value = left.load([first, k])
    elif WHOLE:
        value = tl.load(left + inner[None, :])
    else:
        value = tl.load(left + inner[None, :], mask=(inner < K)[None, :], other=0.0)
    return value


@triton.jit
def chains(
    A, B, ROUTES, TILES, expert, first, end, column, more, N, K, b_expert, b_row, b_k, PAIR: tl.constexpr,
    LEFT: tl.constexpr, KIND: tl.constexpr, GATHERED: tl.constexpr, SLOTS: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the product of a tile of routes with BLOCK_N of their expert's N outputs; if PAIR also ``more`` later."""
    left, right, row, begin = A, B, column, 0
    if LEFT != ROWS:
        positions = first + tl.arange(0, BLOCK_M)
        # A row of the same expert stands for those beyond its last one, which are not stored.
        positions = tl.where(positions < end, positions, first)
        rows = positions
        if GATHERED:
            rows = routes_at(positions, end, ROUTES, TILES) // SLOTS
        left = A + rows.to(tl.int64)[:, None] * K
    if KIND == ROWS:
        row = expert * N + column
    elif KIND == COLUMNS:
        begin = expert * K
    else:
        right = B + expert.to(tl.int64) * b_expert
    acc, other = tl.zeros((BLOCK_M, BLOCK_N), tl.float32), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        a = left_tile(left, first, k, K, LEFT, WHOLE, BLOCK_K)
        acc = step(a, tile(right, row, begin + k, N, K, b_row, b_k, KIND, BLOCK_N, BLOCK_K), acc)
        if PAIR:
            other = step(a, tile(right, row + more, begin + k, N, K, b_row, b_k, KIND, BLOCK_N, BLOCK_K), other)
    return acc, other


@triton.jit
def finish(acc, BIAS, OUT, expert, first, end, column, rows, last, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Add the bias to sums of columns up to ``last``, store them to OUT unless it is None, and return them."""
    columns = column + tl.arange(0, BLOCK_N)
    if BIAS is not None:
        bias = tl.load(BIAS + expert.to(tl.int64) * N + columns, mask=columns < last, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    if OUT is not None:
        live = first + tl.arange(0, BLOCK_M) < end
        place = OUT + rows.to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(place, acc.to(OUT.dtype.element_ty), mask=live[:, None] & (columns < last)[None, :])
    return acc


@triton.jit(do_not_specialize=["E", "size"])
def product(
    A, B, BIAS, OUT, ROUTES, TILES, E, size, N, K, b_expert, b_row, b_k, LEFT: tl.constexpr, KIND: tl.constexpr,
    GATHERED: tl.constexpr, SCATTERED: tl.constexpr, SLOTS: tl.constexpr, WHOLE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write ``A[route] @ B[e, N, K]^T + BIAS[e, N]`` to OUT ``[T k, N]``. Grid: tiles of routes times of columns.

    GATHERED: rows of A are tokens. SCATTERED: rows of OUT are routes, else positions in the order of routes.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    expert, first, end = tile_of(tl.program_id(0) // tiles_n, ROUTES, TILES, E, size, SLOTS)
    if expert == E:
        return
    column = tl.program_id(0) % tiles_n * BLOCK_N
    acc, _ = chains(
        A, B, ROUTES, TILES, expert, first, end, column, 0, N, K, b_expert, b_row, b_k, False, LEFT, KIND, GATHERED,
        SLOTS, WHOLE, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    rows = first + tl.arange(0, BLOCK_M)
    if SCATTERED:
        rows = routes_at(rows, end, ROUTES, TILES)
    finish(acc, BIAS, OUT, expert, first, end, column, rows, N, N, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["E", "size"])
def gate_up(
    A, B, BIAS, Z, H, ROUTES, TILES, E, size, F, K, b_expert, b_row, b_k, ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr, LEFT: tl.constexpr, KIND: tl.constexpr, SLOTS: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write ``A[token] @ B[e, 2F, K]^T + BIAS[e, 2F]`` to Z ``[T k, 2F]``, and its activation to H ``[T k, F]``.

    Z may be None. Grid: tiles of routes times of columns of H.
    """
    tiles_n = tl.cdiv(F, BLOCK_N)
    expert, first, end = tile_of(tl.program_id(0) // tiles_n, ROUTES, TILES, E, size, SLOTS)
    if expert == E:
        return
    column = tl.program_id(0) % tiles_n * BLOCK_N
    rows = first + tl.arange(0, BLOCK_M)
    width: tl.constexpr = 2 * BLOCK_N if INTERLEAVED else BLOCK_N
    begin = 2 * column if INTERLEAVED else column
    gate, up = chains(
        A, B, ROUTES, TILES, expert, first, end, begin, F, 2 * F, K, b_expert, b_row, b_k, not INTERLEAVED, LEFT, KIND,
        True, SLOTS, WHOLE, BLOCK_M, width, BLOCK_K,
    )  # fmt: skip
    if INTERLEAVED:
        both = finish(gate, BIAS, Z, expert, first, end, begin, rows, 2 * F, 2 * F, BLOCK_M, width)
        gate, up = tl.split(tl.reshape(both, (BLOCK_M, BLOCK_N, 2)))
    else:
        gate = finish(gate, BIAS, Z, expert, first, end, begin, rows, F, 2 * F, BLOCK_M, width)
        up = finish(up, BIAS, Z, expert, first, end, F + begin, rows, 2 * F, 2 * F, BLOCK_M, width)
    h = activated(rounded(gate, H), rounded(up, H), H, ACTIVATION)
    finish(h, None, H, expert, first, end, column, rows, F, F, BLOCK_M, BLOCK_N)


@triton.jit
def weight_gradient(
    LEFT, RIGHT, OUT, ROUTES, BOUNDS, N, K, out_expert, out_row, out_column, LEFT_GATHERED: tl.constexpr,
    RIGHT_GATHERED: tl.constexpr, CONTINUES: tl.constexpr, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write ``LEFT[:, N]^T @ RIGHT[:, K]`` over the routes of each expert to OUT ``[E, N, K]``. Grid: experts, tiles.

    CONTINUES: the chain starts from OUT.
    """
    tiles_k = tl.cdiv(K, BLOCK_N)
    tiles = tl.cdiv(N, BLOCK_M) * tiles_k
    expert = tl.program_id(0) // tiles
    index = tl.program_id(0) % tiles
    n = index // tiles_k * BLOCK_M + tl.arange(0, BLOCK_M)
    k = index % tiles_k * BLOCK_N + tl.arange(0, BLOCK_N)
    place = OUT + expert.to(tl.int64) * out_expert + n.to(tl.int64)[:, None] * out_row
    place += k.to(tl.int64)[None, :] * out_column
    inside = (n < N)[:, None] & (k < K)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if CONTINUES:
        acc = tl.load(place, mask=inside, other=0.0)
    first, end = tl.load(BOUNDS + expert), tl.load(BOUNDS + expert + 1)
    for position in range(first, end, BLOCK_K):
        positions = position + tl.arange(0, BLOCK_K)
        live = (positions < end)[:, None]
        positions = tl.minimum(positions, end - 1)
        rows = sources(positions, ROUTES, LEFT_GATHERED, SLOTS)[:, None]
        left = tl.load(LEFT + rows * N + n[None, :], mask=live & (n < N)[None, :], other=0.0)
        rows = sources(positions, ROUTES, RIGHT_GATHERED, SLOTS)[:, None]
        right = tl.load(RIGHT + rows * K + k[None, :], mask=live & (k < K)[None, :], other=0.0)
        acc = step(left.T, right.T, acc)
    tl.store(place, acc.to(OUT.dtype.element_ty), mask=inside)
