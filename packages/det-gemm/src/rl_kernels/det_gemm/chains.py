"""Sums over rows as several chains: on Hopper one long chain shrinks, because tensor cores truncate what they add.

With ``join_tokens`` the rows of a call are cut into parts of that many. Each part is a chain from 0 in FP32, and is
added to the sum of those before it, rounded to nearest. A batch that is split over several calls at multiples of
``join_tokens`` rows has the same bits. tools/chain_error.py measures both against FP64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rl_kernels.core import validate as check
from rl_kernels.det_gemm.segments import STEP


def validate(join_tokens: int | None) -> None:
    """Require None, or a positive multiple of 16 rows.

    Raises:
        TypeError, ValueError: ``join_tokens`` is not as above.
    """
    if join_tokens is None:
        return
    check.integer("join_tokens", join_tokens)
    if join_tokens < STEP or join_tokens % STEP:
        raise ValueError(f"join_tokens: expected None or a multiple of {STEP} rows, at least {STEP}, got {join_tokens}")


def joined(
    a: torch.Tensor,
    dc: torch.Tensor,
    out: torch.Tensor,
    join_tokens: int,
    chain: Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor],
) -> None:
    """Add ``a[M, K]^T @ dc[M, N]`` to the FP32 buffer ``out[K, N]``, chains of ``join_tokens`` rows one by one."""
    for first in range(0, a.shape[0], join_tokens):
        rows = slice(first, first + join_tokens)
        out += chain(a[rows], dc[rows], torch.float32)
