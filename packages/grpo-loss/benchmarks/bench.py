"""grpo_loss beside plain PyTorch: `python packages/grpo-loss/benchmarks/bench.py --help`."""

import sys

import torch

from rl_kernels.core.bench import main
from rl_kernels.core.testing import Case
from rl_kernels.grpo_loss import GRPOLossOutput
from rl_kernels.grpo_loss.op import OPERATOR

CASES = (
    Case("demo", {"prompts": 8, "samples": 8, "completion": 64}, {"beta": 0.04, "density": 0.7}),
    Case("long", {"prompts": 16, "samples": 8, "completion": 1024}, {"beta": 0.04, "density": 0.7}),
    Case("large batch", {"prompts": 64, "samples": 16, "completion": 1024}, {"beta": 0.04, "density": 0.7}),
)


def eager(
    current_logps: torch.Tensor,
    old_logps: torch.Tensor,
    ref_logps: torch.Tensor,
    rewards: torch.Tensor,
    completion_mask: torch.Tensor,
    *,
    samples_per_prompt: int,
    beta: float,
    clip_eps: float = 0.2,
) -> GRPOLossOutput:
    """Compute the loss as trainers write it, with no regard for small e, NaN under the mask or offsets of rewards."""
    groups = rewards.view(-1, samples_per_prompt)
    scale = groups.std(1, correction=0, keepdim=True).clamp(min=1e-6)
    advantages = ((groups - groups.mean(1, keepdim=True)) / scale).view(-1, 1)
    ratio = (current_logps - old_logps).exp()
    policy = -torch.min(ratio * advantages, ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages)
    e = ref_logps - current_logps
    k3 = e.exp() - e - 1
    count = completion_mask.sum().clamp(min=1)
    policy_loss, kl = ((term * completion_mask).sum() / count for term in (policy, k3))
    return GRPOLossOutput(policy_loss + beta * kl, policy_loss.detach(), kl.detach())


if __name__ == "__main__":
    sys.exit(main(OPERATOR, CASES, {"eager": eager}))
