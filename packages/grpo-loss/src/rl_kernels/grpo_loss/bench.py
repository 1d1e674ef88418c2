"""The benchmark of grpo_loss: shapes, the bytes that must move, and the peers."""

from __future__ import annotations

import torch

from rl_kernels.core.bench.definition import (
    GOALS,
    SMALL,
    Benchmark,
    Pass,
    Shape,
    Work,
    compiled,
    forward_and_backward,
    plain,
)
from rl_kernels.core.testing import Case
from rl_kernels.grpo_loss.outputs import GRPOLossOutput

COMPILE = frozenset({"compile"})
SETS = {
    GOALS: (
        Shape((64, 8, 512)),
        Shape((128, 8, 1024)),
        Shape((256, 16, 1024)),
        Shape((512, 16, 4096)),
        Shape((1, 8, 1), note="one token", without=COMPILE),
        Shape((61, 7, 1013), note="ragged", without=COMPILE),
        Shape((128, 8, 1024), {"density": 0.5}, "half masked", without=COMPILE),
        Shape((128, 8, 1024), {"beta": 0.0, "ref": None}, "no KL", without=COMPILE),
    ),
    SMALL: (
        Shape((8, 8, 64), without=COMPILE),
        Shape((16, 8, 1024), without=COMPILE),
        Shape((64, 16, 1024), without=COMPILE),
        Shape((5, 3, 77), {"density": 0.5}, "ragged, half masked", without=COMPILE),
    ),
}


def eager(
    current_logps: torch.Tensor,
    old_logps: torch.Tensor,
    ref_logps: torch.Tensor | None,
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
    count = completion_mask.sum().clamp(min=1)
    policy_loss = (policy * completion_mask).sum() / count
    if ref_logps is None:
        return GRPOLossOutput(policy_loss, policy_loss.detach(), torch.zeros_like(policy_loss).detach())
    e = ref_logps - current_logps
    kl = ((e.exp() - e - 1) * completion_mask).sum() / count
    return GRPOLossOutput(policy_loss + beta * kl, policy_loss.detach(), kl.detach())


def passes(shape: Shape, itemsize: int) -> dict[str, Pass]:
    """Read each token's log-probabilities and mask; for the gradient write it, then read and write it to scale it."""
    prompts, samples, length = shape.sizes
    sizes = {"prompts": prompts, "samples": samples, "completion": length}
    case = Case(shape.label, sizes, {"beta": 0.04, **shape.options})
    tokens, policies = prompts * samples * length, 2 if "ref" in shape.options else 3
    forward = tokens * (policies * itemsize + 1)
    return forward_and_backward(case, Work(forward), Work(forward + 3 * tokens * itemsize))


BENCH = Benchmark(
    shape=("P", "S", "T"),
    sets=SETS,
    passes=passes,
    peers={"eager": plain(eager, "mean over tokens, as trainers write it"), "compile": compiled(eager)},
    dtype="fp32",
)
