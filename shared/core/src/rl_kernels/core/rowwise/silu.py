"""SiLU and its derivative, whose bits do not depend on an element's position: ``torch.sigmoid`` has others on a CPU."""

from __future__ import annotations

import torch


def silu(x: torch.Tensor) -> torch.Tensor:
    """Return ``x sigmoid(x)``."""
    return x / _parts(x)


def silu_and_slope(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x sigmoid(x)``, and its derivative ``sigmoid(x) (1 + x (1 - sigmoid(x)))``."""
    parts = _parts(x)
    sigmoid = parts.reciprocal()
    return x / parts, (1 - sigmoid).mul_(x).add_(1).mul_(sigmoid)


def _parts(x: torch.Tensor) -> torch.Tensor:
    return x.neg().exp_().add_(1)
