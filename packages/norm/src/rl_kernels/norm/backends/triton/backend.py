"""rms_norm and layer_norm in Triton: rows and gradients are read once and written once, forward and backward.

The reduction order is the contract of this backend. The order within a row, and the number of rows of a tile, depend
on D alone. The compiler chooses the register layout of a row by the alignment that it may assume, so rows are
contiguous and 16-byte aligned, or are copied first. The terms of dweight and dbias are added over the rows of a tile,
then over the tiles of a step in ascending order, then over the steps in ascending order, on top of ``main_grad``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

from rl_kernels.core.calls import Launches, prepared
from rl_kernels.core.gpu import device_of
from rl_kernels.core.layout import ALIGNED, readable
from rl_kernels.core.triton_lib.launch import Launch, ceil_div
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
THREADS = 32
"""Threads of a warp."""
GATED_FEWER = 2
"""Backward with a gate takes one of so many warps for tiles of several rows: the fastest of a few on an H200."""
FEW_STEPS = 32
"""Largest number of steps that does not fill a GPU: each program then takes one tile, and the chain adds tiles."""
MANY_STEPS = 1024
"""Smallest number of steps for which programs of one warp fill a GPU."""
STAGES_OF_WARP = 2
"""Tiles in flight of a program of one warp, of which a multiprocessor has many."""
STAGES = 3
"""Tiles of a step that are in flight at once, if all but the first fit in STAGE_BYTES."""
STAGE_BYTES = 1 << 16
"""Shared memory that every GPU has."""
COLUMNS, AHEAD = 32, 128
"""Columns of a program that adds parts, and the parts that it loads at once."""


@prepared
def forward(x: torch.Tensor, *options: Any) -> Launches:
    """Return (norm ``[N, D]``, stats ``[2, N]``)."""
    return _forward(x, None, None, *options)


@prepared
def forward_sum(x: torch.Tensor, residual: torch.Tensor, *options: Any) -> Launches:
    """Return (norm ``[N, D]``, ``x + residual``, stats ``[2, N]``)."""
    return _forward(x, residual, None, *options)


@prepared
def forward_gated(x: torch.Tensor, gate: torch.Tensor, *options: Any) -> Launches:
    """Return (norm times ``silu(gate)`` ``[N, D]``, stats ``[2, N]``)."""
    return _forward(x, None, gate, *options)


def _forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    centered: bool,
    offset: float,
    cast_first: bool,
) -> Launches:
    count, size = x.shape
    has_residual, has_gate = residual is not None, gate is not None
    dtype = x.dtype if has_gate else result_dtype(x, weight, cast_first)
    width, rows, _, warps = tile(size)
    numbers = (count, eps, offset, size, width, rows, centered, cast_first)
    norm = Launch(kernels.forward, (ceil_div(count, rows),), numbers, num_warps=warps)
    copied, first = _copied(x, residual, weight, bias, gate), int(has_residual or has_gate)

    def launch(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        weight, bias = rest[first : first + 2]
        output, stats = x.new_empty(count, size, dtype=dtype), x.new_empty(2, count, dtype=torch.float32)
        total = x.new_empty(count, size) if has_residual else None
        operands = [x, rest[0] if has_residual else None, weight, bias, rest[0] if has_gate else None]
        for place in copied:
            operands[place] = readable(operands[place], False)
        if count:
            with device_of(x):
                norm(*operands, output, total, stats)
        return (output, stats) if total is None else (output, total, stats)

    return launch


@prepared
def backward(*arguments: Any) -> Launches:
    """Return (dx ``[N, D]``, dweight ``[D]``, dbias ``[D]``)."""
    *saved, needs_weight, needs_bias = arguments
    return _backward(None, saved, None, needs_weight, needs_bias)


@prepared
def backward_into(*arguments: Any) -> Launches:
    """Add the gradient of the weight to ``main_grad[D]``; return (dx, dbias)."""
    *saved, main_grad, needs_bias = arguments
    return _backward(None, saved, main_grad, True, needs_bias)


@prepared
def backward_gated(gate: torch.Tensor, *arguments: Any) -> Launches:
    """Return (dx, dgate ``[N, D]``, dweight ``[D]``, dbias ``[D]``)."""
    *saved, needs_weight, needs_bias = arguments
    return _backward(gate, saved, None, needs_weight, needs_bias)


@prepared
def backward_gated_into(gate: torch.Tensor, *arguments: Any) -> Launches:
    """Add the gradient of the weight to ``main_grad[D]``; return (dx, dgate, dbias)."""
    *saved, main_grad, needs_bias = arguments
    return _backward(gate, saved, main_grad, True, needs_bias)


def _backward(
    gate: torch.Tensor | None,
    saved: list[Any],
    main_grad: torch.Tensor | None,
    needs_weight: bool,
    needs_bias: bool,
) -> Launches:
    grad, grad_sum, x, weight, stats, centered, offset = saved
    count, size = x.shape
    width, rows, step, warps = tile(size)
    if gate is not None and rows > 1:
        warps = max(warps // GATED_FEWER, 1)
    per_program = rows if ceil_div(count, step) <= FEW_STEPS else step
    programs, stages = ceil_div(count, per_program), _stages(width * rows, x, grad, grad_sum, gate)
    turns, alike = 1, rows
    if programs >= MANY_STEPS and gate is None and warps > 1:
        alike = _rows_of_warp(size, width, x, grad, grad_sum)
        if alike:
            turns, warps, stages = warps, 1, STAGES_OF_WARP
    numbers = (count, offset, size, width, rows, per_program, centered, stages, turns, alike or rows)
    gradients = Launch(kernels.backward, (programs,), numbers, num_warps=warps)
    is_continued = main_grad is not None

    def chain(stride: int, continues: bool) -> Launch:
        numbers = (programs, stride, size, COLUMNS, AHEAD, step // per_program, continues)
        return Launch(kernels.chain, (ceil_div(size, COLUMNS),), numbers, num_warps=1)

    weight_chain = chain(1 if main_grad is None else main_grad.stride(0), is_continued)
    bias_chain = chain(1, False)
    has_gate = gate is not None
    copied = _copied(grad, grad_sum, x, weight, stats, gate)

    def launch(*args: Any) -> tuple[torch.Tensor, ...]:
        gate, args = (args[0], args[1:]) if has_gate else (None, args)
        operands = [*args[:5], gate]
        for place in copied:
            operands[place] = readable(operands[place], False)
        x, stats = operands[2], operands[4]
        dx, dgate = x.new_empty(count, size), x.new_empty(count, size) if has_gate else None
        dweight = args[7] if is_continued else stats.new_empty(size if needs_weight else 0)
        dbias = stats.new_empty(size if needs_bias else 0)
        weight_parts = stats.new_empty(programs, size) if needs_weight else None
        bias_parts = stats.new_empty(programs, size) if needs_bias else None
        with device_of(x):
            if count:
                gradients(*operands, dx, dgate, weight_parts, bias_parts)
            if needs_weight:
                weight_chain(weight_parts, dweight)
            if needs_bias:
                bias_chain(bias_parts, dbias)
        of_rows = (dx,) if dgate is None else (dx, dgate)
        return (*of_rows, dbias) if is_continued else (*of_rows, dweight, dbias)

    return launch


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


def _rows_of_warp(size: int, width: int, *read: torch.Tensor | None) -> int:
    """Return the rows that a warp holds at once if Triton gives each thread 16 bytes of a row; 0 if it gives fewer."""
    sizes = {x.element_size() for x in read if x is not None}
    per = ALIGNED // max(sizes)
    return THREADS * per // width if len(sizes) == 1 and not size % per else 0


def _copied(*operands: torch.Tensor | None) -> list[int]:
    """Return the numbers of the operands that kernels cannot read as they are."""
    fits = [x is None or (x.is_contiguous() and x.data_ptr() % ALIGNED == 0) for x in operands]
    return [number for number, is_read in enumerate(fits) if not is_read]
