"""What the model computes with: the same four functions, once invariant and once as PyTorch has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

Tensor = torch.Tensor


@dataclass(frozen=True)
class Arithmetic:
    """One set of functions for the model; two sets differ in rounding alone.

    Attributes:
        name: as reports call it.
        linear: ``(layer, x[..., K]) -> [..., N]``.
        rms_norm: ``(x[..., D], gain[D]) -> [..., D]``.
        attention: ``(q[B, H, Q, d], k[B, H, K, d], v[B, H, K, d]) -> [B, H, Q, d]``; the queries stand at the last Q
            of the K positions, and each sees the keys up to its own.
        logp: ``(hidden[..., D], weight[V, D], ids[...], temperature, ignore_index) -> [...]``, FP32 log-probabilities
            of the ids, 0 where ignored.
    """

    name: str
    linear: Callable[[nn.Linear, Tensor], Tensor]
    rms_norm: Callable[[Tensor, Tensor], Tensor]
    attention: Callable[[Tensor, Tensor, Tensor], Tensor]
    logp: Callable[[Tensor, Tensor, Tensor, float, int], Tensor]


NORM_EPS = 1e-6


def visible(queries: int, keys: int) -> Tensor:
    """Return ``[queries, keys]``: whether the query at a position may see the key at another."""
    last = torch.arange(keys - queries, keys)
    return torch.arange(keys)[None, :] <= last[:, None]
