"""The twin in stock PyTorch: the model as it comes, with SDPA; logits, their log-softmax in FP32, the loss by hand."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from rl_kernels.demo.gpu.way import Way, race
from rl_kernels.demo.rollout import IGNORE


def taken(model: nn.Module) -> AbstractContextManager[None]:
    """Leave the model as it is."""
    return nullcontext()


def draw(head: nn.Module, hidden: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from the logits, and take the log-probabilities from them."""
    scores = head(hidden).float().log_softmax(-1)
    ids = race(scores, noise)
    return ids, scores.gather(-1, ids[:, None])[:, 0]


def logps(head: nn.Module, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of the targets from all logits."""
    kept = targets != IGNORE
    scores = head(hidden).float().log_softmax(-1)
    chosen = scores.gather(-1, torch.where(kept, targets, 0)[..., None])[..., 0]
    return torch.where(kept, chosen, 0.0)


def loss(
    current: torch.Tensor,
    old: torch.Tensor,
    rewards: torch.Tensor,
    mask: torch.Tensor,
    samples_per_prompt: int,
    clip_eps: float,
) -> torch.Tensor:
    """Return the loss as its formula is written, with rewards scaled by the deviation of their group."""
    groups = rewards.double().view(-1, samples_per_prompt)
    scale = groups.std(1, correction=0, keepdim=True).clamp(min=1e-6)
    advantages = ((groups - groups.mean(1, keepdim=True)) / scale).float().view(-1, 1)
    ratio = (current - old).exp()
    policy = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages)
    return (policy * mask).sum() / mask.sum()


STOCK = Way("stock PyTorch", taken, draw, logps, loss)
