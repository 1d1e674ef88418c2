"""The definition of gated_delta_rule in plain PyTorch; with FP64 inputs it is the gold result."""

from __future__ import annotations

import torch


def gated_delta_rule(x: torch.Tensor, y: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    """Return ``x + scale * y``, computed in FP32 (in FP64 for FP64 inputs) and rounded once to the dtype of ``x``."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (x.to(dtype) + scale * y.to(dtype)).to(x.dtype)
