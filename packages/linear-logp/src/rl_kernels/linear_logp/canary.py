"""The calls of the canary (``core.canary``): log-probabilities of all rows, and of a few alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rl_kernels.core.canary import integers, numbers
from rl_kernels.linear_logp.api import linear_logp

ROWS, VOCABULARY, HIDDEN, FEW = 136, 1000, 216, 8


def results(dtype: torch.dtype, device: torch.device, backend: str) -> Iterator[torch.Tensor]:
    """Yield log-probability, logsumexp and entropy."""
    hidden, weight, ids = _inputs(dtype, device)
    for count in (ROWS, FEW):
        yield from linear_logp(hidden[:count], weight, ids[:count], return_stats=True, backend=backend)


def gradients(dtype: torch.dtype, device: torch.device, backend: str) -> Iterator[torch.Tensor]:
    """Yield the gradients of hidden states and weight."""
    hidden, weight, ids = _inputs(dtype, device)
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    logp = linear_logp(hidden, weight, ids, backend=backend)
    upstream = numbers(ROWS, salt=4, dtype=torch.float32, device=device)
    yield from torch.autograd.grad(logp, inputs, upstream)


def _inputs(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = numbers(ROWS, HIDDEN, salt=1, dtype=dtype, device=device, scale=4.0)
    weight = numbers(VOCABULARY, HIDDEN, salt=2, dtype=dtype, device=device)
    return hidden, weight, integers(ROWS, below=VOCABULARY, salt=3, device=device)
