"""The calls of the canary of causal_conv1d (``core.canary``): packed sequences, and tokens after them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rl_kernels.core.canary import numbers
from rl_kernels.gated_delta.conv_api import causal_conv1d

TOKENS, FIRST, CHANNELS = 150, 67, 72


def results(dtype: torch.dtype, device: torch.device, backend: str) -> Iterator[torch.Tensor]:
    """Yield the output and the last states of two sequences, and those of a token after each."""
    x, weight, bias, state = operands(dtype, device)
    bounds = torch.tensor([0, FIRST, TOKENS], device=device)
    whole = causal_conv1d(x, weight, bias, state=state, cu_seqlens=bounds, return_state=True, backend=backend)
    yield from whole
    yield from causal_conv1d(x[0, :2, None], weight, bias, state=whole.state, return_state=True, backend=backend)


def gradients(dtype: torch.dtype, device: torch.device, backend: str) -> Iterator[torch.Tensor]:
    """Yield the gradients of all operands."""
    leaves = [x.requires_grad_() for x in operands(dtype, device)]
    x, weight, bias, state = leaves
    bounds = torch.tensor([0, FIRST, TOKENS], device=device)
    out = causal_conv1d(x, weight, bias, state=state, cu_seqlens=bounds, backend=backend)
    yield from torch.autograd.grad(out, leaves, numbers(*x.shape, salt=5, dtype=dtype, device=device))


def operands(dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Return x, weight, bias and state."""
    shapes = ((1, TOKENS, CHANNELS), (CHANNELS, 4), (CHANNELS,), (2, 3, CHANNELS))
    return [numbers(*shape, salt=salt, dtype=dtype, device=device) for salt, shape in enumerate(shapes, 1)]
