"""What a norm returns: its dtype, and the pair where a residual is added first."""

from __future__ import annotations

from typing import NamedTuple

import torch


class NormAndSum(NamedTuple):
    """The norm of a sum, and the sum itself, which the next residual connection needs."""

    output: torch.Tensor
    """``[..., D]``: the norm of ``sum``."""
    sum: torch.Tensor
    """``[..., D]``, in the dtype of x: ``x + residual``, rounded to it."""


def result_dtype(x: torch.Tensor, weight: torch.Tensor | None, cast_first: bool) -> torch.dtype:
    """Return the dtype of a norm: of x, or of the product of a row in that dtype with the weight."""
    return torch.promote_types(x.dtype, weight.dtype) if cast_first and weight is not None else x.dtype
