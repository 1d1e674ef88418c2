"""The products of experts in Triton: rows of one expert at a time, sums as in ``core.triton_lib.gemm_kernels``.

Rows are routes, sorted by expert. A tile has BLOCK_M routes of one expert, of which the last tile of an expert may have
fewer, and BLOCK_N columns. Order of every sum, which is the contract: the canonical chain over K, so a route has the
bits of det_gemm whatever tile it is in. The gradient of a weight is that chain over the routes of an expert, from its
first one on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_kernels.core.triton_lib.gemm_kernels import COLUMNS, ROWS, step, tile


@triton.jit
def tile_of(index, BOUNDS, E, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Return the expert of the index-th tile, its first route, and the end of the expert's; E beyond the last tile."""
    e = tl.arange(0, WIDTH)
    first = tl.load(BOUNDS + e, mask=e < E, other=0)
    end = tl.load(BOUNDS + e + 1, mask=e < E, other=0)
    tiles = (end - first + BLOCK - 1) // BLOCK
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= index).to(tl.int32), 0)
    here = e == expert
    position = tl.sum(tl.where(here, first + (index - ends + tiles) * BLOCK, 0), 0)
    return tl.minimum(expert, E), position, tl.sum(tl.where(here, end, 0), 0)


@triton.jit
def sources(positions, live, ROUTES, slots, GATHERED: tl.constexpr):
    """Return the rows of an operand: positions themselves, or the tokens of their routes."""
    rows = positions
    if GATHERED:
        rows = tl.load(ROUTES + positions, mask=live, other=0) // slots
    return rows.to(tl.int64)


@triton.jit(do_not_specialize=["E", "slots"])
def product(
    A, B, BIAS, OUT, ROUTES, BOUNDS, E, N, K, slots,
    b_expert, b_row, b_k, KIND: tl.constexpr, GATHERED: tl.constexpr, SCATTERED: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write ``A[route] @ B[e, N, K]^T + BIAS[e, N]`` to OUT ``[T k, N]``. Grid: tiles of routes times of columns.

    GATHERED: rows of A are tokens. SCATTERED: rows of OUT are routes, else positions in the order of routes.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    expert, first, end = tile_of(tl.program_id(0) // tiles_n, BOUNDS, E, BLOCK_M, WIDTH)
    if expert == E:
        return
    column = tl.program_id(0) % tiles_n * BLOCK_N
    positions = first + tl.arange(0, BLOCK_M)
    live = positions < end
    left = A + sources(positions, live, ROUTES, slots, GATHERED)[:, None] * K
    right = B
    row, begin = column, 0
    if KIND == ROWS:
        row = expert * N + column
    elif KIND == COLUMNS:
        begin = expert * K
    else:
        right = B + expert.to(tl.int64) * b_expert
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        inner = k + tl.arange(0, BLOCK_K)
        a = tl.load(left + inner[None, :], mask=live[:, None] & (inner < K)[None, :], other=0.0)
        acc = step(a, tile(right, row, begin + k, N, K, b_row, b_k, KIND, BLOCK_N, BLOCK_K), acc)
    columns = column + tl.arange(0, BLOCK_N)
    if BIAS is not None:
        bias = tl.load(BIAS + expert.to(tl.int64) * N + columns, mask=columns < N, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    rows = positions
    if SCATTERED:
        rows = tl.load(ROUTES + positions, mask=live, other=0)
    place = OUT + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(place, acc.to(OUT.dtype.element_ty), mask=live[:, None] & (columns < N)[None, :])


@triton.jit(do_not_specialize=["slots"])
def weight_gradient(
    LEFT, RIGHT, OUT, ROUTES, BOUNDS, N, K, slots, out_expert, out_row, out_column,
    LEFT_GATHERED: tl.constexpr, RIGHT_GATHERED: tl.constexpr, CONTINUES: tl.constexpr, BLOCK_M: tl.constexpr,
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
        live = positions < end
        rows = sources(positions, live, ROUTES, slots, LEFT_GATHERED)
        left = tl.load(LEFT + rows[None, :] * N + n[:, None], mask=live[None, :] & (n < N)[:, None], other=0.0)
        rows = sources(positions, live, ROUTES, slots, RIGHT_GATHERED)
        right = tl.load(RIGHT + rows[None, :] * K + k[:, None], mask=live[None, :] & (k < K)[:, None], other=0.0)
        acc = step(left, right, acc)
    tl.store(place, acc.to(OUT.dtype.element_ty), mask=inside)
