"""Launches of the kernels that draw tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rl_kernels.core.gpu import device_of
from rl_kernels.core.triton_lib.launch import Launch, ceil_div
from rl_kernels.linear_logp.drawing import Drawn, Request
from rl_kernels.linear_logp.inputs import number_or_rows
from rl_kernels.linear_logp.triton_lib import draw, ranges, rows

FEW = 16
"""Rows up to which a program takes few columns, so that many share a row; that changes no result."""


def launches_of(
    logits: torch.Tensor, norm: torch.Tensor, request: Request
) -> Callable[[torch.Tensor, torch.Tensor, Request], tuple[Drawn, torch.Tensor]]:
    """Prepare ``drawing.draw`` for logits and a request of one kind; rows of logits are contiguous.

    It also returns the smallest kept logit of each row, before the temperature: kept are those from it on.
    """
    (count, vocab), segments = logits.shape, ceil_div(logits.shape[1], rows.SEGMENT.value)
    has_k, has_p = request.top_k is not None, request.top_p is not None
    sizes, per_row = (vocab, logits.stride(0)), [x is not None and x.ndim > 0 for x in request[:4]]
    flags = (*per_row, has_k, has_p)
    width, each = (2048, 1) if count <= FEW else (8192, 8)
    parts = ceil_div(vocab, width)
    surveys = [
        Launch(ranges.survey, (count, parts), (*sizes, *flags, level, width), num_warps=4)
        for level in (range(1, rows.LEVELS.value + 1) if has_k or has_p else ())
    ]
    collect = Launch(ranges.collect, (count, ceil_div(segments, each)), (*sizes, segments, *flags, each), num_warps=4)
    token = Launch(draw.draw, (count,), (*sizes, segments, *flags), num_warps=8)

    def launch(logits: torch.Tensor, norm: torch.Tensor, request: Request) -> tuple[Drawn, torch.Tensor]:
        new = logits.new_empty
        drawn, smallest_kept = Drawn(new(count, dtype=torch.int64), new(count), new(count)), new(count)
        if not count:
            return drawn, smallest_kept
        numbers = [_number(value, off) for value, off in zip(request[:4], (1.0, 0.0, 1.0, torch.inf), strict=True)]
        is_listed = bool(surveys)
        stats = logits.new_zeros(count, rows.STATS.value if is_listed else 0, dtype=torch.int32)
        sums, smallest = new(count, segments, 2, dtype=torch.int64), new(count, segments)
        room = count, rows.LISTED.value if is_listed else 0
        listed = new(room), new(room, dtype=torch.int32)
        inputs = logits, norm, *numbers, stats, stats.view(torch.float32)
        with device_of(logits):
            for survey in surveys:
                survey(*inputs)
            collect(*inputs, sums, smallest, *listed)
            token(*inputs, sums, smallest, *listed, request.uniform.contiguous(), *drawn, smallest_kept)
        return drawn, smallest_kept

    return launch


def _number(value: torch.Tensor | None, off: float) -> float | torch.Tensor:
    number: float | torch.Tensor = off if value is None else number_or_rows(value)
    return number
