"""Comparison of raw bits: +0 and -0 differ, and no tolerance is involved."""

from __future__ import annotations

import torch


def different(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Say for each element of two FP32 tensors of one shape whether any bit differs."""
    return a.detach().contiguous().view(torch.int32) != b.detach().contiguous().view(torch.int32)
