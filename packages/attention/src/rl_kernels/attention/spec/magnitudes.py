"""Bound how far rounding alone can move results: sums of the terms' magnitudes, for the checker."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rl_kernels.attention.reference import keys_of, queries_of, visible
from rl_kernels.core.testing import Case, Inputs

KEY_ARGUMENTS = ("cu_seqlens_k", "k_start", "seqused_k", "block_table")


def magnitudes(case: Case, call: Inputs, upstream: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sum the magnitudes of the terms of out, lse and the gradients; rounding a score scales its weight."""
    q, k, v, sinks = call["q"], call["k"], call["v"], call.get("sinks")
    sums = {
        "out": q.new_zeros((*q.shape[:-1], v.shape[-1])),
        "lse": q.new_zeros(q.shape[:-1]),
        **{f"gradient:{name}": torch.zeros_like(value) for name, value in (("q", q), ("k", k), ("v", v))},
    }
    upstream_size = upstream.get("out", sums["out"]).abs()
    sinks_sum = q.new_zeros(q.shape[-2])
    for b, place, count in queries_of(q, call.get("cu_seqlens_q"), call.get("seqused_q")):
        keys = keys_of(k, b, *map(call.get, KEY_ARGUMENTS))
        mask = visible(count, keys.shape[0], call["causal"], call.get("window"), q.device)
        terms = _terms(
            call,
            q[place],
            keys,
            keys_of(v, b, *map(call.get, KEY_ARGUMENTS)),
            mask[: len(q[place])],
            upstream_size[place],
        )
        sums["out"][place], sums["lse"][place], sums["gradient:q"][place], dk, dv, dsinks = terms
        if "seqused_k" not in call:
            keys_of(sums["gradient:k"], b, *map(call.get, KEY_ARGUMENTS)).copy_(dk)
            keys_of(sums["gradient:v"], b, *map(call.get, KEY_ARGUMENTS)).copy_(dv)
        sinks_sum += dsinks
    sums["lse"] = sums["lse"].movedim(-1, -2)
    return sums if sinks is None else {**sums, "gradient:sinks": sinks_sum}


def _terms(
    call: Inputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, upstream_size: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the sums for out, lse, dq, dk, dv and dsinks of one sequence; one head at a time bounds the memory."""
    group = q.shape[-2] // k.shape[-2]
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    row_terms = []
    for head in range(q.shape[-2]):
        kv_head = head // group
        *terms, dk_head, dv_head = _head_terms(
            call,
            head,
            q[:, head],
            k[:, kv_head].abs(),
            v[:, kv_head].abs(),
            k[:, kv_head],
            mask,
            upstream_size[:, head],
        )
        dk[:, kv_head] += dk_head
        dv[:, kv_head] += dv_head
        row_terms.append(terms)
    out, lse, dq, dsinks = (torch.stack(parts) for parts in zip(*row_terms, strict=True))
    return out.transpose(0, 1), lse.mT, dq.transpose(0, 1), dk, dv, dsinks


def _head_terms(
    call: Inputs,
    head: int,
    q: torch.Tensor,
    size_k: torch.Tensor,
    size_v: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor,
    upstream_size: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    cap, scale = call.get("softcap", 0.0), call.get("scale", q.shape[-1] ** -0.5)
    score = q @ k.mT * scale
    score = cap * (score / cap).tanh() if cap else score
    size = (q.abs() @ size_k.mT * scale + score.abs()).masked_fill(~mask, 0.0)
    score = score.masked_fill(~mask, -torch.inf)
    extra = score.new_full((score.shape[0], 1), -torch.inf)
    if "sinks" in call:
        extra = call["sinks"][head].expand_as(extra)
    lse = torch.cat((score, extra), -1).logsumexp(-1)
    weights = torch.where(mask, (score - lse[:, None]).exp(), 0.0)
    mean = (weights * size).sum(-1) + lse.nan_to_num(neginf=0.0).abs()
    moved = weights * (1 + size + mean[:, None])
    products = upstream_size @ size_v.mT
    delta = (moved * products).sum(-1)
    dscore = moved * (products + delta[:, None]) * scale
    share = torch.where(lse == -torch.inf, 0.0, (extra[:, 0] - lse).exp())
    row_terms = moved @ size_v, 1 + mean, dscore @ size_k, (share * delta * (1 + mean)).sum()
    return *row_terms, dscore.mT @ q.abs(), moved.mT @ upstream_size
