"""Scores, choice and weights of routes in PyTorch, and their gradient; a row's bits depend on that row alone."""

from __future__ import annotations

import torch

from rl_kernels.moe.activations import sigmoid
from rl_kernels.moe.reference import LEAST_SUM

SCORINGS = ("softmax", "sigmoid", "softmax_of_chosen")


def scores_of(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    """Return the FP32 scores ``[T, E]``; for ``softmax_of_chosen`` the logits."""
    z = logits.float()
    if scoring == "softmax_of_chosen":
        return z
    return z.softmax(-1) if scoring == "softmax" else sigmoid(z)


def chosen_experts(
    scores: torch.Tensor, correction_bias: torch.Tensor | None, top_k: int, groups: int, kept: int
) -> torch.Tensor:
    """Return the int64 ids ``[T, k]`` of the largest scores, equal ones by ascending id; 0..k-1 for a row with NaN."""
    is_nan = scores.isnan().any(-1, keepdim=True)
    rank = scores if correction_bias is None else scores + correction_bias.float()
    order = torch.sort(rank, dim=-1, descending=True, stable=True).indices
    if kept < groups:
        each = rank.unflatten(-1, (groups, -1))
        best = each.sort(-1, descending=True).values[..., :2].sum(-1)
        places = torch.sort(best, dim=-1, descending=True, stable=True).indices[:, :kept]
        is_left_out = torch.ones_like(best, dtype=torch.int8).scatter_(1, places, 0)
        # Stable again: of those that are kept, the order stays.
        last = torch.sort(
            is_left_out.repeat_interleave(each.shape[-1], 1).gather(1, order), dim=-1, stable=True
        ).indices
        order = order.gather(1, last)
    return torch.where(is_nan, torch.arange(scores.shape[1], device=scores.device), order)[:, :top_k].contiguous()


def weights_of(scores: torch.Tensor, ids: torch.Tensor, scoring: str, normalize: bool, scale: float) -> torch.Tensor:
    """Return the FP32 weights ``[T, k]``; NaN for a row with NaN or an id outside [0, E)."""
    is_bad = scores.isnan().any(-1, keepdim=True) | ((ids < 0) | (ids >= scores.shape[1])).any(-1, keepdim=True)
    chosen = scores.gather(1, ids.long().clamp(0, scores.shape[1] - 1))
    if scoring == "softmax_of_chosen":
        chosen = chosen.softmax(-1)
    elif normalize:
        chosen = chosen / (_sum(chosen) + LEAST_SUM)
    return (chosen * scale).masked_fill(is_bad, torch.nan)


def logits_gradient(
    grad_weights: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor, scoring: str, normalize: bool, scale: float
) -> torch.Tensor:
    """Return the FP32 gradient of the logits ``[T, E]``, from that of the weights."""
    scores, ids = scores_of(logits, scoring), ids.long().clamp(0, logits.shape[1] - 1)
    grad, chosen = grad_weights.float() * scale, scores.gather(1, ids)
    if scoring == "softmax_of_chosen":
        shares = chosen.softmax(-1)
        grad = shares * (grad - _sum(grad * shares))
    elif normalize:
        total = _sum(chosen) + LEAST_SUM
        grad = (grad - _sum(grad * (chosen / total))) / total
    if scoring == "sigmoid":
        grad = grad * (chosen * (1 - chosen))
    out = torch.zeros_like(scores)
    for slot in range(ids.shape[1]):
        # One slot after the other: an id may come twice.
        out.scatter_add_(1, ids[:, slot, None], grad[:, slot, None])
    return scores * (out - _sum(grad * chosen)) if scoring == "softmax" else out


def _sum(x: torch.Tensor) -> torch.Tensor:
    """Return the sum over the slots of ``x[T, k]`` in ascending order, ``[T, 1]``."""
    total = torch.zeros_like(x[:, :1])
    for slot in range(x.shape[1]):
        total = total + x[:, slot, None]
    return total
