"""The canonical chain in Triton: a matrix product whose order of sums depends on K alone, not on tiles or stages.

Order of every sum, which is the contract: ``acc = acc + A[:, k:k+16] B[k:k+16, :]`` for k = 0, 16, 32, ... in one FP32
accumulator, K padded with zeros, rounded once at the end. With segments of K each segment is such a chain from 0, and
a balanced tree merges them. FP32 operands are multiplied in FP32 (no TF32); the 16 terms of a step are summed from zero
and then added to acc.

A program holds BLOCK_M x BLOCK_N accumulators and loads BLOCK_K terms at a time; which thread holds what is Triton's
choice. Both operands are taken as ``[rows, K]``, the right one as its transpose. Neither is copied: a tile is loaded
through a tensor descriptor if dtype and addresses allow it, else by masked loads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from rl_kernels.core import constants
from rl_kernels.core.gpu import device_of
from rl_kernels.core.layout import ALIGNED, flat_rows, has_flat_rows, readable
from rl_kernels.core.operator import tiles_change_no_bit
from rl_kernels.core.triton_lib.arithmetic import INTERPRETED, fma
from rl_kernels.core.triton_lib.launch import Launch
from rl_kernels.core.triton_lib.schedule import HALF, Schedule, in_segments, processors, schedule_for

ROWS, COLUMNS, POINTERS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Ways to read an operand ``[rows, K]``: through its descriptor, through a descriptor of its transpose, by pointers."""
BY_ROW, BY_COLUMN = tl.constexpr(1), tl.constexpr(2)
"""Dim of a tile along which a bias runs; 0 is no bias."""
STEP = tl.constexpr(constants.STEP)
"""Terms that one step of the chain adds."""


class Box(NamedTuple):
    """A descriptor of a matrix without its address: shape, strides, and the tile that is loaded or stored at once."""

    shape: list[int]
    strides: list[int]
    tile: list[int]

    def of(self, x: torch.Tensor) -> TensorDescriptor:
        """Return the descriptor at the address of ``x``; the constructor is skipped, which would check all again."""
        made = object.__new__(TensorDescriptor)
        vars(made).update(base=x, shape=self.shape, strides=self.strides, block_shape=self.tile)
        return made


class Operand(NamedTuple):
    """How a kernel reads an operand ``[rows, K]``; a descriptor has its strides, which are then 0 here."""

    box: Box | None
    row_stride: int
    k_stride: int
    kind: int

    def of(self, x: torch.Tensor) -> Any:
        """Return what the kernel takes for an operand with this layout, or for its transpose."""
        return x if self.box is None else self.box.of(x)


def operand(x: torch.Tensor, rows: int, k: int) -> Operand:
    """Return how tiles ``[rows, k]`` of ``x[rows, K]`` are read in place."""
    # Strides that are passed as 0 do not specialize the kernel.
    if described(x):
        return Operand(box_of(x, rows, k), 0, 0, ROWS.value)
    if described(x.t()):
        return Operand(box_of(x.t(), k, rows), 0, 0, COLUMNS.value)
    row_stride, k_stride = x.stride()
    return Operand(None, row_stride, k_stride, POINTERS.value)


def described(x: torch.Tensor) -> bool:
    """Say whether ``x`` can be read through a descriptor: two dims, the last contiguous, 16 bits, aligned."""
    if x.dtype not in HALF or not x.numel():
        return False
    if not INTERPRETED.value and not tiles_change_no_bit(x.device):
        return False
    outer = 0 if x.shape[0] == 1 else x.stride(0) * x.itemsize
    # Rows that overlap, such as expanded ones, are read by pointers.
    apart = x.shape[0] == 1 or x.stride(0) >= x.shape[1]
    return (x.stride(1) == 1 or x.shape[1] == 1) and apart and not (outer | x.data_ptr()) % ALIGNED


