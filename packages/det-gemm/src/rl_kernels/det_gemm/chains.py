"""Sums over rows as several chains: tensor cores of Hopper truncate when they accumulate, which biases a long sum to 0.

With ``join_tokens`` (``core.chains``) a batch that is split over several calls at multiples of that many rows has the
bits of one call. tools/chain_error.py measures both against FP64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rl_kernels.core.calls import Launches
from rl_kernels.core.layout import flat_rows


def add_chains(
    a: torch.Tensor,
    dc: torch.Tensor,
    out: torch.Tensor,
    join_tokens: int,
    chain: Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor],
) -> None:
    """Add ``a[M, K]^T @ dc[M, N]`` to the FP32 buffer ``out[K, N]``, chains of ``join_tokens`` rows one by one."""
    a, dc = flat_rows(a), flat_rows(dc)
    for first in range(0, a.shape[0], join_tokens):
        rows = slice(first, first + join_tokens)
        out += chain(a[rows], dc[rows], torch.float32)


def prepare_chains(a: torch.Tensor, dc: torch.Tensor, join_tokens: int, prepare: Callable[..., Launches]) -> Launches:
    """Return the launches of ``add_chains``; ``prepare`` returns those of one chain.

    All chains but the last have as many rows, and begin at multiples of 16 rows, so of 16 bytes: they are of one kind.
    """
    a, dc = flat_rows(a), flat_rows(dc)
    counts = {min(join_tokens, len(a)), len(a) % join_tokens} - {0}
    launches = {count: prepare(a[:count], dc[:count], torch.float32) for count in counts}

    def launch(a: torch.Tensor, dc: torch.Tensor, out: torch.Tensor, join_tokens: int) -> None:
        add_chains(a, dc, out, join_tokens, lambda left, right, dtype: launches[len(left)](left, right, dtype))

    return launch
