"""Arithmetic whose bits do not depend on the batch: the operators, and attention made of trees of additions."""

from __future__ import annotations

import torch
from torch import nn

from rl_kernels.core.rowwise.sums import row_sum
from rl_kernels.demo.arithmetic import NORM_EPS, Arithmetic, visible
from rl_kernels.linear_logp import linear_logp
from rl_kernels.norm import rms_norm


def linear(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Return the output of a ``DetLinear``."""
    return layer(x)


def norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * gain``."""
    normed = rms_norm(x, gain, eps=NORM_EPS, cast_first=False)
    assert isinstance(normed, torch.Tensor)  # a pair comes only of a residual
    return normed


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return causal attention ``[B, H, Q, d]``, all sequences at once: on a CPU det_attention takes them one by one.

    Computed in FP32 and rounded once to the dtype of ``q``.
    """
    dtype, (q, k, v) = q.dtype, (x.float() for x in (q, k, v))
    score = row_sum(q[..., :, None, :] * k[..., None, :, :]) * q.shape[-1] ** -0.5
    score = score.masked_fill(~visible(q.shape[2], k.shape[2]), -torch.inf)
    weights = (score - score.detach().amax(-1, keepdim=True)).exp()
    mixed = row_sum(weights[..., None, :] * v.mT[..., None, :, :])
    return (mixed / row_sum(weights)[..., None]).to(dtype)


def logp(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, temperature: float, ignore_index: int
) -> torch.Tensor:
    """Return the log-probabilities of the ids straight from hidden states."""
    logps = linear_logp(hidden, weight, ids, temperature=temperature, ignore_index=ignore_index)
    assert isinstance(logps, torch.Tensor)  # statistics come only when asked for
    return logps


INVARIANT = Arithmetic("rl-kernels", linear, norm, attention, logp)
