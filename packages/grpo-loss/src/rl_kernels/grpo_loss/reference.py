"""The definition of the losses in plain PyTorch; with FP64 inputs it is the gold result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from rl_kernels.grpo_loss.outputs import GRPOLossOutput, LossAndMetrics

__all__ = ["group_advantages", "grpo_loss", "grpo_loss_from_advantages"]

PER_SEQUENCE = ("grpo", "sapo", "gspo")
"""Loss types that average the mean of each sequence."""
SUMS = ("dr_grpo", "luspo")
"""Loss types that average the sum of each sequence; dr_grpo also divides it by a length."""
SMALLEST, LARGEST = math.log(1e-8), 20.0
"""Bounds of the log-weight of a sequence in vespo."""


def group_advantages(
    rewards: torch.Tensor,
    *,
    samples_per_prompt: int | None = None,
    group_boundaries: Sequence[int] | torch.Tensor | None = None,
    eps: float = 1e-6,
    advantage_estimator: str = "population",
    eps_placement: str = "max",
    skip_nan: bool = False,
) -> torch.Tensor:
    """Return the advantage ``[B]`` of each reward in its group; 0 if all rewards of the group are equal."""
    # FP64: with rewards around 10,000, the error of an FP32 mean is larger than the tolerance of advantages.
    r = rewards.double()
    if samples_per_prompt is not None:
        group_boundaries = range(0, len(r) + 1, samples_per_prompt)
    assert group_boundaries is not None
    present = ~r.isnan() if skip_nan else torch.ones_like(r, dtype=torch.bool)
    whole = r[present].std(correction=1) if advantage_estimator == "batch" and int(present.sum()) > 1 else None
    out = torch.zeros_like(r)
    for start, end in pairwise(int(offset) for offset in group_boundaries):
        here = present[start:end]
        if here.any():
            part = _group(r[start:end][here], advantage_estimator, eps_placement, eps, whole)
            out[start:end] = out[start:end].masked_scatter(here, part)
    return out.to(wide(rewards))


def _group(r: torch.Tensor, estimator: str, placement: str, eps: float, whole: torch.Tensor | None) -> torch.Tensor:
    # The mean of seven times 0.1 is not 0.1, so equal rewards are detected by comparison.
    if bool((r == r[0]).all()):
        return torch.zeros_like(r)
    centered = r - r.mean()
    if estimator == "none":
        return centered
    if estimator == "leave_one_out":
        return centered * len(r) / (len(r) - 1)
    std = whole if whole is not None else r.std(correction=0 if estimator == "population" else 1)
    return centered / (std.clamp(min=eps) if placement == "max" else std + eps)


def grpo_loss(
    current_logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    ref_logps: torch.Tensor | None,
    rewards: torch.Tensor,
    completion_mask: torch.Tensor,
    *,
    samples_per_prompt: int | None = None,
    group_boundaries: Sequence[int] | torch.Tensor | None = None,
    advantage_estimator: str = "population",
    eps: float = 1e-6,
    eps_placement: str = "max",
    skip_nan: bool = False,
    **options: Any,
) -> GRPOLossOutput | LossAndMetrics:
    """Return the loss with advantages from the rewards of each group; see ``grpo_loss_from_advantages``."""
    advantages = group_advantages(
        rewards.double() if current_logps.dtype == torch.float64 else rewards,
        samples_per_prompt=samples_per_prompt,
        group_boundaries=group_boundaries,
        eps=eps,
        advantage_estimator=advantage_estimator,
        eps_placement=eps_placement,
        skip_nan=skip_nan,
    )
    return grpo_loss_from_advantages(current_logps, old_logps, ref_logps, advantages, completion_mask, **options)


def grpo_loss_from_advantages(
    current_logps: torch.Tensor,
    old_logps: torch.Tensor | None,
    ref_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    completion_mask: torch.Tensor,
    *,
    loss_type: str = "dapo",
    beta: float = 0.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    delta: float | None = None,
    dual_clip: float | None = None,
    cispo_floor: float = 0.0,
    cispo_cap: float = 5.0,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    importance_level: str | None = None,
    kl_estimator: str = "k3",
    kl_correction: bool = False,
    rollout_mode: str | None = None,
    rollout_min: float | None = None,
    rollout_max: float | None = None,
    clip_eps: float | None = None,
    rollout_ratio: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    num_tokens: float | torch.Tensor | None = None,
    num_sequences: float | torch.Tensor | None = None,
    max_completion_length: int | None = None,
    return_metrics: bool = False,
    **advantage_options: Any,
) -> GRPOLossOutput | LossAndMetrics:
    """Return the mean of the policy term of a loss type, plus ``beta`` times the mean of a KL estimate.

    Shapes and options as in the public function; advantage options are accepted and ignored. Computed in FP32, or FP64
    if current_logps is FP64.
    """
    if cu_seqlens is not None:
        layout = Padding(cu_seqlens, max_seqlen)
        tensors = (current_logps, old_logps, ref_logps, entropy)
        current_logps, old_logps, ref_logps, entropy = (layout.padded(x) for x in tensors)  # type: ignore[assignment]
        advantages, rollout_ratio = layout.scores(advantages), layout.scores(rollout_ratio)  # type: ignore[assignment]
        completion_mask = layout.padded(completion_mask) * layout.inside  # type: ignore[operator]
    dtype = wide(current_logps)
    mask = completion_mask.bool()
    a = (advantages if advantages.ndim == 2 else advantages[:, None]).to(dtype).expand(mask.shape)
    current = current_logps.to(dtype)
    old = current.detach() if old_logps is None else old_logps.to(dtype)
    low, high = (clip_low, clip_high) if clip_eps is None else (clip_eps, clip_eps)

    # Masked before any exponential: an overflow there would reach the gradient as 0 * inf.
    tokens = mask.sum(1, keepdim=True).clamp(min=1)
    counted = mask & (a != 0)
    d = torch.where(mask, current - old, 0)
    if importance_level == "sequence" or (loss_type == "gspo" and importance_level is None):
        kl_ratio = (d.sum(1, keepdim=True) / tokens).exp().expand(mask.shape)
        ratio = torch.where(counted, kl_ratio, 1)
    else:
        kl_ratio = d.exp()
        ratio = torch.where(counted, d, 0).exp()
    weight = torch.ones((), dtype=dtype, device=mask.device)
    if rollout_ratio is not None:
        per_token = rollout_ratio if rollout_ratio.ndim == 2 else rollout_ratio[:, None]
        least, most = rollout_min or 0.0, math.inf if rollout_max is None else rollout_max
        weight = _rollout_weight(per_token.to(dtype), rollout_mode, least, most)

    logp = torch.where(counted, current, 0)
    if loss_type == "cispo":
        term = -ratio.clamp(cispo_floor, cispo_cap).detach() * a * logp
    elif loss_type == "reinforce":
        term = -a * logp
    elif loss_type == "sapo":
        tau = torch.full_like(a, sapo_temperature_neg).masked_fill(a > 0, sapo_temperature_pos)
        term = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * a
    elif loss_type == "vespo":
        log_weight = torch.where(mask, d.detach().clamp(-LARGEST, LARGEST), 0).sum(1, keepdim=True)
        if rollout_ratio is not None:
            log_rollout = weight.log().clamp(SMALLEST, LARGEST)
            is_per_token = rollout_ratio.ndim == 2
            log_weight = log_weight + (
                torch.where(mask, log_rollout, 0).sum(1, keepdim=True) if is_per_token else log_rollout
            )
        log_weight = log_weight.clamp(SMALLEST, LARGEST)
        k = torch.full_like(a, vespo_k_neg).masked_fill(a >= 0, vespo_k_pos)
        lam = torch.full_like(a, vespo_lambda_neg).masked_fill(a >= 0, vespo_lambda_pos)
        term = -(lam + k * log_weight - lam * log_weight.exp()).exp() * a * logp
    else:
        bounded = ratio if delta is None else ratio.clamp(max=delta)
        unclipped, clipped = -bounded * a, -ratio.clamp(1 - low, 1 + high) * a
        term = torch.where(clipped > unclipped, clipped, unclipped)
        if dual_clip is not None:
            term = torch.where((a < 0) & (term > -dual_clip * a), -dual_clip * a, term)
    if rollout_ratio is not None and loss_type != "vespo":
        term = term * weight

    def divisor_of(count: float | torch.Tensor) -> torch.Tensor:
        # Where no token is active the count may be 0, and the loss is 0.
        return torch.where(mask.any(), torch.as_tensor(count, dtype=dtype, device=mask.device), 1)

    def aggregate(values: torch.Tensor) -> torch.Tensor:
        if loss_type in (*PER_SEQUENCE, *SUMS):
            count = max(len(mask), 1) if num_sequences is None else divisor_of(num_sequences)
            if loss_type == "dr_grpo":
                count = count * (max(mask.shape[1], 1) if max_completion_length is None else max_completion_length)
            per_sequence = values.sum(1, keepdim=True) / (1 if loss_type in SUMS else tokens)
            return per_sequence.sum() / count
        return values.sum() / (mask.sum().clamp(min=1) if num_tokens is None else divisor_of(num_tokens))

    policy_loss = aggregate(torch.where(counted, term, 0))
    loss, kl = policy_loss, torch.zeros_like(policy_loss)
    e = None
    if beta != 0 and ref_logps is not None:
        e = torch.where(mask, ref_logps.to(dtype) - current, 0)
        estimate = {"k1": -e, "k2": e.square() / 2, "k3": e.expm1() - e}[kl_estimator]
        kl = aggregate(torch.where(mask, estimate * kl_ratio if kl_correction else estimate, 0))
        loss = policy_loss + beta * kl
    output = GRPOLossOutput(loss, policy_loss.detach(), kl.detach())
    if not return_metrics:
        return output
    bounds = (1 - low, 1 + high) if loss_type not in ("cispo", "sapo", "vespo", "reinforce") else (0.0, math.inf)
    is_high = (kl_ratio > cispo_cap) if loss_type == "cispo" else (kl_ratio > bounds[1]) & (a > 0)
    is_low = (kl_ratio < cispo_floor) if loss_type == "cispo" else (kl_ratio < bounds[0]) & (a < 0)
    logps = [
        x for x in (current, None if old_logps is None else old, None if e is None else ref_logps) if x is not None
    ]
    values = _metrics(mask, is_low, is_high, kl_ratio.detach(), e, logps, entropy)
    return LossAndMetrics(output, values)


def _rollout_weight(ratio: torch.Tensor, mode: str | None, least: float, most: float) -> torch.Tensor:
    if mode == "mask":
        return torch.where((ratio < least) | (ratio > most), 0, ratio)
    return ratio.clamp(least, most) if mode == "truncate" else ratio


def _metrics(
    mask: torch.Tensor,
    is_low: torch.Tensor,
    is_high: torch.Tensor,
    ratio: torch.Tensor,
    e: torch.Tensor | None,
    logps: list[torch.Tensor],
    entropy: torch.Tensor | None,
) -> torch.Tensor:
    """Return the metrics in the order of ``METRICS``, over active tokens; 0 if their tensor is not given."""
    count = mask.sum().clamp(min=1)
    dtype, missing = ratio.dtype, ratio.new_zeros(())

    def mean(values: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, values.to(dtype), 0).sum() / count

    is_number, infinity = mask & ~ratio.isnan(), ratio.new_full((1,), torch.inf)
    least = torch.cat((torch.where(is_number, ratio, torch.inf).flatten(), infinity)).amin()
    most = torch.cat((torch.where(is_number, ratio, -torch.inf).flatten(), -infinity)).amax()
    smallest, largest = (torch.where(mask.any(), x, 0) for x in (least, most))
    total, squares = mean(ratio), mean(ratio.square())
    nonfinite = mask & ~torch.stack([x.isfinite() for x in logps]).all(0)
    values = [mean(is_low), mean(is_high), total, smallest, largest]
    e = None if e is None else e.detach()
    values += [missing] * 3 if e is None else [mean(-e), mean(e.square() / 2), mean(e.expm1() - e)]
    values += [total.square() / torch.where(squares == 0, 1, squares) * count, nonfinite.sum().to(dtype)]
    values.append(missing if entropy is None else mean(entropy))
    return torch.stack(values).float()


class Padding:
    """Turns packed tokens ``[total]`` into ``[B, T]``; ``inside`` marks the positions that hold a token."""

    def __init__(self, cu_seqlens: torch.Tensor, max_seqlen: int | None) -> None:
        self.total = int(cu_seqlens[-1])
        start, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
        length = max_seqlen if max_seqlen is not None else int(max([0, *(end - start).tolist()]))
        index = start[:, None] + torch.arange(length, device=cu_seqlens.device)
        self.inside = index < end[:, None]
        self.index = torch.where(self.inside, index, 0)

    def padded(self, values: torch.Tensor | None) -> torch.Tensor | None:
        """Return per-token values as ``[B, T]``, zero outside the sequences."""
        if values is None or not self.total:
            return None if values is None else values.new_zeros(self.index.shape) + values.sum()
        return torch.where(self.inside, values[self.index], 0).to(values.dtype)

    def scores(self, values: torch.Tensor | None) -> torch.Tensor | None:
        """Return per-sequence values unchanged, and per-token values as ``[B, T]``."""
        return values if values is None or values.shape[0] == len(self.index) else self.padded(values)


def wide(value: torch.Tensor) -> torch.dtype:
    """Return FP64 for FP64, otherwise FP32."""
    return torch.float64 if value.dtype == torch.float64 else torch.float32
