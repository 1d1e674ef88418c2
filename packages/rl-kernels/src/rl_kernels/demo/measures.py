"""What is measured of two sets of log-probabilities, of the policy that sampled and of the one that is trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rl_kernels.demo.bits import different
from rl_kernels.grpo_loss import group_advantages


@dataclass(frozen=True)
class Gap:
    """How the log-probabilities of a rollout differ from those of a training pass with the same weights.

    Attributes:
        tokens: compared.
        mismatches: tokens that differ in any bit.
        kl: of training from rollout, see ``kl``.
        largest: largest ``|ratio - 1|``, the ratio of training to rollout in FP64; 0 only if no token differs.
    """

    tokens: int
    mismatches: int
    kl: float
    largest: float


def gap(rollout: torch.Tensor, training: torch.Tensor, mask: torch.Tensor) -> Gap:
    """Return the gap between two sets of FP32 log-probabilities where ``mask`` is true; all ``[B, T]``."""
    rollout, training = rollout[mask], training[mask]
    ratio = (training.double() - rollout.double()).expm1()
    mismatches = int(different(rollout, training).sum())
    return Gap(len(rollout), mismatches, kl(rollout, training), float(ratio.abs().max()))


def clip_fraction(
    current: torch.Tensor,
    old: torch.Tensor,
    rewards: torch.Tensor,
    mask: torch.Tensor,
    *,
    samples_per_prompt: int,
    clip_eps: float,
) -> float:
    """Return the share of the tokens whose ratio is clipped; all ``[B, T]`` but ``rewards [B]``."""
    advantages = group_advantages(rewards, samples_per_prompt=samples_per_prompt)[:, None]
    ratio = (current - old).exp()
    above = (ratio > 1 + clip_eps) & (advantages > 0)
    below = (ratio < 1 - clip_eps) & (advantages < 0)
    return float((above | below)[mask].float().mean())


def kl(rollout: torch.Tensor, training: torch.Tensor) -> float:
    """Return the KL divergence of the training policy from the one that sampled, nats a token, from ``[N]`` tokens.

    The mean of k3, ``r - 1 - log r`` with ``r`` the ratio of training to rollout: never negative, and 0 only if no
    token differs. In FP64, where what is left of the difference is no rounding.
    """
    log_ratio = training.double() - rollout.double()
    return float((log_ratio.expm1() - log_ratio).mean())
