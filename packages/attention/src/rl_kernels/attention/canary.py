"""The calls of the canary (``core.canary``): a prompt whose keys are two segments, and its last query alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rl_kernels.attention.api import det_attention
from rl_kernels.core.canary import numbers

QUERIES, KEYS, HEADS, GROUP, HEAD = 70, 1100, 2, 4, 64


def results(dtype: torch.dtype, device: torch.device, backend: str) -> Iterator[torch.Tensor]:
    """Yield outputs and logsumexp."""
    q, k, v = _inputs(dtype, device)
    for first in (0, QUERIES - 1):
        yield from det_attention(q[:, first:], k, v, causal=True, return_lse=True, backend=backend)


def gradients(dtype: torch.dtype, device: torch.device, backend: str) -> Iterator[torch.Tensor]:
    """Yield the gradients of queries, keys and values."""
    inputs = [x.requires_grad_() for x in _inputs(dtype, device)]
    q, k, v = inputs
    out = det_attention(q, k, v, causal=True, backend=backend)
    yield from torch.autograd.grad(out, inputs, numbers(*q.shape, salt=4, dtype=dtype, device=device))


def _inputs(dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Return q, k and v."""
    shapes = ((QUERIES, HEADS * GROUP), (KEYS, HEADS), (KEYS, HEADS))
    return [
        numbers(1, *shape, HEAD, salt=salt, dtype=dtype, device=device, scale=8.0)
        for salt, shape in enumerate(shapes, 1)
    ]
