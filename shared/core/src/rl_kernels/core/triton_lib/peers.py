"""Kernels that read the memory of other ranks' GPUs: add their parts by a tree, and copy their slices.

``exchange`` does all of a small sum in one launch. Its programs wait for each other across GPUs by flags in memory that
all ranks can write: a rank sets a flag of its peer from 0 to 1, the peer takes it back to 0. So a call leaves all flags
at 0, and a CUDA graph can replay it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rl_kernels.core.gpu import device_of, processors
from rl_kernels.core.triton_lib.launch import launch

BLOCK = 2048
MOST = 128
"""Most programs of ``exchange``."""
PROGRAMS = 4
"""Programs on a multiprocessor: enough loads in flight to hide the latency between GPUs."""


def aligned(count: int) -> int:
    """Return a count rounded up to whole blocks."""
    return -(-count // BLOCK) * BLOCK


def flag_bytes(ranks: int) -> int:
    """Return the bytes of the flags of ``exchange``: for each program and rank, one for written and one for read."""
    return 2 * MOST * ranks * 4


def exchange(
    handle: Any,
    flags: int,
    start: int,
    x: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    rank: int,
    ranks: int,
) -> None:
    """Write the tree sum of all ranks' ``x[..., N]``, FP32, plus bias, to ``out``.

    Args:
        handle: of symmetric memory.
        flags: byte in each rank's memory at which zeroed flags begin.
        start: byte at which each rank has room for its part.
        x: this rank's part, contiguous.
        out: contiguous, of the shape of ``x``.
        bias: ``[N]`` or None.
        rank: of this process.
        ranks: 2, 4 or 8.
    """
    blocks = -(-x.numel() // BLOCK)
    # All programs must run at once, because they wait for those of other GPUs.
    count = min(blocks, MOST, processors(x.get_device()))
    with device_of(out):
        launch(
            _exchange,
            (count,),
            handle.buffer_ptrs_dev,
            x,
            out if bias is None else bias.contiguous(),
            out,
            numbers=(flags, start, x.numel(), x.shape[-1] if x.ndim else 1, rank, ranks, bias is not None, BLOCK),
            num_warps=8,
        )


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


@triton.jit
def _flag(memories, owner, flags, program, other, ranks):
    """Return the address of the flag in one rank's memory that another rank sets."""
    address = tl.load(memories.to(tl.pointer_type(tl.int64)) + owner) + flags
    return address.to(tl.pointer_type(tl.int32)) + program * ranks + other


@triton.jit
def _meet(memories, flags, program, rank: tl.constexpr, RANKS: tl.constexpr):
    """Wait until this program has come here on every rank; what they wrote before is then visible."""
    tl.debug_barrier()
    for other in tl.static_range(RANKS):
        if other != rank:
            theirs = _flag(memories, other, flags, program, rank, RANKS)
            while tl.atomic_cas(theirs, 0, 1, sem="release", scope="sys") != 0:
                pass
    for other in tl.static_range(RANKS):
        if other != rank:
            mine = _flag(memories, rank, flags, program, other, RANKS)
            while tl.atomic_cas(mine, 1, 0, sem="acquire", scope="sys") != 1:
                pass
    tl.debug_barrier()


@triton.jit(do_not_specialize=["columns"])
def _exchange(
    memories,
    x,
    bias,
    out,
    flags,
    start,
    size,
    columns,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    program, step = tl.program_id(0), tl.num_programs(0) * BLOCK_SIZE
    single = out.to(tl.pointer_type(tl.float32))
    address = tl.load(memories.to(tl.pointer_type(tl.int64)) + RANK) + start
    mine = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
    for begin in range(program * BLOCK_SIZE, size, step):
        at = begin + tl.arange(0, BLOCK_SIZE)
        tl.store(mine + at, tl.load(x + at, mask=at < size), mask=at < size)
    _meet(memories, flags, program, RANK, RANKS)
    for begin in range(program * BLOCK_SIZE, size, step):
        at = begin + tl.arange(0, BLOCK_SIZE)
        inside = at < size
        value = _sum(memories, start, at, inside, single, 0, RANKS)
        if HAS_BIAS:
            value += tl.load(bias + at % columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
    # The next call may overwrite the parts only when all ranks have read them.
    _meet(memories, flags + tl.num_programs(0) * RANKS * 4, program, RANK, RANKS)


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
