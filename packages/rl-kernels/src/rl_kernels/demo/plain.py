"""Straightforward PyTorch: library products and reductions, whose rounding follows the shape of the call."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from rl_kernels.demo.arithmetic import NORM_EPS, Arithmetic, visible


def linear(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Return ``x @ weight^T`` by the library's product."""
    return F.linear(x, layer.weight, layer.bias)


def rms_norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * gain``."""
    return F.rms_norm(x, gain.shape, gain, NORM_EPS)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return causal attention by the library's fused function."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible(q.shape[2], k.shape[2]))


def logp(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, temperature: float, ignore_index: int
) -> torch.Tensor:
    """Return the log-probabilities of the ids by a softmax in FP32 over all logits."""
    kept = ids != ignore_index
    logps = (F.linear(hidden, weight).float() / temperature).log_softmax(-1)
    chosen = logps.gather(-1, torch.where(kept, ids, 0)[..., None])[..., 0]
    return torch.where(kept, chosen, 0.0)


PLAIN = Arithmetic("plain PyTorch", linear, rms_norm, attention, logp)
