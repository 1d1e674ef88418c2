"""``gated_delta_rule`` without states in its result."""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.gated_delta import gated_delta_rule


def delta_rule(*operands: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the output of ``gated_delta_rule`` for q, k, v, g and beta."""
    out = gated_delta_rule(*operands, **options)
    assert isinstance(out, torch.Tensor)
    return out
