"""Launches of the kernels that draw tokens; ``sampling_sm90.cu`` says how."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rl_kernels.core.cuda.launch import kernel
from rl_kernels.core.cuda.program import Program
from rl_kernels.core.gpu import processors
from rl_kernels.linear_logp.backends.cuda_sm90.tiles import PACKAGE
from rl_kernels.linear_logp.drawing import Drawn, Request
from rl_kernels.linear_logp.inputs import number_or_rows

PROGRAM = Program(PACKAGE, "sampling_sm90.cu", "sm_90a")
ARGS = f"({'P' * 12}qiiii{'Pfi' * 4})"
"""Layout of ``struct Args``."""
THREADS, WARPS, PER_PROCESSOR, FEWEST = 512, 16, 4, 4
"""Threads and warps of a block; blocks that a multiprocessor holds."""
SEGMENT, BUCKETS, LISTED = 1024, 4096, 4096
SHARED = 16
"""Words of 4 bytes of ``struct Shared``."""


def launches_of(
    logits: torch.Tensor, request: Request
) -> Callable[[torch.Tensor, torch.Tensor, Request], tuple[Drawn, torch.Tensor]]:
    """Prepare ``drawing.draw`` for logits and a request of one kind; rows begin at multiples of 16 bytes.

    It also returns the smallest kept logit of each row, before the temperature: kept are those from it on.
    """
    count, vocab = logits.shape
    narrow, collect = (kernel(PROGRAM, name, ARGS, logits.device) for name in ("narrow", "collect"))
    segments = -(-vocab // SEGMENT)
    each = _segments_of_block(count, segments, logits.get_device())
    parts = -(-segments // each)
    has_filters = request.top_k is not None or request.top_p is not None
    # Counts of several blocks.
    counts = BUCKETS if has_filters and parts > 1 else 0

    def launch(logits: torch.Tensor, norm: torch.Tensor, request: Request) -> tuple[Drawn, torch.Tensor]:
        new = logits.new_empty
        drawn, smallest = Drawn(new(count, dtype=torch.int64), new(count), new(count)), new(count)
        if not count:
            return drawn, smallest
        uniform, norm = request.uniform.contiguous(), norm.contiguous()
        zeros = logits.new_zeros(count * (SHARED + counts), dtype=torch.int32)
        listed = new(2, count, LISTED if has_filters else 0)
        sums = new(count, segments, dtype=torch.int64)
        parameters = [
            number_or_rows(torch.tensor(off, device="cpu") if x is None else x)
            for x, off in zip(request[:4], (1.0, 0.0, 1.0, torch.inf), strict=True)
        ]
        pairs = [(x.data_ptr(), 0.0, 0) if isinstance(x, torch.Tensor) else (0, x, 0) for x in parameters]
        tensors = logits, norm, uniform, zeros, zeros[count * SHARED :], *listed, sums, *drawn, smallest
        sizes = logits.stride(0), count, vocab, each, uniform.dtype == torch.float64
        numbers = *[x.data_ptr() for x in tensors], *sizes, *[number for pair in pairs for number in pair]
        if has_filters:
            narrow.start((count, parts, 1), THREADS, 0, False, numbers)
        collect.start((count, parts, 1), THREADS, 0, has_filters, numbers)
        return drawn, smallest

    return launch


def _segments_of_block(count: int, segments: int, device: int) -> int:
    """Return how many segments of a row a block takes: so few that many blocks share few rows. It changes no bit."""
    parts = max(PER_PROCESSOR * processors(device) // max(count, 1), 1)
    each = -(-segments // parts)
    step = FEWEST if each < WARPS else WARPS
    return -(-each // step) * step
