"""Preparation of operands of sums and products: the dtype in which they are computed, and padding with zeros."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` are computed: FP64 for FP64, otherwise FP32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def pad_to(x: torch.Tensor, dim: int, multiple: int) -> torch.Tensor:
    """Append zeros along ``dim`` up to the next multiple; ``x`` itself if none are missing."""
    missing = -x.shape[dim] % multiple
    if not missing:
        return x
    if not x.numel():
        # F.pad before PyTorch 2.10 refuses other dims of size 0.
        return x.new_zeros([size + missing * (place == dim % x.ndim) for place, size in enumerate(x.shape)])
    return F.pad(x, [0, 0] * (x.ndim - 1 - dim % x.ndim) + [0, missing])
