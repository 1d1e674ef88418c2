"""gated_delta_rule in PyTorch, for any device: element-wise, so no reduction order matters."""

from __future__ import annotations

import torch


def forward(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return ``x + scale * y`` ``[N, D]``, rounded once to the dtype of x."""
    return (x.to(scale.dtype) + scale * y.to(scale.dtype)).to(x.dtype).contiguous()


def backward(upstream: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (dx, dy), each ``[N, D]`` in the dtype of the upstream gradient."""
    return upstream.contiguous().clone(), (scale * upstream.to(scale.dtype)).to(upstream.dtype).contiguous()
