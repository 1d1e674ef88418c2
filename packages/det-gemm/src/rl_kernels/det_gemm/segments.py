"""Cut a sum into segments and merge them in a fixed order, so that one process and several ranks get the same bits.

The sum over K (for the gradient of an input, over N) is cut into 2, 4 or 8 segments of equal length, a multiple of 16
terms; the last ones may be shorter or empty. Each is a chain from 0 in FP32, and a balanced binary tree merges them in
index order: of 8, ``((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))``. So the segments of a rank are a subtree.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.constants import STEP
from rl_kernels.core.distributed.sums import tree_sum

COUNTS = (1, 2, 4, 8)
"""Numbers of segments that a caller may ask for; 1 is one chain over the whole sum."""


def segment_length(size: int, segments: int) -> int:
    """Return the length of a segment of a sum of ``size`` terms: ``16 ceil(size / (16 segments))``."""
    return -(-size // (STEP * segments)) * STEP


def bounds(size: int, segments: int, length: int) -> list[tuple[int, int]]:
    """Return the first term and the end of each segment."""
    return [(min(i * length, size), min((i + 1) * length, size)) for i in range(segments)]


def validate(**counts: int) -> None:
    """Require numbers of segments that are 1, 2, 4 or 8."""
    for name, value in counts.items():
        check.integer(name, value)
        check.choice(name, value, COUNTS)


def merge_segments(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    cuts: list[tuple[int, int]],
    chain: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the tree sum of ``chain(a[:, cut], b[cut])``, plus the bias, rounded once to ``out_dtype``.

    Args:
        a: ``[M, K]``.
        b: ``[K, N]``.
        bias: ``[N]`` or None.
        out_dtype: the dtype of the result.
        cuts: first term and end of each segment.
        chain: gives the FP32 sum ``[M, N]`` of one segment.
    """
    total = tree_sum([chain(a[:, first:end], b[first:end]) for first, end in cuts])
    if bias is not None:
        total = total + bias
    return total.to(out_dtype)
