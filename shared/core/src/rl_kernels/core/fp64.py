"""Products in FP64 on blocks of one shape: for FP64 operands, GPUs, and a CPU whose library is not batch-invariant."""

from __future__ import annotations

import torch

from rl_kernels.core.constants import SEGMENT, STEP
from rl_kernels.core.rowwise.operands import compute_dtype, pad_to

BLOCK = 64
"""Rows of a product computed at once; the last block is padded with zero rows."""
SLAB = 256
"""Columns of a chain that are finished before the next ones, so that they stay in the cache."""


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a[M, K] @ b[K, N]``, products and sums in FP64, rounded once to ``compute_dtype``.

    Any strides. An element's FP64 bits may depend on N, so cut N by a constant, never by the batch. Extra memory: one
    block of ``a`` and one slab of ``b`` in FP64.
    """
    m, n = a.shape[0], b.shape[1]
    out = a.new_empty((m, n), dtype=compute_dtype(a.dtype))
    left = pad_to(pad_to(a, 1, STEP), 0, BLOCK)
    for column in range(0, n, SEGMENT):
        width = min(SEGMENT, n - column)
        slab = pad_to(pad_to(b[:, column : column + width].double(), 1, STEP), 0, STEP).contiguous()
        for row in range(0, m, BLOCK):
            product = left[row : row + BLOCK].double().contiguous() @ slab
            out[row : row + BLOCK, column : column + width] = product[: min(BLOCK, m - row), :width]
    return out


def chain_dw(a: torch.Tensor, dc: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Add ``a[M, K]^T @ dc[M, N]`` to ``out[K, N]`` in place, 16 rows of ``a`` per step, and return ``out``.

    Each step's product is FP64, rounded to the dtype of ``out`` before it is added.
    """
    for column in range(0, out.shape[1], SLAB):
        total = out[:, column : column + SLAB]
        for row in range(0, a.shape[0], STEP):
            left = pad_to(a[row : row + STEP].double(), 0, STEP)
            right = pad_to(dc[row : row + STEP, column : column + SLAB].double(), 0, STEP)
            step = pad_to(left, 1, STEP).t().contiguous() @ pad_to(right, 1, STEP).contiguous()
            total += step[: total.shape[0], : total.shape[1]].to(total.dtype)
    return out
