"""Kernels that read the memory of other ranks' GPUs: they add parts by a tree, and copy slices.

``memories`` is the address of a table with the address of each rank's memory; parts, sums and flags are bytes in it.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
    """Wait until this program has come here on every rank; their earlier writes are then visible."""
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
def exchange(
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
    """Write the sum of all ranks' ``x`` to ``out``: each rank copies ``x`` to its memory, then adds all of it."""
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
def exchange_slices(
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
    """Write the sum of all parts to ``out``: a rank adds a slice of ``each`` elements, and copies other slices."""
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
