"""The calls of the canary (``core.canary``): norms of a model's rows and of heads."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rl_kernels.core.canary import numbers
from rl_kernels.norm.api import layer_norm, rms_norm

SIZES = ((37, 1000), (200, 128))
"""Rows, and their width: rows are split over several blocks, and heads are many to a block."""


def results(dtype: torch.dtype, device: torch.device, backend: str) -> Iterator[torch.Tensor]:
    """Yield norms, and the sum with the residual."""
    for rows, width in SIZES:
        x, residual, weight, bias = _inputs(rows, width, dtype, device)
        for result in (
            rms_norm(x, weight, residual=residual, backend=backend),
            layer_norm(x, weight, bias, backend=backend),
        ):
            yield from (result,) if isinstance(result, torch.Tensor) else result


def gradients(dtype: torch.dtype, device: torch.device, backend: str) -> Iterator[torch.Tensor]:
    """Yield the gradients of rows, weight and bias."""
    for rows, width in SIZES:
        x, upstream, weight, bias = _inputs(rows, width, dtype, device)
        inputs = [value.requires_grad_() for value in (x, weight, bias)]
        yield from torch.autograd.grad(rms_norm(x, weight, backend=backend), inputs[:2], upstream)
        yield from torch.autograd.grad(layer_norm(x, weight, bias, backend=backend), inputs, upstream)


def _inputs(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Return x, another tensor like it, weight and bias."""
    shapes = ((rows, width), (rows, width), (width,), (width,))
    return [numbers(*shape, salt=salt, dtype=dtype, device=device) for salt, shape in enumerate(shapes, 1)]
