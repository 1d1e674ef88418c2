"""Attention in which each query walks the keys that it sees, and nothing else, 16 at a time from the first of them.

For a query, with s its scores over those keys, m their maximum and p = e^(s - m):

    total = 0, mixed = 0
    for 16 keys after 16 keys, ascending:  total += tree(p), mixed += tree(p v)     missing keys are zeros
    out = mixed / total

All in FP32, rounded once; a score is a tree of sums over the head. So padded keys, later keys, an unfilled cache and
other queries are no part of it: prompt alone, batched, padded, in chunks or token by token, the bits are the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rl_kernels.core import rowwise
from rl_kernels.core.rowwise import STEP
from rl_kernels.models.sums import TILE, dots, mix, spread


class Walk(NamedTuple):
    """Some queries, and what they see."""

    weights: torch.Tensor
    """``[B, T, S, H, G]``: softmax numerators, 0 where a key is not seen."""
    total: torch.Tensor
    """``[B, T, H, G, 1]``: their sum, 1 for a query that sees nothing."""
    slope: torch.Tensor | None
    """``[B, T, S, H, G]``: derivative of the soft cap, if there is one."""
    order: torch.Tensor
    """``[B, T, n]``: the keys seen, in ascending order, then others; n is a multiple of 16."""
    seen: torch.Tensor
    """``[B, T, n]``: which of them are seen."""


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float, softcap: float
) -> torch.Tensor:
    """Return ``[B, T, H, Dv]``; a query that sees nothing gets 0.

    Args:
        q: ``[B, H, T, D]``.
        k: ``[B, Hkv, S, D]``, Hkv divides H.
        v: ``[B, Hkv, S, Dv]``.
        visible: ``[B, T, S]``, bool.
        scale: of the scores.
        softcap: scores are ``softcap tanh(score / softcap)``; 0 for none.
    """
    groups, keys, values = _groups(q, k), _rows(k), _rows(v)
    out = q.new_empty((*groups.shape[:4], v.shape[3]))
    for queries in _chunks(groups, keys, 1):
        walk = _walk(groups[:, queries], keys, visible[:, queries], scale, softcap)
        out[:, queries] = (mix(walk.weights, values, walk.order, walk.seen) / walk.total).to(q.dtype)
    return out.flatten(2, 3)


def attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of ``q``, ``k`` and ``v``.

    That of a query walks its keys as the forward does; those of a key walk the queries, 16 at a time from the first
    that sees anything.
    """
    # Queries that see nothing go to the end, where their zeros change no bit.
    real = visible.any(2)
    place = _first(real, 1)
    batch = torch.arange(q.shape[0], device=q.device)[:, None]
    hide = real[batch, place][:, :, None, None, None]
    groups = torch.where(hide, _groups(q, k)[batch, place], 0.0)
    upstream = torch.where(hide, grad.float().unflatten(2, groups.shape[2:4])[batch, place], 0.0)
    seen, keys, values = visible[batch, place], _rows(k), _rows(v)

    dq, dk, dv = torch.empty_like(groups), torch.zeros_like(keys), torch.zeros_like(values)
    for queries in _chunks(groups, keys, STEP):
        one, up = groups[:, queries], upstream[:, queries]
        walk = _walk(one, keys, seen[:, queries], scale, softcap)
        share = walk.weights / walk.total[:, :, None, :, :, 0]
        out = mix(walk.weights, values, walk.order, walk.seen) / walk.total
        pull = dots(up, values) - rowwise.row_sum(up * out)[:, :, None]
        ds = torch.where(seen[:, queries, :, None, None], share * pull, 0.0)
        ds = (ds if walk.slope is None else ds * walk.slope) * scale
        dq[:, queries] = mix(ds, keys, walk.order, walk.seen)
        for first in range(0, one.shape[1], STEP):
            step = slice(first, first + STEP)
            dk = spread(_whole(ds[:, step]), _whole(one[:, step]), dk)
            dv = spread(_whole(share[:, step]), _whole(up[:, step]), dv)
    back = torch.empty_like(dq)
    back[batch, place] = dq
    return (
        back.flatten(2, 3).transpose(1, 2).to(q.dtype).contiguous(),
        dk.transpose(1, 2).to(k.dtype).contiguous(),
        dv.transpose(1, 2).to(v.dtype).contiguous(),
    )


def _groups(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return queries as ``[B, T, Hkv, G, D]``, FP32."""
    return q.float().transpose(1, 2).unflatten(2, (k.shape[1], -1))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return keys or values as ``[B, S, Hkv, D]``, FP32."""
    return x.float().transpose(1, 2)


def _chunks(groups: torch.Tensor, keys: torch.Tensor, least: int) -> list[slice]:
    """Cut the queries, at multiples of ``least``, so that neither their weights nor their products are too large."""
    products = groups[:, :1].numel() * STEP
    weights = groups[:, :1, ..., 0].numel() * keys.shape[1]
    width = max(1, TILE[keys.device.type] // max(products, weights, 1) // least) * least
    return [slice(first, first + width) for first in range(0, groups.shape[1], width)]


def _first(chosen: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the indices along a dim, those that are chosen first, each kind in ascending order."""
    return torch.argsort((~chosen).to(torch.uint8), dim=dim, stable=True)


def _whole(x: torch.Tensor) -> torch.Tensor:
    """Append zero queries up to 16."""
    return rowwise.pad_to(x, 1, STEP)


def _walk(groups: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor, scale: float, softcap: float) -> Walk:
    scores, slope = dots(groups, keys) * scale, None
    if softcap:
        bent = torch.tanh(scores / softcap)
        scores, slope = softcap * bent, 1 - bent * bent
    scores = torch.where(visible[..., None, None], scores, -torch.inf)
    top = scores.amax(2, keepdim=True) if scores.shape[2] else scores.sum(2, keepdim=True)
    # Where nothing is seen, -inf less -inf would be NaN.
    weights = (scores - torch.where(top == -torch.inf, 0.0, top)).exp()

    order = _first(visible, 2)
    seen = torch.arange(visible.shape[2], device=order.device) < visible.sum(2, keepdim=True)
    order, seen = rowwise.pad_to(order, 2, STEP), rowwise.pad_to(seen, 2, STEP)
    ones = keys.new_ones((*keys.shape[:3], 1))
    total = mix(weights, ones, order, seen)
    return Walk(weights, torch.where(visible.any(2)[..., None, None, None], total, 1.0), slope, order, seen)
