"""Tensors without data, for the calls of a backend's module ``ahead``, which ``rl-kernels compile`` only compiles."""

from __future__ import annotations

import torch


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor without data, for a call that is only compiled."""
    return torch.empty(shape, dtype=dtype, device="meta")
