"""Launches of the kernels that read the memory of other ranks' GPUs.

``exchange`` and ``exchange_slices`` do a whole sum in one launch. Their programs wait for each other across GPUs by
flags in memory that all ranks can write: a rank sets a flag of its peer from 0 to 1, the peer takes it back to 0. So a
call leaves all flags at 0, and a CUDA graph can replay it. Program p of a rank reads only what programs p wrote.
"""

from __future__ import annotations

from typing import NamedTuple

from rl_kernels.core.gpu import processors
from rl_kernels.core.triton_lib import peer_kernels
from rl_kernels.core.triton_lib.launch import Launch

BLOCK = 2048
MOST = 512
"""Largest number of programs of a launch."""
PROGRAMS = 2
"""Programs on a multiprocessor: enough loads in flight to hide the latency between GPUs, and all run at once."""


def aligned(count: int) -> int:
    """Return a count rounded up to whole blocks."""
    return -(-count // BLOCK) * BLOCK


def flag_bytes(ranks: int) -> int:
    """Return the bytes of the flags of ``exchange``: for each program and rank, one for written and one for read."""
    return 2 * MOST * ranks * 4


class Sum(NamedTuple):
    """A sum of the parts ``[..., N]`` of all ranks.

    Attributes:
        size: elements of a part.
        columns: N.
        rank: of this process.
        ranks: 2, 4 or 8.
        has_bias: whether ``bias[N]`` is added.
        device: index of the GPU.
    """

    size: int
    columns: int
    rank: int
    ranks: int
    has_bias: bool
    device: int


def exchange(total: Sum, flags: int, start: int) -> Launch:
    """Return the launch that writes the tree sum of all ranks' FP32 ``x``, plus bias, to ``out``.

    It takes the address of the table of all ranks' memories, ``x``, ``bias`` (or any tensor) and ``out``, all
    contiguous.

    Args:
        total: sizes of the sum.
        flags: byte in each rank's memory at which zeroed flags begin.
        start: byte at which each rank has room for its part.
    """
    # All programs must run at once, because they wait for programs of other GPUs.
    count = min(-(-total.size // BLOCK), MOST, processors(total.device))
    numbers = flags, start, total.size, total.columns, total.rank, total.ranks, total.has_bias, BLOCK
    return Launch(peer_kernels.exchange, (count,), numbers, num_warps=8)


def exchange_slices(total: Sum, flags: int, parts: int, sums: int, *, scatters: bool, sent: int) -> Launch:
    """Return the launch that writes the tree sum of all ranks' FP32 parts, plus bias, to ``out``.

    Each rank adds one slice, and all other ranks copy it. It takes the address of the table of all ranks' memories,
    ``bias`` (or any tensor) and ``out``, contiguous; with ``scatters``, ``out`` is this rank's slice of the sum.

    Args:
        total: sizes of the sum.
        flags: byte in each rank's memory at which zeroed flags begin.
        parts: byte at which each rank has its part.
        sums: byte at which each rank has room for rounded sums.
        scatters: do not copy the slices of other ranks.
        sent: 0 if a rank reads its slice of the parts in the memory of all ranks. Otherwise the number of elements of a
            slice, whose parts all ranks have written to this rank's memory, one after the other.
    """
    size, ranks = total.size, total.ranks
    slice_size = sent or (size // ranks if scatters else aligned(-(-size // ranks)))
    count = min(-(-slice_size // BLOCK), MOST, PROGRAMS * processors(total.device))
    numbers = (
        flags,
        parts,
        sums,
        size,
        slice_size,
        total.columns,
        total.rank,
        ranks,
        total.has_bias,
        scatters,
        sent > 0,
        BLOCK,
    )
    return Launch(peer_kernels.exchange_slices, (count,), numbers, num_warps=8)
