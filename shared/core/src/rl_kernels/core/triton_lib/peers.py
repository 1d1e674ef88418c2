"""Kernels that read the memory of other ranks' GPUs: add their parts by a tree, and copy their slices.

``exchange`` and ``exchange_slices`` do a whole sum in one launch. Their programs wait for each other across GPUs by
flags in memory that all ranks can write: a rank sets a flag of its peer from 0 to 1, the peer takes it back to 0. So a
call leaves all flags at 0, and a CUDA graph can replay it. Program p of a rank reads only what programs p wrote.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rl_kernels.core.gpu import device_of, processors
from rl_kernels.core.triton_lib.launch import launch

BLOCK = 2048
MOST = 512
"""Most programs of a launch."""
PROGRAMS = 2
"""Programs on a multiprocessor: enough loads in flight to hide the latency between GPUs, and all run at once."""


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


def exchange_slices(
    handle: Any,
    flags: int,
    parts: int,
    sums: int,
    shape: torch.Size,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    rank: int,
    ranks: int,
    *,
    scatters: bool,
    sent: int,
) -> None:
    """Write the tree sum of all ranks' FP32 parts, plus bias, to ``out``: each rank adds a slice, the others copy it.

    Args:
        handle: of symmetric memory.
        flags: byte in each rank's memory at which zeroed flags begin.
        parts: byte at which each rank has its part.
        sums: byte at which each rank has room for rounded sums.
        shape: of a part, ``[..., N]``.
        out: contiguous, of that shape; with ``scatters``, this rank's slice of it.
        bias: ``[N]`` or None.
        rank: of this process.
        ranks: 2, 4 or 8.
        scatters: leave out the copies of other slices.
        sent: 0: a rank reads its slice of the parts in the memory of all. Otherwise the elements of a slice: all ranks
            have written their parts of it to this rank's memory, one after the other.
    """
    size = shape.numel()
    places = flags, parts, sums
    each = sent or (size // ranks if scatters else aligned(-(-size // ranks)))
    with device_of(out):
        launch(
            _exchange_slices,
            (programs(-(-each // BLOCK), out),),
            handle.buffer_ptrs_dev,
            out if bias is None else bias.contiguous(),
            out,
            numbers=(
                *places,
                size,
                each,
                shape[-1],
                rank,
                ranks,
                bias is not None,
                scatters,
                sent > 0,
                BLOCK,
            ),
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
    """Return the sum of COUNT ranks' parts, a power of two, from rank ``first`` on."""
    if COUNT == 1:
        value = _part(parts, first, start, at, inside, like)
    else:
        left = _sum(parts, start, at, inside, like, first, COUNT // 2)
        value = left + _sum(parts, start, at, inside, like, first + COUNT // 2, COUNT // 2)
    return value


@triton.jit
def _sum_of_sent(memories, parts, at, inside, like, each, RANK: tl.constexpr, first: tl.constexpr, COUNT: tl.constexpr):
    """Return the sum of COUNT parts of this rank's slice, all in its own memory."""
    if COUNT == 1:
        value = _part(memories, RANK, parts, at + first * each.to(tl.int64), inside, like)
    else:
        left = _sum_of_sent(memories, parts, at, inside, like, each, RANK, first, COUNT // 2)
        value = left + _sum_of_sent(memories, parts, at, inside, like, each, RANK, first + COUNT // 2, COUNT // 2)
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
def _exchange_slices(
    memories,
    bias,
    out,
    flags,
    parts,
    sums,
    size,
    each,
    columns,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCATTERS: tl.constexpr,
    SENT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    program, step = tl.program_id(0), tl.num_programs(0) * BLOCK_SIZE
    single = out.to(tl.pointer_type(tl.float32))
    address = tl.load(memories.to(tl.pointer_type(tl.int64)) + RANK) + sums
    mine = tl.multiple_of(address.to(out.dtype), 16)
    _meet(memories, flags, program, RANK, RANKS)
    for begin in range(program * BLOCK_SIZE, each, step):
        within = begin + tl.arange(0, BLOCK_SIZE)
        at = RANK * each + within
        inside = (within < each) & (at < size)
        if SENT:
            value = _sum_of_sent(memories, parts, within, inside, single, each, RANK, 0, RANKS)
        else:
            value = _sum(memories, parts, at, inside, single, 0, RANKS)
        if HAS_BIAS:
            value += tl.load(bias + at % columns, mask=inside, other=0.0).to(tl.float32)
        value = value.to(out.dtype.element_ty)
        if SCATTERS:
            tl.store(out + within, value, mask=inside)
        else:
            tl.store(out + at, value, mask=inside)
            tl.store(mine + at, value, mask=inside)
    # All ranks have read the parts, and the slices can be copied.
    _meet(memories, flags + tl.num_programs(0) * RANKS * 4, program, RANK, RANKS)
    if not SCATTERS:
        for other in tl.static_range(RANKS):
            if other != RANK:
                for begin in range(program * BLOCK_SIZE, each, step):
                    within = begin + tl.arange(0, BLOCK_SIZE)
                    at = other * each + within
                    inside = (within < each) & (at < size)
                    tl.store(out + at, _part(memories, other, sums, at, inside, out), mask=inside)
