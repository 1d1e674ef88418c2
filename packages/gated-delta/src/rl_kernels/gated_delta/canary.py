"""The calls of the canary (``core.canary``): packed sequences of several chunks, and tokens after them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rl_kernels.core.canary import numbers
from rl_kernels.gated_delta.api import gated_delta_rule
from rl_kernels.gated_delta.cache import DeltaCache

TOKENS, FIRST, KEY_HEADS, HEADS, SIZE = 150, 67, 1, 2, 128
"""FIRST: tokens of the first of two sequences; the last token of each comes by itself, after its cache."""


def results(dtype: torch.dtype, device: torch.device, backend: str) -> Iterator[torch.Tensor]:
    """Yield the output and the last states, and the outputs of the last tokens, which decode computes."""
    q, k, v, g, beta, states = operands(dtype, device)
    bounds = torch.tensor([0, FIRST, TOKENS], device=device)
    yield from gated_delta_rule(
        q, k, v, g, beta, initial_state=states, cu_seqlens=bounds, return_state=True, backend=backend
    )
    lasts = bounds[1:] - 1
    kept = torch.ones(TOKENS, dtype=torch.bool, device=device).index_fill(0, lasts, False)
    cache = DeltaCache.from_recurrent(states, KEY_HEADS, dtype=dtype)
    before = bounds - torch.arange(3, device=device)
    gated_delta_rule(*(x[:, kept] for x in (q, k, v, g, beta)), cache=cache, cu_seqlens=before, backend=backend)
    yield from gated_delta_rule(*(x[0, lasts, None] for x in (q, k, v, g, beta)), cache=cache, backend=backend)


def gradients(dtype: torch.dtype, device: torch.device, backend: str) -> Iterator[torch.Tensor]:
    """Yield the gradients of all operands."""
    leaves = [x.requires_grad_() for x in operands(dtype, device)]
    bounds = torch.tensor([0, FIRST, TOKENS], device=device)
    upstream = numbers(1, TOKENS, HEADS, SIZE, salt=7, dtype=dtype, device=device)
    out = gated_delta_rule(*leaves[:5], initial_state=leaves[5], cu_seqlens=bounds, backend=backend)
    yield from torch.autograd.grad(out, leaves, upstream)


def operands(dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Return q, k, v, g, beta and the first states."""
    q, k, v = (
        numbers(1, TOKENS, heads, SIZE, salt=salt, dtype=dtype, device=device)
        for salt, heads in enumerate((KEY_HEADS, KEY_HEADS, HEADS), 1)
    )
    g, beta = (
        numbers(1, TOKENS, HEADS, salt=salt, dtype=torch.float32, device=device, scale=scale).abs()
        for salt, scale in ((4, 0.5), (5, 1.0))
    )
    states = numbers(2, HEADS, SIZE, SIZE, salt=6, dtype=torch.float32, device=device, scale=0.25)
    return [q, k, v, -g, beta, states]
