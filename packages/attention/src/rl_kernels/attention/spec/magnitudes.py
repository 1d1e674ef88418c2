"""How far rounding alone can move attention: sums of the terms' magnitudes, for the checker."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rl_kernels.attention.reference import keys_of, queries_of, visible
from rl_kernels.core.testing import Case, Inputs

WHERE = ("cu_seqlens_k", "k_start", "seqused_k", "block_table")


def magnitudes(case: Case, call: Inputs, upstream: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sum the magnitudes of the terms of out, lse and the gradients; rounding a score scales its weight."""
    q, k, v, sinks = call["q"], call["k"], call["v"], call.get("sinks")
    found = {
        "out": q.new_zeros((*q.shape[:-1], v.shape[-1])),
        "lse": q.new_zeros(q.shape[:-1]),
        **{f"gradient:{name}": torch.zeros_like(value) for name, value in (("q", q), ("k", k), ("v", v))},
    }
    above = upstream.get("out", found["out"]).abs()
    of_sinks = q.new_zeros(q.shape[-2])
    for b, place, count in queries_of(q, call.get("cu_seqlens_q"), call.get("seqused_q")):
        keys = keys_of(k, b, *map(call.get, WHERE))
        sees = visible(count, keys.shape[0], call["causal"], call.get("window"), q.device)
        terms = _terms(call, q[place], keys, keys_of(v, b, *map(call.get, WHERE)), sees[: len(q[place])], above[place])
        found["out"][place], found["lse"][place], found["gradient:q"][place], dk, dv, ds = terms
        if "seqused_k" not in call:
            keys_of(found["gradient:k"], b, *map(call.get, WHERE)).copy_(dk)
            keys_of(found["gradient:v"], b, *map(call.get, WHERE)).copy_(dv)
        of_sinks += ds
    found["lse"] = found["lse"].movedim(-1, -2)
    return found if sinks is None else {**found, "gradient:sinks": of_sinks}


def _terms(
    call: Inputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sees: torch.Tensor, above: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the sums for out, lse, dq, dk, dv and dsinks of one sequence; one head at a time bounds the memory."""
    group = q.shape[-2] // k.shape[-2]
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    found = []
    for head in range(q.shape[-2]):
        own = head // group
        *of_rows, of_k, of_v = _of_head(
            call, head, q[:, head], k[:, own].abs(), v[:, own].abs(), k[:, own], sees, above[:, head]
        )
        dk[:, own] += of_k
        dv[:, own] += of_v
        found.append(of_rows)
    out, lse, dq, dsinks = (torch.stack(parts) for parts in zip(*found, strict=True))
    return out.transpose(0, 1), lse.mT, dq.transpose(0, 1), dk, dv, dsinks


def _of_head(
    call: Inputs,
    head: int,
    q: torch.Tensor,
    size_k: torch.Tensor,
    size_v: torch.Tensor,
    k: torch.Tensor,
    sees: torch.Tensor,
    above: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    cap, scale = call.get("softcap", 0.0), call.get("scale", q.shape[-1] ** -0.5)
    score = q @ k.mT * scale
    score = cap * (score / cap).tanh() if cap else score
    size = (q.abs() @ size_k.mT * scale + score.abs()).masked_fill(~sees, 0.0)
    score = score.masked_fill(~sees, -torch.inf)
    extra = score.new_full((score.shape[0], 1), -torch.inf)
    if "sinks" in call:
        extra = call["sinks"][head].expand_as(extra)
    lse = torch.cat((score, extra), -1).logsumexp(-1)
    weights = torch.where(sees, (score - lse[:, None]).exp(), 0.0)
    mean = (weights * size).sum(-1) + lse.nan_to_num(neginf=0.0).abs()
    moved = weights * (1 + size + mean[:, None])
    products = above @ size_v.mT
    delta = (moved * products).sum(-1)
    dscore = moved * (products + delta[:, None]) * scale
    share = torch.where(lse == -torch.inf, 0.0, (extra[:, 0] - lse).exp())
    of_rows = moved @ size_v, 1 + mean, dscore @ size_k, (share * delta * (1 + mean)).sum()
    return *of_rows, dscore.mT @ q.abs(), moved.mT @ above
