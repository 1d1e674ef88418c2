"""The calls of the canary (``core.canary``): log-probabilities of rows that are split, and of a few rows alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rl_kernels.core.canary import integers, numbers
from rl_kernels.fused_logp.api import fused_logp

ROWS, COLUMNS, FEW = 9, 5000, 2


def results(dtype: torch.dtype, device: torch.device, backend: str) -> Iterator[torch.Tensor]:
    """Yield log-probability, logsumexp and entropy."""
    logits, ids = _inputs(dtype, device)
    for count in (ROWS, FEW):
        yield from fused_logp(logits[:count], ids[:count], return_stats=True, backend=backend)


def gradients(dtype: torch.dtype, device: torch.device, backend: str) -> Iterator[torch.Tensor]:
    """Yield the gradient of the logits."""
    logits, ids = _inputs(dtype, device)
    stats = fused_logp(logits.requires_grad_(), ids, return_stats=True, backend=backend)
    upstream = [numbers(ROWS, salt=salt, dtype=torch.float32, device=device) for salt in (3, 4, 5)]
    yield from torch.autograd.grad(list(stats), logits, upstream)


def _inputs(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    logits = numbers(ROWS, COLUMNS, salt=1, dtype=dtype, device=device, scale=16.0)
    return logits, integers(ROWS, below=COLUMNS, salt=2, device=device)
