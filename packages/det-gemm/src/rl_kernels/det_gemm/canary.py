"""The calls of the canary (``core.canary``): products of all rows, and of a few alone, which take other kernels."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rl_kernels.core.canary import numbers
from rl_kernels.det_gemm.api import det_gemm

ROWS, COLUMNS, INNER, FEW = 136, 120, 216, 8
"""Sizes: no multiples of a tile, K no multiple of a step, but rows are multiples of 16 bytes."""


def results(dtype: torch.dtype, device: torch.device, backend: str) -> Iterator[torch.Tensor]:
    """Yield products in FP32."""
    a, b = operands(dtype, device)
    for rows in (a, a[:FEW]):
        yield det_gemm(rows, b, out_dtype=torch.float32, backend=backend)


def gradients(dtype: torch.dtype, device: torch.device, backend: str) -> Iterator[torch.Tensor]:
    """Yield the gradients of both operands."""
    a, b = (x.requires_grad_() for x in operands(dtype, device))
    upstream = numbers(ROWS, COLUMNS, salt=3, dtype=dtype, device=device)
    yield from torch.autograd.grad(det_gemm(a, b, backend=backend), (a, b), upstream)


def operands(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``a[M, K]`` and ``b[K, N]``, b stored like a weight."""
    a, weight = (
        numbers(rows, INNER, salt=salt, dtype=dtype, device=device) for rows, salt in ((ROWS, 1), (COLUMNS, 2))
    )
    return a, weight.t()
