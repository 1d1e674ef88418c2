"""Arithmetic whose bits do not follow the batch: the operators, and what else the model needs, from element-wise parts.

Sums are core's trees, in which zeros appended to a row change no bit: attention over the keys of a cache equals
attention over a padded row whose later keys weigh exactly 0. Of the functions of PyTorch, only those are here that
round an element the same wherever it stands: products, quotients, sqrt and exp, but no silu, gelu or sigmoid.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rl_kernels.core import rowwise
from rl_kernels.demo.arithmetic import NORM_EPS, Arithmetic, visible
from rl_kernels.linear_logp import linear_logp


class _RowSum(torch.autograd.Function):
    """core's sum of a row, with the gradient that every sum has; autograd's own would walk the tree back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.shape = x.shape
        return rowwise.row_sum(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad[..., None].expand(ctx.shape)


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Return the sum over the last dim of ``x[..., n]``; differentiable."""
    return _RowSum.apply(x)


def linear(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Return the output of a ``DetLinear``."""
    return layer(x)


def rms_norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * gain``."""
    mean = row_sum(x * x) / x.shape[-1]
    return x / (mean + NORM_EPS).sqrt()[..., None] * gain


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return causal attention, every dot product an element-wise product and a tree of sums."""
    scores = row_sum(q[:, :, :, None, :] * k[:, :, None, :, :]) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~visible(q.shape[2], k.shape[2]), -torch.inf)
    power = (scores - scores.detach().amax(-1, keepdim=True)).exp()
    mixed = row_sum(power[:, :, :, None, :] * v.transpose(2, 3)[:, :, None, :, :])
    return mixed / row_sum(power)[..., None]


def logp(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, temperature: float, ignore_index: int
) -> torch.Tensor:
    """Return the log-probabilities of the ids straight from hidden states."""
    logps = linear_logp(hidden, weight, ids, temperature=temperature, ignore_index=ignore_index)
    assert isinstance(logps, torch.Tensor)  # statistics come only when asked for
    return logps


INVARIANT = Arithmetic("rl-kernels", linear, rms_norm, attention, logp)
