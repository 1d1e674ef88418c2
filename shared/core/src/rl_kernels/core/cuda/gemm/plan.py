"""The plan of a product on Hopper: all that follows from the layouts of its matrices, so all but addresses."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from rl_kernels.core.cuda.gemm.schedule import (
    BOX,
    HALF,
    K_MAJOR,
    MN_MAJOR,
    PLAIN,
    ROWS,
    SWIZZLE,
    Schedule,
    schedule_for,
)
from rl_kernels.core.cuda.gemm.segmented import schedule_of_segments
from rl_kernels.core.cuda.program import Program
from rl_kernels.core.layout import ALIGNED

HALVES = (torch.bfloat16, torch.float16)
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Values of the kernel's DTYPE and OUT."""
THREADS = 128
"""Threads of a warpgroup."""
PROMOTION, PROMOTION_ONCE = 256, 128
"""Bytes that a load brings into the L2 cache; 256 is slower for what only one tile reads."""
BY_ROW, BY_COLUMN = 1, 2
"""The direction of a bias along a tile; 0 is no bias."""
BY_STRIDES, BOXES, TRANSPOSED = 0, 1, 2
"""Store modes of an output: through its strides, in TMA boxes, or in TMA boxes of its transpose."""


class MatrixLayout(NamedTuple):
    """The layout of a matrix: all that a launch depends on, except its address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool

    @classmethod
    def of(cls, x: torch.Tensor) -> MatrixLayout:
        """Return the layout of a matrix."""
        return cls(x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNED == 0)

    def t(self) -> MatrixLayout:
        """Return the layout of the transpose."""
        return MatrixLayout(self.shape[::-1], self.strides[::-1], self.dtype, self.aligned)


class Box(NamedTuple):
    """The part of a matrix that a tensor map covers: the tensor or its transpose, with other strides if TMA needs them.

    Attributes:
        transposed: whether the map covers the transpose.
        strides: strides of the map, or None for the strides of the tensor.
        size: rows and columns that one copy moves.
        swizzle: swizzle width in bytes.
        promotion: bytes brought into the L2 cache.
    """

    transposed: bool
    strides: tuple[int, int] | None
    size: tuple[int, int]
    swizzle: int
    promotion: int = PROMOTION

    def turned(self) -> Box:
        """Return the box for which the transpose has this map."""
        return self._replace(transposed=not self.transposed)


class Plan(NamedTuple):
    """A launch without its addresses.

    Attributes:
        flipped: whether the transposed product is computed, with the operands exchanged.
        program: the kernel.
        grid: number of blocks.
        block: number of threads of a block.
        boxes: boxes of the left operand, the right operand and the output, for the tensors of the call; None is no map.
        strides: strides of the output, the left operand and the right operand.
        sizes: rows and columns of the output, K, rows of tiles that are processed together.
        length: terms of a segment of K.
        scratch: bytes of global memory for the sums that wait for a merge.
        along: the direction of a bias.
        shared: bytes of dynamic shared memory.
        pdl: whether blocks may start early (programmatic dependent launch).
    """

    flipped: bool
    program: Program
    grid: int
    block: int
    boxes: tuple[Box | None, ...]
    strides: tuple[int, ...]
    sizes: tuple[int, int, int, int]
    along: int
    length: int
    scratch: int
    shared: int
    pdl: bool


def fits_tma(x: MatrixLayout) -> bool:
    """Say whether TMA can read an operand, or its transpose."""
    return _major(x) != PLAIN


def plan_of(
    a: MatrixLayout,
    b: MatrixLayout,
    out: MatrixLayout,
    multiprocessors: int,
    *,
    continues: bool = False,
    schedule: Schedule | None = None,
    segments: int = 1,
    length: int = 0,
) -> Plan:
    """Return the launch of ``a[M, K] @ b[K, N]``, for matrices with these layouts; options as in ``Product``.

    Raises:
        ValueError: K is cut into segments, and TMA does not read an operand.
    """
    left, right, target = a, b.t(), out
    along, (m, k), n = BY_COLUMN, left.shape, right.shape[0]
    flipped = target.strides[1] != 1 and target.strides[0] == 1
    if flipped:
        # The transposed product is stored row by row.
        left, right, target, along, m, n = right, left, target.t(), BY_ROW, n, m
    majors = _major(left), _major(right)
    if segments > 1 and PLAIN in majors:
        raise ValueError(f"segments: expected 1 for operands that TMA does not read, got {segments}")
    if segments == 1:
        cut = schedule or schedule_for(m, n, k, majors, multiprocessors, continues)
    else:
        cut = schedule or schedule_of_segments(m, n, k, majors, multiprocessors, segments, length)
    if cut.swapped:
        left, right, target, along = right, left, target.t(), BY_ROW + BY_COLUMN - along
        flipped, majors = not flipped, majors[::-1]
    cut = cut.fitted(*majors)
    stored, out_box = _output_box(target, cut)
    rows, columns = target.shape
    boxes = (
        _operand_box(left, majors[0], cut.rows, PROMOTION_ONCE if cut.swapped else PROMOTION),
        _operand_box(right, majors[1], cut.columns, PROMOTION),
        out_box,
    )
    # The kernel's operand b, and its output if flipped, are transposes of the given tensors.
    turned = (flipped, not flipped, flipped)
    return Plan(
        flipped,
        program(left.dtype, target.dtype, cut, cut.depth(majors[1]), majors, stored, continues),
        _blocks(cut, rows, columns, multiprocessors),
        (cut.consumers + 1) * THREADS,
        tuple(box.turned() if box and turn else box for box, turn in zip(boxes, turned, strict=True)),
        (*target.strides, *left.strides, *right.strides),
        (rows, columns, k, cut.group),
        along,
        length,
        cut.far * cut.consumers * cut.sums * _blocks(cut, rows, columns, multiprocessors),
        cut.shared(majors[1]),
        cut.early,
    )


def _blocks(cut: Schedule, rows: int, columns: int, multiprocessors: int) -> int:
    """Return the number of blocks: one for each multiprocessor, or clusters for all tiles."""
    tiles = cut.units(rows, columns)
    return min(tiles, multiprocessors) if cut.cluster == 1 else tiles * cut.cluster


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
    """Return the kernel for a schedule and operands of these layouts."""
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
        "SEGMENTS": cut.segments,
        "CLUSTER": cut.cluster,
        "NEAR": cut.near,
        "FAR": cut.far,
    }
    return Program("rl_kernels.core.cuda.gemm", "gemm_sm90.cu", "sm_90a", tuple(defines.items()))


def _major(x: MatrixLayout) -> int:
    """Return the layout of ``x[rows, K]``."""
    return next((major for major, view in ((K_MAJOR, x), (MN_MAJOR, x.t())) if _fits_tma(view)), PLAIN)


def _fits_tma(x: MatrixLayout) -> bool:
    """Say whether TMA can read or write a matrix, with the strides of ``_map_strides``."""
    (rows, columns), (outer, inner) = x.shape, x.strides
    if not (rows and columns and x.aligned) or (inner != 1 and columns != 1):
        return False
    return rows == 1 or (outer >= columns and outer * x.dtype.itemsize % ALIGNED == 0)


def _map_strides(x: MatrixLayout) -> tuple[int, int] | None:
    """Return strides that a map can have, or None if it can have the matrix's own."""
    (rows, columns), (outer, inner) = x.shape, x.strides
    if rows > 1 and inner == 1:
        return None
    # The stride of a dim of size 1 is never used, but it must be a legal one.
    per = ALIGNED // x.dtype.itemsize
    return (outer if rows > 1 else -(-columns // per) * per, 1)


def _operand_box(x: MatrixLayout, major: int, rows: int, promotion: int) -> Box | None:
    """Return the box of an operand for tiles of ``rows`` rows."""
    if major == PLAIN:
        return None
    if major == K_MAJOR:
        return Box(False, _map_strides(x), (rows, BOX), SWIZZLE, promotion)
    return Box(True, _map_strides(x.t()), (BOX, ROWS), SWIZZLE, promotion)


def _output_box(target: MatrixLayout, cut: Schedule) -> tuple[int, Box | None]:
    """Return the store mode of the output with this schedule, and the box of the output."""
    columns, size = cut.columns, target.dtype.itemsize
    if cut.in_boxes and _fits_tma(target):
        width = _widest_swizzle(columns * size)
        return BOXES, Box(False, _map_strides(target), (ROWS, width // size), width)
    if cut.in_boxes and _fits_tma(target.t()) and size == HALF:
        return TRANSPOSED, Box(True, _map_strides(target.t()), (_widest_swizzle(HALF * columns) // HALF, ROWS), SWIZZLE)
    return BY_STRIDES, None


def _widest_swizzle(size: int) -> int:
    """Return the largest swizzle width that divides ``size`` bytes."""
    return next(width for width in (128, 64, 32) if size % width == 0)
