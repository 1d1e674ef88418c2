"""Tensors of calls that are only compiled: the calls that a backend's module ``ahead`` gives ``rl-kernels compile``."""

from __future__ import annotations

import torch


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor without data, for a call that is only compiled."""
    return torch.empty(shape, dtype=dtype, device="meta")
