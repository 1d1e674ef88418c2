"""The definition of the GRPO loss in plain PyTorch; the gold when its inputs are FP64."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from rl_kernels.grpo_loss.outputs import GRPOLossOutput


def grpo_loss(
    current_logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    ref_logps: torch.Tensor | None,
    rewards: torch.Tensor,
    completion_mask: torch.Tensor,
    *,
    samples_per_prompt: int | None = None,
    group_boundaries: Sequence[int] | torch.Tensor | None = None,
    clip_eps: float = 0.2,
    beta: float = 0.0,
    eps: float = 1e-6,
) -> GRPOLossOutput:
    """Return the loss with advantages from the rewards of each group; shapes as in the public function."""
    if current_logps.dtype == torch.float64:
        rewards = rewards.double()
    advantages = group_advantages(
        rewards, samples_per_prompt=samples_per_prompt, group_boundaries=group_boundaries, eps=eps
    )
    return grpo_loss_from_advantages(
        current_logps, old_logps, ref_logps, advantages, completion_mask, clip_eps=clip_eps, beta=beta
    )


def grpo_loss_from_advantages(
    current_logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    ref_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    completion_mask: torch.Tensor,
    *,
    clip_eps: float = 0.2,
    beta: float = 0.0,
) -> GRPOLossOutput:
    """Return the mean over active tokens of the clipped policy term, plus ``beta`` times that of k3."""
    dtype = _dtype(current_logps)
    mask = completion_mask.bool()
    a = (advantages if advantages.ndim == 2 else advantages[:, None]).to(dtype).expand(mask.shape)
    current = current_logps.to(dtype)
    old = current.detach() if old_logps is None else old_logps.to(dtype)

    # Taken out before the exponential: what overflows there would reach the gradient as 0 * inf.
    counted = mask & (a != 0)
    ratio = torch.where(counted, current - old, 0).exp()
    unclipped, clipped = ratio * a, ratio.clamp(1 - clip_eps, 1 + clip_eps) * a
    policy_loss = _mean(torch.where(counted, -torch.where(clipped < unclipped, clipped, unclipped), 0), mask)
    if beta == 0 or ref_logps is None:
        return GRPOLossOutput(policy_loss, policy_loss.detach(), torch.zeros_like(policy_loss).detach())

    e = torch.where(mask, ref_logps.to(dtype) - current, 0)
    kl = _mean(e.expm1() - e, mask)
    return GRPOLossOutput(policy_loss + beta * kl, policy_loss.detach(), kl.detach())


def group_advantages(
    rewards: torch.Tensor,
    *,
    samples_per_prompt: int | None = None,
    group_boundaries: Sequence[int] | torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Return ``(r - mean) / max(std, eps)`` within each group, population std; 0 where all rewards are equal."""
    # In FP64: the FP32 mean of rewards around 10,000 is off by more than advantages may be.
    r = rewards.double()
    if samples_per_prompt is not None:
        group_boundaries = range(0, len(r) + 1, samples_per_prompt)
    assert group_boundaries is not None
    groups = [r[start:end] for start, end in pairwise(int(offset) for offset in group_boundaries)]
    return torch.cat([r[:0], *(_normalised(group, eps) for group in groups)]).to(_dtype(rewards))


def _normalised(group: torch.Tensor, eps: float) -> torch.Tensor:
    # The mean of seven times 0.1 is not 0.1, so equal rewards are seen before the arithmetic.
    if bool((group == group[0]).all()):
        return torch.zeros_like(group)
    return (group - group.mean()) / group.std(correction=0).clamp(min=eps)


def _mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return values.sum() / mask.sum().clamp(min=1)


def _dtype(value: torch.Tensor) -> torch.dtype:
    return torch.float64 if value.dtype == torch.float64 else torch.float32
