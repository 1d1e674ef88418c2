"""Sums over rows as several chains: tensor cores of Hopper truncate when they accumulate, which biases a long sum to 0.

With ``join_tokens`` (``core.chains``) a batch that is split over several calls at multiples of that many rows has the
bits of one call. tools/chain_error.py measures both against FP64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def add_chains(
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
