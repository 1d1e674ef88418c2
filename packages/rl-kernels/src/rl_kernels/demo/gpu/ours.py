"""The twin through the operators: an invariant model, log-probabilities from hidden states, the fused loss."""

from __future__ import annotations

import torch
from torch import nn

from rl_kernels.demo.gpu.way import Way, race
from rl_kernels.demo.rollout import IGNORE
from rl_kernels.det_gemm import det_gemm
from rl_kernels.grpo_loss import grpo_loss
from rl_kernels.models import Invariance, head_logp, invariant


def taken(model: nn.Module) -> Invariance:
    """Make the model invariant until the end of the context; raise if a part of it cannot be."""
    return invariant(model, strict=True)


def draw(head: nn.Module, hidden: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from FP32 logits; take the log-probabilities as training does."""
    weight = head.weight
    assert isinstance(weight, torch.Tensor)
    ids = race(det_gemm(hidden, weight.t(), out_dtype=torch.float32), noise)
    return ids, logps(head, hidden, ids)


def logps(head: nn.Module, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of the targets; the logits are never held."""
    found = head_logp(head, hidden, targets, ignore_index=IGNORE, validate=False)
    assert isinstance(found, torch.Tensor)  # statistics come only when asked for
    return found


def loss(
    current: torch.Tensor,
    old: torch.Tensor,
    rewards: torch.Tensor,
    mask: torch.Tensor,
    samples_per_prompt: int,
    clip_eps: float,
) -> torch.Tensor:
    """Return the loss by ``grpo_loss``."""
    output = grpo_loss(current, old, None, rewards, mask, samples_per_prompt=samples_per_prompt, clip_eps=clip_eps)
    return output.loss


OURS = Way("rl-kernels", taken, draw, logps, loss)
