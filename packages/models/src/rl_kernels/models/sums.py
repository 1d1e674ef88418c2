"""Sums in one order, made of element-wise additions: no library sees a shape, so no bit can follow one."""

from __future__ import annotations

import torch

from rl_kernels.core import rowwise
from rl_kernels.core.rowwise import STEP

TILE = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Elements of the largest tensor of products held at once, so that it stays in a cache; it changes no bit."""


def tree(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the sum over a dim of 16, always by the same tree."""
    for half in (8, 4, 2, 1):
        x = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
    return x.squeeze(dim)


def steps(length: int, each: torch.Tensor) -> int:
    """Return how many of ``length`` terms, a multiple of 16, to hold at once if each has ``each`` as its products."""
    most = TILE[each.device.type] // max(each.numel(), 1) // STEP * STEP
    return max(STEP, min(most, -(-length // STEP) * STEP))


def dots(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``[B, T, S, H, G]``, the dot products of ``a[B, T, H, G, D]`` and ``b[B, S, H, D]``."""
    found = a.new_empty((a.shape[0], a.shape[1], b.shape[1], *a.shape[2:4]))
    width = steps(b.shape[1], a)
    for first in range(0, b.shape[1], width):
        part = b[:, first : first + width]
        found[:, :, first : first + width] = rowwise.row_sum(a[:, :, None] * part[:, None, :, :, None])
    return found


def mix(weights: torch.Tensor, x: torch.Tensor, order: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Return ``[B, T, H, G, D]``: for each query the sum over its keys, 16 a step, of their weight times ``x``.

    Args:
        weights: ``[B, T, S, H, G]``.
        x: ``[B, S, H, D]``.
        order: ``[B, T, n]``, n a multiple of 16: the keys of each query in the order in which they are added.
        seen: ``[B, T, n]``: which of those there are; the others are not read.
    """
    total = x.new_zeros((*weights.shape[:2], *weights.shape[3:], x.shape[-1]))
    batch = torch.arange(x.shape[0], device=x.device)[:, None, None]
    query = torch.arange(order.shape[1], device=x.device)[None, :, None]
    width = steps(order.shape[2], total)
    for first in range(0, order.shape[2], width):
        keys, here = order[:, :, first : first + width], seen[:, :, first : first + width, None, None]
        value = torch.where(here, x[batch, keys], 0.0)
        weight = torch.where(here, weights[batch, query, keys], 0.0)
        parts = tree((weight[..., None] * value[..., None, :]).unflatten(2, (-1, STEP)), 3)
        for part in parts.unbind(2):
            total = total + part
    return total


def spread(weights: torch.Tensor, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return ``total[B, S, H, D]`` and what 16 queries add to it: their weight times ``x``, heads of a group in order.

    Args:
        weights: ``[B, 16, S, H, G]``.
        x: ``[B, 16, H, G, D]``.
        total: the sum so far.
    """
    added = torch.empty_like(total)
    width = steps(total.shape[1], x[..., 0, :])
    for first in range(0, total.shape[1], width):
        part = weights[:, :, first : first + width]
        heads = [tree(part[..., g, None] * x[:, :, None, :, g], 1) for g in range(x.shape[3])]
        added[:, first : first + width] = sum(heads[1:], heads[0])
    return total + added
