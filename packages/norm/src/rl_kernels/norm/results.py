"""The results of a norm: its dtype, and the pair that it returns if a residual is added first."""

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
    """Return the dtype of a norm: the dtype of x, or with ``cast_first`` the dtype of x times the weight."""
    return torch.promote_types(x.dtype, weight.dtype) if cast_first and weight is not None else x.dtype
