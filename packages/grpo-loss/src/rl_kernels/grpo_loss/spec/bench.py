"""The benchmark of grpo_loss: shapes, minimum bytes moved, and peers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from rl_kernels.core.command import number
from rl_kernels.core.testing import Case
from rl_kernels.grpo_loss.outputs import GRPOLossOutput
from rl_kernels.lab.bench.definition import (
    GOALS,
    HOST,
    SMALL,
    Benchmark,
    Option,
    Pass,
    Shape,
    Work,
    compiled,
    forward_and_backward,
    plain,
)

COMPILE = frozenset({"compile"})
OBJECTIVES = "objectives"
LEVEL: dict[str, object] = {"importance_level": "sequence"}
TYPES: dict[str, dict[str, object]] = {
    **{name: {} for name in ("bnpo", "grpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")},
    **{name: LEVEL for name in ("luspo", "gspo")},
}
"""Loss types of trainers, each at its intended importance level."""
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
    HOST: (Shape((1, 8, 16)),),
    SMALL: (
        Shape((8, 8, 64), without=COMPILE),
        Shape((16, 8, 1024), without=COMPILE),
        Shape((64, 16, 1024), without=COMPILE),
        Shape((5, 3, 77), {"density": 0.5}, "ragged, half masked", without=COMPILE),
    ),
    OBJECTIVES: tuple(
        Shape(size, {"loss_type": name, "kl_correction": True, **options}, name)
        for size in ((256, 16, 1024), (512, 16, 4096))
        for name, options in TYPES.items()
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
    loss_type: str = "dapo",
    importance_level: str = "token",
    kl_correction: bool = False,
) -> GRPOLossOutput:
    """Return the loss as trainers write it; inaccurate for small e, NaN under the mask and offsets of rewards."""
    groups = rewards.view(-1, samples_per_prompt)
    scale = groups.std(1, correction=0, keepdim=True).clamp(min=1e-6)
    advantages = ((groups - groups.mean(1, keepdim=True)) / scale).view(-1, 1)
    d, tokens = current_logps - old_logps, completion_mask.sum(1, keepdim=True).clamp(min=1)
    log_ratio = (d * completion_mask).sum(1, keepdim=True) / tokens if importance_level == "sequence" else d
    ratio = log_ratio.exp()
    policy = -_weighted(ratio, d, advantages, current_logps, completion_mask, loss_type, clip_eps)

    def mean(values: torch.Tensor) -> torch.Tensor:
        masked = values * completion_mask
        if loss_type in ("grpo", "gspo", "sapo"):
            return (masked.sum(1, keepdim=True) / tokens).mean()
        if loss_type in ("dr_grpo", "luspo"):
            return masked.sum() / (len(masked) * (masked.shape[1] if loss_type == "dr_grpo" else 1))
        return masked.sum() / completion_mask.sum().clamp(min=1)

    policy_loss = mean(policy)
    if ref_logps is None:
        return GRPOLossOutput(policy_loss, policy_loss.detach(), torch.zeros_like(policy_loss).detach())
    e = ref_logps - current_logps
    k3 = e.exp() - e - 1
    kl = mean(k3 * ratio if kl_correction else k3)
    return GRPOLossOutput(policy_loss + beta * kl, policy_loss.detach(), kl.detach())


def _weighted(
    ratio: torch.Tensor,
    d: torch.Tensor,
    a: torch.Tensor,
    logps: torch.Tensor,
    mask: torch.Tensor,
    loss_type: str,
    clip_eps: float,
) -> torch.Tensor:
    """Return the per-token objective that a trainer maximizes, with the default constants of ``Objective``."""
    if loss_type == "cispo":
        return ratio.clamp(max=5.0).detach() * a * logps
    if loss_type == "sapo":
        tau = torch.where(a > 0, 1.0, 1.05)
        return torch.sigmoid(tau * (ratio - 1)) * 4 / tau * a
    if loss_type == "vespo":
        log_w = (d.detach().clamp(-20, 20) * mask).sum(1, keepdim=True).clamp(-18.420680744, 20)
        k, decay = torch.where(a >= 0, 2.0, 3.0), torch.where(a >= 0, 3.0, 2.0)
        return (decay + k * log_w - decay * log_w.exp()).exp() * a * logps
    return torch.min(ratio * a, ratio.clamp(1 - clip_eps, 1 + clip_eps) * a)


def with_beta(options: Mapping[str, Any], beta: float) -> Mapping[str, Any]:
    """Return the options of a case with this weight of the KL; with 0, ``ref`` is None and no reference is read."""
    without_ref = {name: value for name, value in options.items() if name != "ref"}
    return {**without_ref, "beta": beta, **({} if beta else {"ref": None})}


def passes(shape: Shape, itemsize: int) -> dict[str, Pass]:
    """Return the work of each pass: forward reads tokens and mask; the gradient is written, then read and scaled."""
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
    options={
        "clip_eps": Option(number(least=0), "half-width of the clipping range; sets clip_low and clip_high"),
        "clip_low": Option(number(least=0), "how far below 1 the ratio is clipped"),
        "clip_high": Option(number(least=0), "how far above 1 the ratio is clipped"),
        "beta": Option(number(least=0), "weight of the KL; 0 leaves out the reference policy", with_beta),
        "eps": Option(number(above=0), "least standard deviation of a group"),
        "delta": Option(number(above=0), "cap of the ratio in the unclipped branch, for types that clip"),
    },
    tokens=lambda shape: math.prod(shape.sizes),
)
