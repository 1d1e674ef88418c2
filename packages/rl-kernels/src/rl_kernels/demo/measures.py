"""What is measured of a rollout and of the training pass with the same weights, and how a run is judged by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rl_kernels.grpo_loss import group_advantages

MARGIN = 0.5
"""By how much the mean reward, which lies between 0 and 1, must have risen."""


@dataclass(frozen=True, kw_only=True)
class Gap:
    """How log-probabilities of a rollout differ from those of a training pass with the same weights."""

    tokens: int
    mismatches: int  # tokens that differ in any bit
    kl: float  # of training from rollout, nats a token: the mean of k3, r - 1 - log r with r their ratio in FP64
    largest: float  # largest |r - 1|; like kl it is 0 only if no token differs
    ratios_off: int | None = None  # tokens whose ratio is not 1 in FP32, as in a loss; None in records of FP32 copies


def different(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Say for each element of two FP32 tensors of one shape whether any bit differs; those of +0 and -0 do."""
    return a.detach().contiguous().view(torch.int32) != b.detach().contiguous().view(torch.int32)


def gap(rollout: torch.Tensor, training: torch.Tensor) -> Gap:
    """Return the gap between two sets of FP32 log-probabilities ``[N]``."""
    log_ratio = training.double() - rollout.double()
    return Gap(
        tokens=len(rollout),
        mismatches=int(different(rollout, training).sum()),
        kl=float((log_ratio.expm1() - log_ratio).mean()),
        largest=float(log_ratio.expm1().abs().max()),
        ratios_off=int(((training - rollout).exp() != 1).sum()),
    )


def clip_fraction(
    current: torch.Tensor, old: torch.Tensor, rewards: torch.Tensor, mask: torch.Tensor, samples: int, eps: float
) -> float:
    """Return the share of the tokens whose ratio is clipped; all ``[B, T]`` but ``rewards [B]``."""
    advantages = group_advantages(rewards, samples_per_prompt=samples)[:, None]
    ratio = (current - old).exp()
    clipped = ((ratio > 1 + eps) & (advantages > 0)) | ((ratio < 1 - eps) & (advantages < 0))
    return float(clipped[mask].float().mean())


@dataclass(frozen=True)
class Verdict:
    """What a run showed."""

    first_reward: float  # mean of the first tenth of the steps
    last_reward: float
    compared: int  # tokens that were compared through the operators
    mismatches: int
    enough: bool  # whether the run was long enough for its reward to be judged

    @property
    def risen(self) -> bool:
        """Whether the reward has risen by the margin."""
        return self.last_reward >= self.first_reward + MARGIN

    @property
    def passed(self) -> bool:
        """Whether no bit differed, and the reward has risen if it is judged."""
        return (self.risen or not self.enough) and self.mismatches == 0


def judge(rewards: Sequence[float], compared: Sequence[Gap], needed: int) -> Verdict:
    """Judge a run by all comparisons through the operators, and by its rewards if it has the ``needed`` steps."""
    window = max(1, len(rewards) // 10)
    first, last = (sum(part) / window for part in (rewards[:window], rewards[-window:]))
    tokens, mismatches = (sum(getattr(each, name) for each in compared) for name in ("tokens", "mismatches"))
    return Verdict(first, last, tokens, mismatches, len(rewards) >= needed)
