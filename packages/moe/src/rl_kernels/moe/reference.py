"""The definitions of experts and route in plain PyTorch; the gold when their inputs are FP64."""

from __future__ import annotations

import torch
import torch.nn.functional as F

LEAST_SUM = 1e-20
"""Added to the sum of scores that weights are divided by, as in DeepSeek-V3."""
LIMIT, SLOPE = 7.0, 1.702
"""Bound of gate and up, and factor of the sigmoid's argument, in ``clamped_swiglu``."""


def experts(
    hidden: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    activation: str = "silu",
    interleaved: bool = False,
    transposed: bool = False,
    **_: object,
) -> torch.Tensor:
    """Return ``sum_s weights[t, s] * expert(ids[t, s])(hidden[t]) + shared[t]`` ``[T, D]``.

    Sums are in FP32 (FP64 for FP64 inputs). The outputs of both products, and each step of the activation, are rounded
    to the dtype of ``hidden``.
    """
    dtype = hidden.dtype
    if transposed:
        gate_up, down = gate_up.mT, down.mT
    places, results = [], []
    # One by one, the gradient of each expert would be a tensor of all experts.
    for expert, (first, second) in enumerate(zip(gate_up.unbind(), down.unbind(), strict=True)):
        tokens, slots = torch.nonzero(ids == expert, as_tuple=True)
        z = _linear(hidden[tokens], first, None if gate_up_bias is None else gate_up_bias[expert])
        h = activate(*split(z, interleaved), activation)
        places.append(tokens * ids.shape[1] + slots)
        results.append(_wide(_linear(h, second, None if down_bias is None else down_bias[expert])))
    width = hidden.shape[1]
    y = _wide(hidden).new_zeros((ids.numel(), width)).index_copy(0, torch.cat(places), torch.cat(results))
    total = (weights.to(y.dtype)[..., None] * y.view(*ids.shape, width)).sum(1)
    return (total if shared is None else total + _wide(shared)).to(dtype)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(_wide(x), _wide(weight), None if bias is None else _wide(bias)).to(x.dtype)


def split(z: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gate and up ``[..., F]``, views of ``z[..., 2F]``."""
    if interleaved:
        return z[..., ::2], z[..., 1::2]
    gate, up = z.chunk(2, -1)
    return gate, up


def activate(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return what the second product takes; each step is rounded to the dtype of ``gate``, as models do."""
    if activation == "silu":
        return F.silu(gate) * up
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * SLOPE))


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def route(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    bias: torch.Tensor | None = None,
    correction_bias: torch.Tensor | None = None,
    groups: tuple[int, int] | None = None,
    normalize: bool = True,
    scale: float = 1.0,
    logits_dtype: torch.dtype | None = None,
    ids: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids and weights ``[T, k]``, and logits ``[T, E]``, in FP32 (FP64 for FP64 inputs)."""
    logits = F.linear(_wide(hidden), _wide(weight), None if bias is None else _wide(bias))
    logits = logits if logits_dtype is None else logits.to(logits_dtype).to(logits.dtype)
    scores = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid(), "softmax_of_chosen": logits}[scoring]
    if ids is None:
        rank = scores if correction_bias is None else scores + _wide(correction_bias)
        if groups is not None:
            best = rank.unflatten(-1, (groups[0], -1)).topk(min(2, rank.shape[1] // groups[0]), -1).values.sum(-1)
            kept = torch.sort(best, dim=-1, descending=True, stable=True).indices[:, : groups[1]]
            is_kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, True)
            rank = rank.masked_fill(~is_kept.repeat_interleave(rank.shape[1] // groups[0], 1), -torch.inf)
        ids = torch.sort(rank, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids.long())
    if scoring == "softmax_of_chosen":
        weights = weights.softmax(-1)
    elif normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
    return ids, weights * scale, logits
