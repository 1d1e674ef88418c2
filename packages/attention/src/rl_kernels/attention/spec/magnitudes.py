"""How far rounding alone can move attention: sums of the terms' magnitudes, for the checker."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rl_kernels.attention.reference import keys_of, queries_of, visible
from rl_kernels.core.testing import Case, Inputs

WHERE = ("cu_seqlens_k", "k_start", "seqused_k", "block_table")


def magnitudes(case: Case, call: Inputs, upstream: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sum the terms' sizes of out, lse and the gradients; rounding a score by its size moves a weight by a share."""
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
        sees = visible(count, keys.shape[0], call.get("causal", True), call.get("window"), q.device)
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
    group, cap = q.shape[-2] // k.shape[-2], call.get("softcap", 0.0)
    scale = call.get("scale", q.shape[-1] ** -0.5)
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    score = torch.einsum("thd,shd->hts", q, k) * scale
    size = torch.einsum("thd,shd->hts", q.abs(), k.abs()) * scale
    score = cap * (score / cap).tanh() if cap else score
    size = (size + score.abs()).masked_fill(~sees, 0.0)
    score = score.masked_fill(~sees, -torch.inf)
    extra = score.new_full((*score.shape[:2], 1), -torch.inf)
    if "sinks" in call:
        extra = call["sinks"][:, None, None].expand_as(extra)
    lse = torch.cat((score, extra), -1).logsumexp(-1)
    weights = torch.where(sees, (score - lse[..., None]).exp(), 0.0)
    mean = (weights * size).sum(-1) + lse.nan_to_num(neginf=0.0).abs()
    moved = weights * (1 + size + mean[..., None])
    out = torch.einsum("hts,shd->thd", moved, v.abs())
    products = torch.einsum("thd,shd->hts", above, v.abs())
    delta = (moved * products).sum(-1)
    dscore = moved * (products + delta[..., None]) * scale
    dq = torch.einsum("hts,shd->thd", dscore, k.abs())
    dk = torch.einsum("hts,thd->shd", dscore, q.abs()).unflatten(1, (-1, group)).sum(2)
    dv = torch.einsum("hts,thd->shd", moved, above).unflatten(1, (-1, group)).sum(2)
    share = torch.where(lse == -torch.inf, 0.0, (extra[..., 0] - lse).exp())
    return out, (1 + mean).mT, dq, dk, dv, (share * delta * (1 + mean)).sum(-1)
