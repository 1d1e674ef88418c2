"""Bugs of the Triton kernel of products and of det_gemm's host code for it, planted in copies of the backend.

They run in Triton's interpreter too, a thousand times as slow, so each is one that a small case shows.
"""

from __future__ import annotations

from rl_kernels.core.testing import Bug, Mutants

MODULES = ("rl_kernels.core.triton_lib.gemm", "rl_kernels.det_gemm.triton_backend")

KERNEL = (
    Bug("mask of K off by one", "(c < K)[None, :], other=0.0)", "(c < K - 1)[None, :], other=0.0)"),
    Bug(
        "rows beyond the operand read",
        "mask=(r < rows)[:, None] & (c < K)",
        "mask=(r < rows + 1)[:, None] & (c < K - (rows == 7))",
    ),
    Bug(
        "strides of an operand exchanged",
        "r.to(tl.int64)[:, None] * row_stride + c.to(tl.int64)[None, :] * k_stride",
        "r.to(tl.int64)[:, None] * k_stride + c.to(tl.int64)[None, :] * row_stride",
    ),
    Bug("mask of the output off by one", "(columns < N - column)[None, :]", "(columns < N - column - 1)[None, :]"),
    Bug(
        "bias of the first tile for all",
        "columns = column + tl.arange(0, BLOCK_N)\n",
        "columns = tl.arange(0, BLOCK_N)\n",
    ),
    Bug(
        "buffer overwritten",
        "acc = tl.load(place, mask=inside, other=0.0)",
        "acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)",
    ),
    Bug(
        "every tile from the first rows",
        "row, column = tile_m * BLOCK_M, tile_n * BLOCK_N",
        "row, column = 0 * tile_m, tile_n * BLOCK_N",
    ),
)
HOST = (
    Bug("strides of the output exchanged", "else target.stride()),", "else target.stride()[::-1]),"),
    Bug("stride of the bias taken for 2", "0 if bias is None else bias.stride(0)", "0 if bias is None else 2"),
    Bug(
        "tiles rounded down", "(min(tiles, processors(a.device)) if cut.persistent else tiles,)", "(max(tiles - 1, 1),)"
    ),
    Bug(
        "output kept between calls",
        "out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)",
        "out = globals().setdefault((a.shape, b.shape), a.new_empty((len(a), b.shape[1]), dtype=out_dtype))",
    ),
    Bug(
        "weight gradient of the transposed tokens",
        "gemm.matmul(a.t(), dc, out)\n",
        "gemm.matmul(a.flip(0).t(), dc, out)\n",
    ),
)
CASES = ("odd", "one-column", "linear-leading", "linear-column-major", "dw-many-steps", "dw-continued")

MUTANTS = (Mutants("triton", MODULES, (*KERNEL, *HOST), CASES),)
