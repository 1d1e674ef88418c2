"""Launches of the kernels that read the memory of other ranks' GPUs.

``exchange`` and ``exchange_slices`` do a whole sum in one launch. Their programs wait for each other across GPUs by
flags in memory that all ranks can write: a rank sets a flag of its peer from 0 to 1, the peer takes it back to 0. So a
call leaves all flags at 0, and a CUDA graph can replay it. Program p of a rank reads only what programs p wrote.
"""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.core.gpu import device_of, processors
from rl_kernels.core.triton_lib import peer_kernels
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
            peer_kernels.exchange,
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
            peer_kernels.exchange_slices,
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
    """Return the number of programs for blocks of ``out``; there are flags for ``MOST``."""
    return min(blocks, MOST, PROGRAMS * processors(out.get_device())) if out.is_cuda else blocks
