"""rms_norm and layer_norm in Triton: rows and gradients are read once and written once, forward and backward.

The reduction order is the contract of this backend. The order within a row, and the number of rows of a tile, depend
on D alone. The compiler chooses the register layout of a row by the alignment that it may assume, so rows are
contiguous and 16-byte aligned, or are copied first. The terms of dweight and dbias are added over the rows of a tile,
then over the tiles of a step in ascending order, then over the steps in ascending order, on top of ``main_grad``.
"""

from __future__ import annotations

import functools

import torch
import triton

from rl_kernels.core.gpu import device_of
from rl_kernels.core.layout import ALIGNED, readable
from rl_kernels.core.triton_lib.launch import ceil_div, launch
from rl_kernels.norm.backends.triton import kernels
from rl_kernels.norm.results import result_dtype

PER_STEP = 16384
"""Numbers in a step, within the bounds on its rows below."""
SHORTEST_STEP, LONGEST_STEP = 16, 128
"""Smallest and largest number of rows of a step: for rows of at least 1024 numbers, and of at most 128."""
PER_TILE = 2048
"""Numbers in a tile of several rows."""
MOST_ROWS = 16
"""Largest number of rows of a tile."""
PER_WARP = 512
"""Numbers of a tile for each warp of its program."""
MOST_WARPS = 16
FEW_STEPS = 32
"""Largest number of steps that does not fill a GPU: each program then takes one tile, and the chain adds tiles."""
STAGES = 3
"""Tiles of a step that are in flight at once, if all but the first fit in STAGE_BYTES."""
STAGE_BYTES = 1 << 16
"""Shared memory that every GPU has."""
COLUMNS, AHEAD = 32, 128
"""Columns of a program that adds parts, and the parts that it loads at once."""


def forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    centered: bool,
    offset: float,
    cast_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (norm ``[N, D]``, stats ``[2, N]``)."""
    return _forward(x, None, None, weight, bias, eps, centered, offset, cast_first)


def forward_sum(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    centered: bool,
    offset: float,
    cast_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (norm ``[N, D]``, ``x + residual``, stats ``[2, N]``)."""
    total = x.new_empty(x.shape)
    output, stats = _forward(x, _canonical(residual), total, weight, bias, eps, centered, offset, cast_first)
    return output, total, stats


def _forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    total: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    centered: bool,
    offset: float,
    cast_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    count, size = x.shape
    output = x.new_empty(x.shape, dtype=result_dtype(x, weight, cast_first))
    stats = x.new_empty((2, count), dtype=torch.float32)
    if count:
        width, rows, _, warps = tile(size)
        with device_of(x):
            launch(
                kernels.forward,
                (ceil_div(count, rows),),
                *(_canonical(x), residual, _canonical(weight), _canonical(bias), output, total, stats),
                *(count, eps, offset, size, width, rows, centered, cast_first),
                num_warps=warps,
            )
    return output, stats


def backward(
    grad: torch.Tensor,
    grad_sum: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    stats: torch.Tensor,
    centered: bool,
    offset: float,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dx ``[N, D]``, dweight ``[D]``, dbias ``[D]``)."""
    arguments = (grad, grad_sum, x, weight, stats, centered, offset)
    dweight, dbias = (stats.new_empty(x.shape[1] if needed else 0) for needed in (needs_weight, needs_bias))
    dx = _backward(*arguments, dweight if needs_weight else None, dbias if needs_bias else None, continued=False)
    return dx, dweight, dbias


def backward_into(
    grad: torch.Tensor,
    grad_sum: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    stats: torch.Tensor,
    centered: bool,
    offset: float,
    main_grad: torch.Tensor,
    needs_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the gradient of the weight to ``main_grad[D]``; return (dx, dbias)."""
    dbias = stats.new_empty(x.shape[1] if needs_bias else 0)
    arguments = (grad, grad_sum, x, weight, stats, centered, offset)
    return _backward(*arguments, main_grad, dbias if needs_bias else None, continued=True), dbias


def _backward(
    grad: torch.Tensor,
    grad_sum: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    stats: torch.Tensor,
    centered: bool,
    offset: float,
    dweight: torch.Tensor | None,
    dbias: torch.Tensor | None,
    *,
    continued: bool,
) -> torch.Tensor:
    count, size = x.shape
    dx = x.new_empty(x.shape)
    width, rows, step, warps = tile(size)
    rows_of_program = rows if ceil_div(count, step) <= FEW_STEPS else step
    programs = ceil_div(count, rows_of_program)
    parts = [None if out is None else stats.new_empty((programs, size)) for out in (dweight, dbias)]
    with device_of(x):
        if count:
            launch(
                kernels.backward,
                (programs,),
                *(_canonical(grad), _canonical(grad_sum), _canonical(x), _canonical(weight), stats.contiguous()),
                *(
                    dx,
                    *parts,
                    count,
                    offset,
                    size,
                    width,
                    rows,
                    rows_of_program,
                    centered,
                    _stages(width * rows, x, grad, grad_sum),
                ),
                num_warps=warps,
            )
        for out, part, is_continued in ((dweight, parts[0], continued), (dbias, parts[1], False)):
            if out is not None:
                launch(
                    kernels.chain,
                    (ceil_div(size, COLUMNS),),
                    *(part, out, programs, out.stride(0), size, COLUMNS, AHEAD, step // rows_of_program, is_continued),
                    num_warps=1,
                )
    return dx


@functools.cache
def tile(size: int) -> tuple[int, int, int, int]:
    """Return (columns of a tile, rows of a tile, rows of a step, warps), by D alone, since they fix the sum order."""
    width = max(triton.next_power_of_2(size), 2)
    rows = min(max(PER_TILE // width, 1), MOST_ROWS)
    step = min(max(PER_STEP // width, SHORTEST_STEP), LONGEST_STEP)
    return width, rows, step, min(max(width * rows // PER_WARP, 1), MOST_WARPS)


def _stages(numbers: int, *read: torch.Tensor | None) -> int:
    size = sum(numbers * value.element_size() for value in read if value is not None)
    return STAGES if (STAGES - 1) * size <= STAGE_BYTES else 1


def _canonical(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else readable(x, x.is_contiguous() and x.data_ptr() % ALIGNED == 0)
