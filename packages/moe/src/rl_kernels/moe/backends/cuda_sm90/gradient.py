"""Host code of ``gradient_sm90.cu``: the gradients of experts' weights."""

from __future__ import annotations

import torch

from rl_kernels.core.cuda.launch import kernel
from rl_kernels.core.cuda.program import Program
from rl_kernels.core.cuda.tensor_map import tensor_map
from rl_kernels.core.gpu import processors
from rl_kernels.core.layout import ALIGNED, readable
from rl_kernels.core.triton_lib.schedule import Schedule
from rl_kernels.moe.backends.cuda_sm90 import products
from rl_kernels.moe.backends.cuda_sm90.products import BOX, CODES, ROWS, SHARED, SWIZZLE, THREADS

SIGNATURE = "T(PPPqqqPPiiii)"
"""The tensor map of the operand in the order of routes, then ``struct Args``."""
COLUMNS = 256
"""Columns of a tile, which has as many rows as one of routes."""
FIXED = 2 * ROWS * SWIZZLE + 1024
"""Bytes of shared memory for boxes, and for the alignment of the stages."""
STAGE = (ROWS + COLUMNS) * SWIZZLE
STAGES = (SHARED - FIXED) // STAGE


class WeightGradient:
    """Write ``left[:, N]^T @ right[:, K]`` over each expert's routes; the arguments are those of the Triton class."""

    def __init__(
        self,
        weight: torch.Tensor,
        buffer: torch.Tensor | None,
        slots: int,
        cut: Schedule,
        *,
        left_gathered: bool = False,
        right_gathered: bool = False,
    ) -> None:
        count, n, k = weight.shape
        self._is_left = left_gathered
        made = program(weight.dtype, left=left_gathered, continues=buffer is not None)
        self._kernel = kernel(made, "gradient", SIGNATURE, weight.device)
        self._strides = (0, 0, 0) if buffer is None else buffer.stride()
        self._numbers = count, n, k, slots
        tiles = count * -(-n // ROWS) * -(-k // COLUMNS)
        blocks = min(tiles, processors(weight.get_device()))
        self._sizes = (blocks, 1, 1), THREADS, FIXED + STAGES * STAGE

    def __call__(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        out: torch.Tensor,
        routes: torch.Tensor,
        bounds: torch.Tensor,
    ) -> None:
        """Launch it."""
        left, right = (readable(x, not x.data_ptr() % ALIGNED) for x in (left, right))
        ordered = right if self._is_left else left
        if not ordered.numel():
            # No route: a map of nothing is refused, and none is read.
            ordered = out.new_zeros((1, ordered.shape[1]), dtype=left.dtype)
        in_order = tensor_map(ordered, (BOX, BOX), swizzle=SWIZZLE)
        pointers = [x.data_ptr() for x in (left, right, out)]
        rest = (routes.data_ptr(), bounds.data_ptr())
        self._kernel.start(*self._sizes, False, (in_order, *pointers, *self._strides, *rest, *self._numbers))


def program(dtype: torch.dtype, *, left: bool, continues: bool) -> Program:
    """Return the kernel; ``left``: rows of the left operand are tokens, else those of the right one."""
    numbers = {
        "DTYPE": CODES[dtype],
        "TILE_N": COLUMNS,
        "STAGES": STAGES,
        "LEFT": int(left),
        "CONTINUES": int(continues),
    }
    return Program(products.PACKAGE, "gradient_sm90.cu", "sm_90a", tuple(numbers.items()))
