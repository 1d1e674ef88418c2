"""The canonical chain on Hopper, the host side: operands as the kernel takes them, and its launch."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

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
    plan = plan_of(
        *(a.shape, a.stride(), a.data_ptr() % ALIGNED == 0),
        *(b.shape, b.stride(), b.data_ptr() % ALIGNED == 0),
        *(out.stride(), out.data_ptr() % ALIGNED == 0),
        *(a.dtype, out.dtype, continues, schedule, processors(a.get_device())),
    )
    left, right = (b, a) if plan.flipped else (a, b)
    if bias is not None:
        bias = bias.contiguous()
    kernel(plan.program, "det_gemm", SIGNATURE, a.device).launch(
        plan.grid,
        plan.block,
        *(NO_MAP if box is None else box.of(x) for box, x in zip(plan.boxes, (left, right, out), strict=True)),
        *(out, bias, left, right),
        *plan.strides,
        *(*plan.sizes, 0 if bias is None else plan.along),
        shared=plan.shared,
        pdl=plan.pdl,
    )


class Lying(NamedTuple):
    """How a matrix lies in memory: all that a launch follows but for its address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool

    def t(self) -> Lying:
        """Return how it lies transposed."""
        return Lying(self.shape[::-1], self.strides[::-1], self.dtype, self.aligned)


class Box(NamedTuple):
    """Which map a tensor gets: of itself or transposed, with other strides where its own are none that a map takes.

    Attributes:
        transposed: whether it is that of the transpose.
        strides: or None for its own.
        size: rows and columns of a copy.
        swizzle: bytes.
        promotion: bytes.
    """

    transposed: bool
    strides: tuple[int, int] | None
    size: tuple[int, int]
    swizzle: int
    promotion: int = PROMOTION

    def of(self, x: torch.Tensor) -> Any:
        """Return the map of a matrix that lies as the plan says."""
        return tensor_map(
            x,
            self.size,
            swizzle=self.swizzle,
            promotion=self.promotion,
            transposed=self.transposed,
            strides=self.strides,
        )

    def turned(self) -> Box:
        """Return the box that gives the same map of the transpose."""
        return self._replace(transposed=not self.transposed)


class Plan(NamedTuple):
    """A launch, but for addresses.

    Attributes:
        flipped: the transposed product is what is computed: the operands change places.
        program: the kernel.
        grid: blocks.
        block: threads.
        boxes: of the left operand, the right one and the output, for the tensors as they are given; None is no map.
        strides: of the output, the left operand and the right one.
        sizes: rows and columns of the output, K, rows of tiles that are worked on together.
        along: which way a bias runs.
        shared: bytes.
        pdl: whether blocks may begin early.
    """

    flipped: bool
    program: Program
    grid: int
    block: int
    boxes: tuple[Box | None, ...]
    strides: tuple[int, ...]
    sizes: tuple[int, int, int, int]
    along: int
    shared: int
    pdl: bool


@functools.lru_cache(maxsize=4096)
def plan_of(
    a_shape: tuple[int, int],
    a_strides: tuple[int, int],
    a_aligned: bool,
    b_shape: tuple[int, int],
    b_strides: tuple[int, int],
    b_aligned: bool,
    out_strides: tuple[int, int],
    out_aligned: bool,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    continues: bool,
    schedule: Schedule | None,
    multiprocessors: int,
) -> Plan:
    """Return the launch of ``a[M, K] @ b[K, N]``, for matrices that lie so."""
    left = Lying(a_shape, a_strides, dtype, a_aligned)
    right = Lying(b_shape, b_strides, dtype, b_aligned).t()
    target = Lying((a_shape[0], b_shape[1]), out_strides, out_dtype, out_aligned)
    along, (m, k), n = BY_COLUMN, left.shape, right.shape[0]
    flipped = target.strides[1] != 1 and target.strides[0] == 1
    if flipped:
        # The same product, transposed, is stored row by row.
        left, right, target, along, m, n = right, left, target.t(), BY_ROW, n, m
    majors = _major(left), _major(right)
    cut = schedule or schedule_for(m, n, k, majors, multiprocessors, continues)
    if cut.swapped:
        left, right, target, along = right, left, target.t(), BY_ROW + BY_COLUMN - along
        flipped, majors = not flipped, majors[::-1]
    cut = cut.fitted(*majors)
    stored, out_box = _output(target, cut)
    rows, columns = target.shape
    boxes = (
        _operand(left, majors[0], cut.rows, PROMOTION_ONCE if cut.swapped else PROMOTION),
        _operand(right, majors[1], cut.columns, PROMOTION),
        out_box,
    )
    # The kernel's operand b, and its output if flipped, are the transposes of what is given.
    turned = (flipped, not flipped, flipped)
    return Plan(
        flipped,
        program(left.dtype, target.dtype, cut, cut.depth(majors[1]), majors, stored, continues),
        min(cut.units(rows, columns), multiprocessors),
        (cut.consumers + 1) * THREADS,
        tuple(box.turned() if box and turn else box for box, turn in zip(boxes, turned, strict=True)),
        (*target.strides, *left.strides, *right.strides),
        (rows, columns, k, cut.group),
        along,
        cut.shared(majors[1]),
        cut.swapped,
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


def _major(x: Lying) -> int:
    """Return how ``x[rows, K]`` lies."""
    return next((major for major, view in ((K_MAJOR, x), (MN_MAJOR, x.t())) if _has_map(view)), PLAIN)


def _has_map(x: Lying) -> bool:
    """Say whether the copy engine takes a matrix, with the strides of ``_strides``."""
    (rows, columns), (outer, inner) = x.shape, x.strides
    if not (rows and columns and x.aligned) or (inner != 1 and columns != 1):
        return False
    return rows == 1 or (outer >= columns and outer * x.dtype.itemsize % ALIGNED == 0)


def _strides(x: Lying) -> tuple[int, int] | None:
    """Return strides that a map takes, or None for those that are there."""
    (rows, columns), (outer, inner) = x.shape, x.strides
    if rows > 1 and inner == 1:
        return None
    # The stride of a dim of one is never used, but must be one that is possible.
    per = ALIGNED // x.dtype.itemsize
    return (outer if rows > 1 else -(-columns // per) * per, 1)


def _operand(x: Lying, major: int, rows: int, promotion: int) -> Box | None:
    """Return the box of an operand for tiles of so many rows."""
    if major == PLAIN:
        return None
    if major == K_MAJOR:
        return Box(False, _strides(x), (rows, BOX), SWIZZLE, promotion)
    return Box(True, _strides(x.t()), (BOX, ROWS), SWIZZLE, promotion)


def _output(target: Lying, cut: Schedule) -> tuple[int, Box | None]:
    """Return how the output is stored from tiles of this schedule, and its box."""
    columns, size = cut.columns, target.dtype.itemsize
    if cut.in_boxes and _has_map(target):
        width = _widest(columns * size)
        return BOXES, Box(False, _strides(target), (ROWS, width // size), width)
    if cut.in_boxes and _has_map(target.t()) and size == HALF:
        return TRANSPOSED, Box(True, _strides(target.t()), (_widest(HALF * columns) // HALF, ROWS), SWIZZLE)
    return BY_STRIDES, None


def _widest(size: int) -> int:
    """Return the largest swizzle width that divides ``size`` bytes."""
    return next(width for width in (128, 64, 32) if size % width == 0)
