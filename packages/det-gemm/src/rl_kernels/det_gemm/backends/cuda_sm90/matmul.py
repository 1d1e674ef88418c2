"""The canonical chain on Hopper, the host side: operands as the kernel takes them, and its launch."""

from __future__ import annotations

import functools
from typing import Any

import torch

from rl_kernels.core.cuda.launch import kernel
from rl_kernels.core.cuda.program import Program
from rl_kernels.core.cuda.signature import MAP_SIZE
from rl_kernels.core.cuda.tensor_map import tensor_map
from rl_kernels.core.gpu import processors
from rl_kernels.det_gemm.backends.cuda_sm90.schedule import (
    BOX,
    HALF,
    K_MAJOR,
    MN_MAJOR,
    PLAIN,
    ROWS,
    SWIZZLE,
    Schedule,
    candidates,
    schedule_for,
)

HALVES = (torch.bfloat16, torch.float16)
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""DTYPE and OUT of the kernel."""
SIGNATURE = "TTT(PPPPqqqqqqiiiii)"
"""Maps of both operands and of the output, and ``struct Args``."""
ALIGNED = 16
"""Bytes that the copy engine's addresses and rows are multiples of."""
NO_MAP = bytes(MAP_SIZE)
THREADS = 128
"""Of a warpgroup."""
PROMOTION, PROMOTION_ONCE = 256, 128
"""Bytes that are brought into the L2 cache at a time; the second of what one tile alone reads, where 256 are slower."""
BY_ROW, BY_COLUMN = 1, 2
"""Which way a bias runs along a tile; 0 is no bias."""
BY_STRIDES, BOXES, TRANSPOSED = 0, 1, 2
"""How the output is stored."""


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    continues: bool = False,
    schedule: Schedule | None = None,
) -> None:
    """Write ``a[M, K] @ b[K, N] + bias[N]`` to ``out[M, N]``, or let its FP32 chain go on from what ``out`` holds.

    Operands of one dtype of 16 bits, any strides; ``out`` of any floating dtype and any strides. ``schedule`` is chosen
    by the sizes if it is not given.
    """
    if not out.numel():
        return
    (m, k), n = a.shape, b.shape[1]
    left, right, target, along = a, b.t(), out, BY_COLUMN
    if out.stride(1) != 1 and out.stride(0) == 1:
        # The same product, transposed, is stored row by row.
        left, right, target, along, m, n = right, left, out.t(), BY_ROW, n, m
    (left_major, left_map), (right_major, right_map) = _operand(left), _operand(right)
    cut = schedule or schedule_for(m, n, k, (left_major, right_major), processors(a.get_device()), continues)
    if cut.swapped:
        left, right, target, along = right, left, target.t(), BY_ROW + BY_COLUMN - along
        left_major, left_map, right_major, right_map = right_major, right_map, left_major, left_map
    cut = cut.fitted(left_major, right_major)
    stored, out_map = _output(target, cut)
    stages, shared = cut.depth(right_major), cut.shared(right_major)
    made = program(a.dtype, out.dtype, cut, stages, (left_major, right_major), stored, continues)
    rows, columns = target.shape
    if bias is not None:
        bias = bias.contiguous()
    kernel(made, "det_gemm", SIGNATURE, a.device).launch(
        min(cut.units(rows, columns), processors(a.get_device())),
        (cut.consumers + 1) * THREADS,
        _map(left_map, left_major, cut.rows, PROMOTION_ONCE if cut.swapped else PROMOTION),
        _map(right_map, right_major, cut.columns, PROMOTION),
        out_map,
        *(target, bias, left, right),
        *(*target.stride(), *left.stride(), *right.stride()),
        *(rows, columns, k, cut.group, 0 if bias is None else along),
        shared=shared,
        pdl=cut.swapped,
    )


