"""The definition of det_attention in plain PyTorch: one sequence and its own keys at a time.

Scores, softmax and sums in FP32 (FP64 for FP64 operands). As in the kernels, the weights of the values and the gradient
of the scores are rounded to the operands' dtype before they are multiplied; in FP64 nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rl_kernels.attention.inputs import Attended


def det_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    k_start: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | Attended:
    """Return the output; with ``return_lse``, also the logsumexp of each query's scores. Arguments as in ``api``."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    lse = q.new_full((*q.shape[:-1],), -torch.inf, dtype=wide)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    for b, place, count in queries_of(q, cu_seqlens_q, seqused_q):
        keys, values = (keys_of(x, b, cu_seqlens_k, k_start, seqused_k, block_table) for x in (k, v))
        mask = visible(count, keys.shape[0], causal, window, q.device)[: len(q[place])]
        out[place], lse[place] = _attend(q[place], keys, values, mask, factor, softcap, sinks)
    return Attended(out, lse.detach().movedim(-1, -2).contiguous()) if return_lse else out


def queries_of(
    q: torch.Tensor, cu_seqlens: torch.Tensor | None, used: torch.Tensor | None
) -> Iterator[tuple[int, tuple[Any, ...], int]]:
    """Yield (sequence, index in q of its queries in use, number of all its queries)."""
    for b in range(q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1):
        start, stop = (0, q.shape[1]) if cu_seqlens is None else (int(cu_seqlens[b]), int(cu_seqlens[b + 1]))
        rows = slice(start, stop if used is None else start + int(used[b]))
        yield b, (b, rows) if cu_seqlens is None else (rows,), stop - start


def keys_of(
    x: torch.Tensor,
    b: int,
    cu_seqlens: torch.Tensor | None,
    start: torch.Tensor | None,
    used: torch.Tensor | None,
    table: torch.Tensor | None,
) -> torch.Tensor:
    """Return the keys or values of one sequence, ``[S, Hkv, D]``."""
    if cu_seqlens is not None:
        return x[int(cu_seqlens[b]) : int(cu_seqlens[b + 1])]
    rows = x[b] if table is None else x[table[b].long().clamp(0, x.shape[0] - 1)].flatten(0, 1)
    # A negative start stands for keys that a cache has dropped, which no query sees.
    first = 0 if start is None else max(int(start[b]), 0)
    return rows[first : rows.shape[0] if used is None else int(used[b])]


def visible(
    queries: int, keys: int, causal: bool, window: tuple[int | None, int | None] | None, device: torch.device
) -> torch.Tensor:
    """Return which keys each query sees, ``[T, S]``: the last query stands at the last key."""
    distance = torch.arange(keys, device=device) - (torch.arange(queries, device=device)[:, None] + keys - queries)
    left, right = (None if side == -1 else side for side in window or (None, None))
    right = 0 if causal else right
    mask = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        mask &= distance >= -left
    if right is not None:
        mask &= distance <= right
    return mask


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out ``[T, H, Dv]`` and lse ``[T, H]`` of one sequence."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[-2] // k.shape[-2]
    heads = []
    for head in range(k.shape[-2]):
        keys, values = k[:, head].to(wide), v[:, head].to(wide)
        for query_head in range(head * group, (head + 1) * group):
            sink = None if sinks is None else sinks[query_head]
            heads.append(_Head.apply(q[:, query_head], keys, values, sink, mask, scale, softcap))
    out, lse = (torch.stack(parts, 1) for parts in zip(*heads, strict=True))
    return out, lse


class _Head(torch.autograd.Function):
    """Attention of one query head ``q[T, D]``; its ``k[S, D]`` and ``v[S, Dv]`` are in the wide dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        mask: torch.Tensor,
        scale: float,
        softcap: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        score = _scores(q, k, scale, softcap)[0].masked_fill(~mask, -torch.inf)
        # A last column, for the sink or -inf: without keys, the maximum needs it.
        score = torch.cat((score, score.new_full((score.shape[0], 1), -torch.inf)), -1)
        top = score.amax(-1, keepdim=True).clamp(min=torch.finfo(score.dtype).min)
        if sinks is not None:
            score[:, -1] = sinks.to(score.dtype)
        lse = score.logsumexp(-1)
        # Rounded while the largest weight is 1, as in the kernels.
        weights = (score[..., :-1] - top).exp().to(q.dtype).to(score.dtype)
        share = torch.where(top[..., 0] == torch.finfo(score.dtype).min, 0.0, (top[..., 0] - lse).exp())
        out = ((weights @ v) * share[..., None]).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, mask, out, lse)
        ctx.scale, ctx.softcap = scale, softcap
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, mask, out, lse = ctx.saved_tensors
        upstream = grad.to(k.dtype)
        score, slope = _scores(q, k, ctx.scale, ctx.softcap)
        weights = torch.where(mask, (score - lse[..., None]).exp(), 0.0)
        delta = (upstream * out.to(k.dtype)).sum(-1)
        dscore = weights * (upstream @ v.mT - delta[..., None]) * slope
        dscore, weights = (x.to(q.dtype).to(k.dtype) for x in (dscore, weights))
        dq, dk, dv = dscore @ k * ctx.scale, dscore.mT @ q.to(k.dtype) * ctx.scale, weights.mT @ upstream
        dsinks = None
        if sinks is not None:
            # A sink of -inf is no part of a sum over no keys either.
            share = torch.where(lse == -torch.inf, 0.0, (sinks.to(lse.dtype) - lse).exp())
            dsinks = -(share * delta).sum().to(sinks.dtype)
        return dq.to(q.dtype), dk, dv, dsinks, None, None, None


def _scores(
    q: torch.Tensor, k: torch.Tensor, scale: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return the scores ``[T, S]`` and the derivative of the soft cap."""
    score = q.to(k.dtype) @ k.mT * scale
    if not softcap:
        return score, 1.0
    capped = (score / softcap).tanh()
    return softcap * capped, 1 - capped * capped
