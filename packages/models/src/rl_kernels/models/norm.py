"""Norms of a row: the sums are trees of element-wise additions over the row, so no bit follows the batch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rl_kernels.core import rowwise


class Form(NamedTuple):
    """What a norm does beside dividing a row by its root mean square."""

    centred: bool
    """The mean is subtracted first: a LayerNorm."""
    offset: float
    """Added to the weight: 1 where the weight is stored as its distance from 1."""
    early: bool
    """The row is rounded to its dtype before the weight multiplies it."""


def norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    centred: bool,
    offset: float,
    early: bool,
) -> torch.Tensor:
    """Return the norm of ``x[..., D]``, worked in FP32; in the dtype of ``x``, or of ``weight * x`` if ``early``."""
    scaled, _ = _scaled(x, eps, centred)
    if early:
        row = scaled.to(x.dtype)
        return (row if weight is None else row * (weight + offset if offset else weight)).contiguous()
    if weight is not None:
        scaled = scaled * (weight.float() + offset)
    return (scaled if bias is None else scaled + bias.float()).to(x.dtype).contiguous()


def norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, eps: float, centred: bool, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of ``x``, and the terms ``[..., D]``, FP32, whose sum over the rows is that of the weight."""
    scaled, inverse = _scaled(x, eps, centred)
    upstream = grad.float()
    pull = upstream if weight is None else upstream * (weight.float() + offset)
    part = pull - scaled * _mean(pull * scaled)
    if centred:
        part = part - _mean(pull)
    return (part * inverse).to(x.dtype).contiguous(), (upstream * scaled).contiguous()


def _scaled(x: torch.Tensor, eps: float, centred: bool) -> tuple[torch.Tensor, torch.Tensor]:
    row = x.float()
    if centred:
        row = row - _mean(row)
    inverse = torch.rsqrt(_mean(row * row) + eps)
    return row * inverse, inverse


def _mean(x: torch.Tensor) -> torch.Tensor:
    return rowwise.row_sum(x)[..., None] / x.shape[-1]