def box_of(x: torch.Tensor, rows: int, columns: int) -> Box:
    """Return the box of ``x`` for tiles ``[rows, columns]``."""
    count, width = x.shape
    # The stride of a dim of size 1 is never used, but must be valid.
    outer = x.stride(0) if count > 1 else -(-width * x.itemsize // ALIGNED) * ALIGNED // x.itemsize
    return Box([count, width], [outer, 1], [rows, columns])


class Product:
    """Write ``a[M, K] @ b[K, N] + bias[N]`` to ``out[M, N]``, prepared for tensors like those it is made with.

    The rows of a matrix may have several dims, as in ``a[..., K]``; rows that no stride describes are copied.

    The tensors of a call have the shapes, strides, dtypes, device and alignment to 16 bytes of those tensors. Operands
    have one dtype and any strides; ``out`` has any floating dtype and any strides.

    Args:
        a: the left operand.
        b: the right operand.
        out: what is written.
        bias: added to each row, or None.
        a_transposed: ``a`` is passed as ``a^T[K, M]``.
        continues: the FP32 chain starts from ``out``.
        span: a multiple of 16, for FP32 operands: every ``span`` terms are summed from zero in a chain of their own,
            and then added. Short spans lose digits if K is long; a chain that is to be continued must end at a whole
            span.
        schedule: the tiling; None: the sizes choose one.
        segments: with 2, 4 or 8 of K, nothing is continued and ``span`` is 16.
        length: terms of a segment, a multiple of 16.
    """

    def __init__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        a_transposed: bool = False,
        continues: bool = False,
        span: int = STEP.value,
        schedule: Schedule | None = None,
        segments: int = 1,
        length: int = 0,
    ) -> None:
        self._is_empty = not out.numel()
        if self._is_empty:
            return
        self._fits = has_flat_rows(a), has_flat_rows(b)
        a, b, out = flat_rows(a), flat_rows(b), flat_rows(out)
        (m, n), k = out.shape, b.shape[0]
        cut = schedule or schedule_for(m, n, k, a.dtype, a.device, spans=span > STEP.value)
        if segments > 1:
            cut = in_segments(cut, segments, length, a.dtype)
        rows_of_a = a.t() if a_transposed else a
        left, right, target = (b.t(), rows_of_a, out.t()) if cut.swapped else (rows_of_a, b.t(), out)
        is_stored = described(target)
        if not is_stored and out.dtype == torch.float32:
            # The shared memory to store such a tile does not fit beside the loads of the next tile.
            cut = replace(cut, persistent=False, parts=1)
        tiles = cut.tiles(m, n)
        self._left, self._right = operand(left, cut.rows, cut.inner), operand(right, cut.columns, cut.inner)
        self._target = box_of(target, cut.rows, cut.columns // cut.parts) if is_stored else None
        self._is_swapped = cut.swapped
        along = BY_ROW.value if cut.swapped else BY_COLUMN.value
        self._launch = Launch(
            _matmul,
            (min(tiles, processors(a.device)) if cut.persistent else tiles,),
            (
                *(*self._left[1:3], *self._right[1:3], *((0, 0) if is_stored else target.stride())),
                *(0 if bias is None else bias.stride(0), *target.shape, k, length),
                *(self._left.kind, self._right.kind, is_stored, 0 if bias is None else along, continues),
                *(span if a.dtype == torch.float32 else STEP.value, cut.rows, cut.columns, cut.inner),
                *(cut.group, cut.persistent, cut.parts, segments),
            ),
            num_warps=cut.warps,
            num_stages=cut.stages,
        )

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Launch it."""
        if self._is_empty:
            return
        if not all(self._fits):
            a, b = readable(a, self._fits[0]), readable(b, self._fits[1])
        left, right = self._left.of(b if self._is_swapped else a), self._right.of(a if self._is_swapped else b)
        target = out if self._target is None else self._target.of(out)
        with device_of(a):
            self._launch(left, right, target, out if bias is None else bias)


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    continues: bool = False,
    span: int = STEP.value,
    schedule: Schedule | None = None,
    segments: int = 1,
    length: int = 0,
) -> None:
    """Write ``a[M, K] @ b[K, N] + bias[N]`` to ``out[M, N]`` once; the options are those of ``Product``."""
    product = Product(
        *(a, b, out, bias),
        continues=continues,
        span=span,
        schedule=schedule,
        segments=segments,
        length=length,
    )
    product(a, b, out, bias)


@triton.jit
def tile(source, row, k, rows, K, row_stride, k_stride, KIND: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return ``[BLOCK, BLOCK_K]`` of an operand ``[rows, K]``; 0 beyond its edges."""
    if KIND == ROWS:
        value = source.load([row, k])
    elif KIND == COLUMNS:
        value = source.load([k, row]).T
    else:
        r, c = row + tl.arange(0, BLOCK), k + tl.arange(0, BLOCK_K)
        place = source + r.to(tl.int64)[:, None] * row_stride + c.to(tl.int64)[None, :] * k_stride
        value = tl.load(place, mask=(r < rows)[:, None] & (c < K)[None, :], other=0.0)
    return value


@triton.jit
def step(left, right, acc):
    """Return ``acc`` plus the products of these terms of both operands."""
    if INTERPRETED:
        # The interpreter multiplies by a library, in its own order, which FP64 hides; it would take BF16 for integers.
        return tl.dot(left.to(tl.float64), right.T.to(tl.float64), acc.to(tl.float64), out_dtype=tl.float64).to(
            tl.float32
        )
    elif left.dtype == tl.float32:
        # Added one term at a time, a long chain would lose digits, so a step is summed from zero.
        tl.static_assert(left.shape[1] == STEP, "FP32 operands are loaded one step at a time")
        return _join(tl.dot(left, right.T, input_precision="ieee"), acc)
    else:
        return tl.dot(left, right.T, acc)


@triton.jit
def _join(part, acc):
    """Return ``part + acc`` by an fma: Triton would turn a plain sum into a dot that accumulates onto ``acc``."""
    return fma(part, tl.full(acc.shape, 1.0, tl.float32), acc)


@triton.jit
def chain(
    a,
    a_row_stride,
    a_k_stride,
    b,
    b_row_stride,
    b_k_stride,
    row,
    column,
    M,
    N,
    K,
    acc,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPAN: tl.constexpr = STEP,
    begin=0,
):
    """Return ``acc`` continued by the chain of ``a[M, K]`` and ``b[N, K]`` from ``begin`` on, at row and column."""
    if SPAN > STEP:
        for first in range(begin, K, SPAN):
            part = tl.zeros(acc.shape, tl.float32)
            for k in range(first, tl.minimum(first + SPAN, K), BLOCK_K):
                left = tile(a, row, k, M, K, a_row_stride, a_k_stride, LEFT, BLOCK_M, BLOCK_K)
                right = tile(b, column, k, N, K, b_row_stride, b_k_stride, RIGHT, BLOCK_N, BLOCK_K)
                part = step(left, right, part)
            acc = _join(part, acc)
    else:
        for k in range(begin, K, BLOCK_K):
            left = tile(a, row, k, M, K, a_row_stride, a_k_stride, LEFT, BLOCK_M, BLOCK_K)
            right = tile(b, column, k, N, K, b_row_stride, b_k_stride, RIGHT, BLOCK_N, BLOCK_K)
            acc = step(left, right, acc)
    return acc


@triton.jit
def _segments(
    a,
    a_row_stride,
    a_k_stride,
    b,
    b_row_stride,
    b_k_stride,
    row,
    column,
    M,
    N,
    K,
    length,
    index: tl.constexpr,
    COUNT: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the tree sum of COUNT segments of K, a power of two, from number ``index`` on."""
    if COUNT == 1:
        # BLOCK_K divides the length, so no block reaches into the next segment.
        total = chain(
            *(a, a_row_stride, a_k_stride, b, b_row_stride, b_k_stride, row, column, M, N),
            *(tl.minimum((index + 1) * length, K), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)),
            *(LEFT, RIGHT, BLOCK_M, BLOCK_N, BLOCK_K, STEP, index * length),
        )
    else:
        operands = (a, a_row_stride, a_k_stride, b, b_row_stride, b_k_stride, row, column, M, N, K, length)
        half: tl.constexpr = COUNT // 2
        first = _segments(*operands, index, half, LEFT, RIGHT, BLOCK_M, BLOCK_N, BLOCK_K)
        second = _segments(*operands, index + half, half, LEFT, RIGHT, BLOCK_M, BLOCK_N, BLOCK_K)
        total = _join(first, second)
    return total


@triton.jit
def place_of(index, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Return row and column of the index-th tile; GROUP rows of tiles make a panel, which stays in the L2 cache."""
    group = index // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP, GROUP)
    within = index % (GROUP * tiles_n)
    return group * GROUP + within % height, within // height


@triton.jit
def _pointers(c, row, column, M, N, row_stride, column_stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return pointers to a tile of ``c[M, N]``, and which of them are inside ``c``."""
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    base = c + tl.full((), row, tl.int64) * row_stride + tl.full((), column, tl.int64) * column_stride
    place = base + rows.to(tl.int64)[:, None] * row_stride + columns.to(tl.int64)[None, :] * column_stride
    return place, (rows < M - row)[:, None] & (columns < N - column)[None, :]


@triton.jit
def _store(
    acc,
    c,
    c_row_stride,
    c_column_stride,
    bias,
    bias_stride,
    row,
    column,
    M,
    N,
    STORED: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add the bias in FP32, round once, and store a tile."""
    if BIAS == BY_ROW:
        rows = row + tl.arange(0, BLOCK_M)
        acc += tl.load(bias + rows.to(tl.int64) * bias_stride, mask=rows < M, other=0.0).to(tl.float32)[:, None]
    elif BIAS == BY_COLUMN:
        columns = column + tl.arange(0, BLOCK_N)
        acc += tl.load(bias + columns.to(tl.int64) * bias_stride, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if STORED:
        c.store([row, column], acc.to(c.dtype))
    else:
        place, inside = _pointers(c, row, column, M, N, c_row_stride, c_column_stride, BLOCK_M, BLOCK_N)
        tl.store(place, acc.to(c.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "N", "K", "length"])
def _matmul(
    a,
    b,
    c,
    bias,
    a_row_stride,
    a_k_stride,
    b_row_stride,
    b_k_stride,
    c_row_stride,
    c_column_stride,
    bias_stride,
    M,
    N,
    K,
    length,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    STORED: tl.constexpr,
    BIAS: tl.constexpr,
    CONTINUES: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PERSISTENT: tl.constexpr,
    PARTS: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """One program per tile; if PERSISTENT, fewer programs, each of which takes tile after tile."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    last = tiles_m * tiles_n if PERSISTENT else tl.program_id(0) + 1
    # flatten lets the loads of the next tile run while this one is stored.
    for index in tl.range(tl.program_id(0), last, tl.num_programs(0), flatten=PERSISTENT):
        tile_m, tile_n = place_of(index, tiles_m, tiles_n, GROUP)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        operands = (a, a_row_stride, a_k_stride, b, b_row_stride, b_k_stride, row, column, M, N, K)
        if SEGMENTS > 1:
            acc = _segments(*operands, length, 0, SEGMENTS, LEFT, RIGHT, BLOCK_M, BLOCK_N, BLOCK_K)
        else:
            if CONTINUES:
                place, inside = _pointers(c, row, column, M, N, c_row_stride, c_column_stride, BLOCK_M, BLOCK_N)
                acc = tl.load(place, mask=inside, other=0.0)
            else:
                acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            acc = chain(*operands, acc, LEFT, RIGHT, BLOCK_M, BLOCK_N, BLOCK_K, SPAN)
        target = (c, c_row_stride, c_column_stride, bias, bias_stride)
        if PARTS == 2:
            first, second = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
            _store(first, *target, row, column, M, N, STORED, BIAS, BLOCK_M, BLOCK_N // 2)
            _store(second, *target, row, column + BLOCK_N // 2, M, N, STORED, BIAS, BLOCK_M, BLOCK_N // 2)
        else:
            _store(acc, *target, row, column, M, N, STORED, BIAS, BLOCK_M, BLOCK_N)
