"""The matrix product in Triton, prepared for operands of one layout; ``gemm_kernels`` has its order of sums.

Operands are not copied: tiles are loaded by a descriptor if dtype and addresses allow it, otherwise by masked loads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from rl_kernels.core.gpu import device_of
from rl_kernels.core.layout import ALIGNED, flat_rows, has_flat_rows, readable
from rl_kernels.core.operator import tiles_change_no_bit
from rl_kernels.core.triton_lib.arithmetic import INTERPRETED
from rl_kernels.core.triton_lib.gemm_kernels import BY_COLUMN, BY_ROW, COLUMNS, POINTERS, ROWS, STEP, multiply
from rl_kernels.core.triton_lib.launch import Launch
from rl_kernels.core.triton_lib.schedule import HALF, Schedule, in_segments, processors, schedule_for


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
        b_transposed: ``b`` is passed as ``b^T[N, K]``.
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
        b_transposed: bool = False,
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
        rows_of_a, columns_of_b = a.t() if a_transposed else a, b if b_transposed else b.t()
        (m, n), k = out.shape, columns_of_b.shape[1]
        cut = schedule or schedule_for(m, n, k, a.dtype, a.device, spans=span > STEP.value)
        if segments > 1:
            cut = in_segments(cut, segments, length, a.dtype)
        left, right, target = (columns_of_b, rows_of_a, out.t()) if cut.swapped else (rows_of_a, columns_of_b, out)
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
            multiply,
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
