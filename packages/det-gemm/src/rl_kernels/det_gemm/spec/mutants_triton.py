"""Bugs of the Triton kernel of products and of det_gemm's host code for it, planted in copies of the backend.

They also run in Triton's interpreter, a thousand times slower, so a small case must show each of them.
"""

from __future__ import annotations

from rl_kernels.core.testing import Bug, Mutants

MODULES = (
    "rl_kernels.core.triton_lib.schedule",
    "rl_kernels.core.triton_lib.gemm",
    "rl_kernels.det_gemm.backends.triton.backend",
)

KERNEL = (
    Bug("mask of K off by one", "(c < K)[None, :], other=0.0)", "(c < K - 1)[None, :], other=0.0)"),
    Bug(
        "terms of K beyond the first block skipped",
        "        for k in range(begin, K, BLOCK_K):\n            left",
        "        for k in range(begin, tl.minimum(K, begin + BLOCK_K), BLOCK_K):\n            left",
    ),
    Bug("last row of the output not written", "(rows < M - row)[:, None]", "(rows < M - row - 1)[:, None]"),
    Bug("mask of the output off by one", "(columns < N - column)[None, :]", "(columns < N - column - 1)[None, :]"),
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
SEGMENTS = (
    Bug("a segment of the same terms twice", "_segments(*where, index + half,", "_segments(*where, index,"),
    Bug("segments that reach into the next", "tl.minimum((index + 1) * length, K)", "K"),
)
HOST = (
    Bug(
        "tiles rounded down", "(min(tiles, processors(a.device)) if cut.persistent else tiles,)", "(max(tiles - 1, 1),)"
    ),
    Bug(
        "weight gradient of the transposed tokens",
        "gemm.matmul(a.t(), dc, out)\n",
        "gemm.matmul(a.flip(0).t(), dc, out)\n",
    ),
)
CASES = ("odd", "one-column", "linear-leading", "linear-column-major", "dw-many-steps", "dw-continued", "segments")

MUTANTS = (Mutants("triton", MODULES, (*KERNEL, *SEGMENTS, *HOST), CASES),)