@functools.cache
def program(
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    cut: Schedule,
    stages: int,
    majors: tuple[int, int],
    stored: int,
    continues: bool,
) -> Program:
    """Return the kernel for a schedule and operands that lie in these ways."""
    defines = {
        "DTYPE": CODES[dtype],
        "OUT": CODES[out_dtype],
        "TILE_M": cut.rows,
        "TILE_N": cut.columns,
        "CONSUMERS": cut.consumers,
        "BOXES": cut.inner // BOX,
        "STAGES": stages,
        "A_MAJOR": majors[0],
        "B_MAJOR": majors[1],
        "STORED": stored,
        "CONTINUES": int(continues),
        "A_ONCE": int(cut.swapped),
    }
    return Program("rl_kernels.det_gemm.backends.cuda_sm90", "det_gemm_sm90.cu", "sm_90a", tuple(defines.items()))


def programs_of(arch: str) -> list[Program]:
    """Return what a target has: every schedule that may be chosen, with aligned operands and output.

    Other operands, and other dtypes of the output than a weight gradient's, are compiled when they are met.
    """
    if arch != "sm_90a":
        return []
    majors = [(left, right) for left in (K_MAJOR, MN_MAJOR) for right in (K_MAJOR, MN_MAJOR)]
    cuts = [
        (cut, pair) for cut in (one.schedule for one in candidates()) for pair in majors if cut.fitted(*pair) == cut
    ]
    return [
        program(dtype, out, cut, cut.depth(pair[1]), pair, stored, continues)
        for dtype in HALVES
        for cut, pair in cuts
        for out, stored, continues in _outputs_of(cut, pair, dtype)
    ]


def _outputs_of(cut: Schedule, majors: tuple[int, int], dtype: torch.dtype) -> list[tuple[torch.dtype, int, bool]]:
    """Return how an aligned output is stored: in the operands' dtype; weight gradients, if not swapped, in FP32 too."""
    own = (dtype, BY_STRIDES if not cut.in_boxes else TRANSPOSED if cut.swapped else BOXES, False)
    if cut.swapped or majors != (MN_MAJOR, MN_MAJOR):
        return [own]
    return [own, (torch.float32, BOXES, False), (torch.float32, BOXES, True)]


def _operand(x: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Return how ``x[rows, K]`` lies, and what a map of it is a map of."""
    for major, view in ((K_MAJOR, x), (MN_MAJOR, x.t())):
        found = _described(view)
        if found is not None:
            return major, found
    return PLAIN, x


def _described(x: torch.Tensor) -> torch.Tensor | None:
    """Return ``x`` with strides that a map takes, or None if it has no map."""
    (rows, columns), (outer, inner) = x.shape, x.stride()
    if not x.numel() or x.data_ptr() % ALIGNED or (inner != 1 and columns != 1):
        return None
    if rows > 1 and (outer < columns or outer * x.itemsize % ALIGNED):
        return None
    if rows > 1 and inner == 1:
        return x
    # The stride of a dim of one is never used, but must be one that is possible.
    per = ALIGNED // x.itemsize
    return x.as_strided((rows, columns), (outer if rows > 1 else -(-columns // per) * per, 1))


def _map(x: torch.Tensor, major: int, rows: int, promotion: int) -> Any:
    """Return the map of an operand for tiles of so many rows."""
    if major == PLAIN:
        return NO_MAP
    return tensor_map(x, (rows, BOX) if major == K_MAJOR else (BOX, ROWS), swizzle=SWIZZLE, promotion=promotion)


def _output(target: torch.Tensor, cut: Schedule) -> tuple[int, Any]:
    """Return how the output is stored from tiles of this schedule, and its map."""
    upright, lying, columns = _described(target), _described(target.t()), cut.columns
    if cut.in_boxes and upright is not None:
        width = _widest(columns * target.itemsize)
        return BOXES, tensor_map(upright, (ROWS, width // target.itemsize), swizzle=width)
    if cut.in_boxes and lying is not None and target.itemsize == HALF:
        return TRANSPOSED, tensor_map(lying, (_widest(HALF * columns) // HALF, ROWS), swizzle=SWIZZLE)
    return BY_STRIDES, NO_MAP


def _widest(size: int) -> int:
    """Return the longest swizzle of which whole ones make up so many bytes."""
    return next(width for width in (128, 64, 32) if size % width == 0)
