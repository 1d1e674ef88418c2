"""Kernels that read the memory of other ranks' GPUs: add their parts by a tree, and copy their slices."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rl_kernels.core.gpu import device_of, processors
from rl_kernels.core.triton_lib.launch import launch

BLOCK = 2048
PROGRAMS = 4
"""Programs on a multiprocessor: enough loads in flight to hide the latency between GPUs."""


def aligned(count: int) -> int:
    """Return a count rounded up to whole blocks."""
    return -(-count // BLOCK) * BLOCK


def add_parts(
    handle: Any,
    start: int,
    shape: torch.Size,
    first: int,
    end: int,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    ranks: int,
    at: int = 0,
) -> None:
    """Write the sums of elements ``first`` to ``end`` of all ranks' FP32 parts, plus bias, to ``out``.

    Args:
        handle: of symmetric memory.
        start: byte in each rank's memory at which its part begins.
        shape: of a part; a bias runs along the last dim.
        first: the first element.
        end: the element after the last.
        out: contiguous; element i goes to its place i - at.
        bias: ``[N]`` or None.
        ranks: 2, 4 or 8.
        at: element at which ``out`` begins.
    """
    if end <= first:
        return
    blocks = -(-(end - first) // BLOCK)
    with device_of(out):
        launch(
            _add_parts,
            (programs(blocks, out),),
            handle.buffer_ptrs_dev,
            out if bias is None else bias.contiguous(),
            out,
            numbers=(start, first, end, at, shape[-1] if len(shape) else 1, ranks, bias is not None, BLOCK),
            num_warps=8,
        )


def copy_slices(handle: Any, start: int, out: torch.Tensor, each: int, ranks: int) -> None:
    """Copy slices of ``each`` elements to ``out``: slice r from rank r's memory, whose byte ``start`` is element 0."""
    blocks = -(-out.numel() // BLOCK)
    with device_of(out):
        launch(
            _copy_slices,
            (programs(blocks, out),),
            handle.buffer_ptrs_dev,
            out,
            numbers=(start, out.numel(), each, ranks, BLOCK),
            num_warps=8,
        )


def programs(blocks: int, out: torch.Tensor) -> int:
    """Return the number of programs for blocks of ``out``."""
    return min(blocks, PROGRAMS * processors(out.get_device())) if out.is_cuda else blocks


@triton.jit
def _part(parts, rank, start, at, inside, out):
    """Return elements of one rank's memory as numbers of the type of ``out``."""
    address = tl.load(parts.to(tl.pointer_type(tl.int64)) + rank) + start
    # Known to be aligned, so that a thread loads 16 bytes at once.
    return tl.load(tl.multiple_of(address.to(out.dtype), 16) + at, mask=inside, other=0.0)


@triton.jit
def _sum(parts, start, at, inside, like, first: tl.constexpr, COUNT: tl.constexpr):
    if COUNT == 1:
        value = _part(parts, first, start, at, inside, like)
    elif COUNT == 2:
        value = _part(parts, first, start, at, inside, like) + _part(parts, first + 1, start, at, inside, like)
    elif COUNT == 4:
        value = _sum(parts, start, at, inside, like, first, 2) + _sum(parts, start, at, inside, like, first + 2, 2)
    else:
        value = _sum(parts, start, at, inside, like, first, 4) + _sum(parts, start, at, inside, like, first + 4, 4)
    return value


@triton.jit(do_not_specialize=["columns"])
def _add_parts(
    parts,
    bias,
    out,
    start,
    first,
    end,
    to,
    columns,
    RANKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    base = first + tl.program_id(0).to(tl.int64) * BLOCK_SIZE
    single = out.to(tl.pointer_type(tl.float32))
    for begin in range(base, end, tl.num_programs(0) * BLOCK_SIZE):
        at = begin + tl.arange(0, BLOCK_SIZE)
        inside = at < end
        value = _sum(parts, start, at, inside, single, 0, RANKS)
        if HAS_BIAS:
            value += tl.load(bias + at % columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at - to, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _copy_slices(parts, out, start, size, each, RANKS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * BLOCK_SIZE
    for begin in range(base, size, tl.num_programs(0) * BLOCK_SIZE):
        at = begin + tl.arange(0, BLOCK_SIZE)
        # A slice is a whole number of blocks, so that a block is in one slice.
        value = _part(parts, begin // each, start, at, at < size, out)
        tl.store(out + at, value, mask=at < size)
