"""Bounds of the rounding error of a case, for the checker: sums of the magnitudes of the terms, in FP64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from rl_kernels.core.testing import Case, Inputs
from rl_kernels.grpo_loss import reference
from rl_kernels.grpo_loss.call import FORMS, Numbers
from rl_kernels.grpo_loss.outputs import METRICS
from rl_kernels.grpo_loss.reference import Padding

GRADIENT = "gradient:current_logps"
SMALL = 0.06
"""|e| below which exp(e) - e - 1 must not be computed as a difference."""
ADVANTAGES = ("samples_per_prompt", "group_boundaries", "eps", "advantage_estimator", "eps_placement", "skip_nan")


class Tokens(NamedTuple):
    """Inputs of the terms, ``[B, T]``, 0 under the mask: advantages, log-ratios, the ratio and its error factor."""

    mask: torch.Tensor
    current: torch.Tensor
    a: torch.Tensor
    d: torch.Tensor
    e: torch.Tensor
    ratio: torch.Tensor
    growth: torch.Tensor
    weight: torch.Tensor


def magnitudes(case: Case, call: Inputs, upstream: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the magnitudes of the terms of each result, including the effect of rounding the exponents d and e."""
    a = call["advantages"] if "advantages" in call else _advantages(case, call)
    if case.function == "group_advantages":
        return {"advantages": a.abs()}
    x = _tokens(call, a)
    beta, form = call.get("beta", 0.0), FORMS[call.get("loss_type", "dapo")]
    count = x.mask.sum(1, keepdim=True).clamp(min=1) if form.mean == "sequences" else torch.ones_like(x.mask[:, :1])
    divisor = _divisor(call, x.mask, form.mean)
    policy, slope = _policy(call, x, form.kind)
    kl, kl_slope = _kl(call, x, case.dtype == "fp64")
    terms = {"policy_loss": (policy / count).sum() / divisor, "kl": (kl / count).sum() / divisor}
    terms["loss"] = terms["policy_loss"] + beta * terms["kl"]
    if call.get("return_metrics"):
        terms["metrics"] = _metrics(call, x)
    if "loss" in upstream:
        grad = (slope + beta * kl_slope) / count * upstream["loss"].abs() / divisor
        terms[GRADIENT] = grad if "cu_seqlens" not in call else grad[_padding(call).inside]
    return terms


def _advantages(case: Case, call: Inputs) -> torch.Tensor:
    """Return the advantages; for FP64 inputs, enlarged by the cancellation of rewards and their mean.

    Rewards of lower precision are centered in FP64, so their cancellation has no effect.
    """
    grouping = {name: call[name] for name in ADVANTAGES if name in call}
    a = reference.group_advantages(call["rewards"], **grouping)
    if case.dtype != "fp64":
        return a
    centered = reference.group_advantages(call["rewards"], **{**grouping, "advantage_estimator": "none"})
    return torch.where(a == 0, a, a * (1 + 2 * call["rewards"].nan_to_num().abs().max() / centered.abs()))


def _tokens(call: Inputs, a: torch.Tensor) -> Tokens:
    current, mask = call["current_logps"], call["completion_mask"]
    old, ref, weight = (call.get(name) for name in ("old_logps", "ref_logps", "rollout_ratio"))
    if "cu_seqlens" in call:
        layout = _padding(call)
        current, old, ref, mask = (layout.padded(x) for x in (current, old, ref, mask))
        a, weight = layout.scores(a), layout.scores(weight)  # type: ignore[assignment]
    mask = mask.bool()
    a = torch.where(mask, a if a.ndim == 2 else a[:, None], 0.0)
    weight = torch.ones_like(a) if weight is None else weight if weight.ndim == 2 else weight[:, None].expand(a.shape)
    least = call.get("rollout_min") or 0.0
    weight = weight.clamp(least, call.get("rollout_max") or torch.inf) if call.get("rollout_mode") else weight

    def exponent(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros_like(a) if left is None or right is None else torch.where(mask, left - right, 0.0)

    d = exponent(current, old)
    e = exponent(ref if call.get("beta") else None, current)
    if call.get("importance_level") == "sequence" or call.get("loss_type") == "gspo":
        tokens = mask.sum(1, keepdim=True).clamp(min=1)
        ratio = (d.sum(1, keepdim=True) / tokens).exp().expand(a.shape)
        growth = (d.abs().sum(1, keepdim=True) / tokens).expand(a.shape)
    else:
        # A = 0 contributes nothing at any ratio.
        d = torch.where(a == 0, 0.0, d) if not call.get("kl_correction") else d
        ratio, growth = d.exp(), d.abs()
    return Tokens(mask, torch.where(mask, current, 0.0), a, d, e, ratio, 1 + growth, torch.where(mask, weight, 0.0))


def _padding(call: Inputs) -> Padding:
    return Padding(call["cu_seqlens"], call.get("max_seqlen"))


def _policy(call: Inputs, x: Tokens, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    size, n = x.a.abs() * x.weight, Numbers()
    if kind == "vespo":
        logs = x.d.abs() + torch.where(x.mask & (x.weight > 0), x.weight.log(), 0.0).abs()
        growth = 1 + 10 * logs.sum(1, keepdim=True)
        return 20 * x.a.abs() * growth * x.current.abs(), 20 * x.a.abs() * growth
    if kind == "reinforce":
        return size * x.current.abs(), size
    whole = size * x.ratio * x.growth
    if kind == "cispo":
        whole = torch.minimum(whole, size * call.get("cispo_cap", n.cispo_cap) * x.growth)
        return whole * x.current.abs(), whole
    if kind == "sapo":
        least = min(call.get("sapo_temperature_pos", 1.0), call.get("sapo_temperature_neg", 1.0))
        return 4 * (size / least + whole), 4 * whole * (1 + x.ratio)
    width: float = call.get("clip_eps", 0.2)
    low: float = call.get("clip_low", width)
    high: float = call.get("clip_high", width)
    is_clipped = torch.where(x.a > 0, x.ratio > 1 + high, x.ratio < 1 - low)
    shared = call.get("importance_level") == "sequence" or call.get("loss_type") == "gspo"
    return whole, whole.sum(1, keepdim=True).expand(whole.shape) if shared else torch.where(is_clipped, 0.0, whole)


def _kl(call: Inputs, x: Tokens, as_gold: bool) -> tuple[torch.Tensor, torch.Tensor]:
    # Near 0, k3 is about e^2 / 2 and must be accurate relative to that, not to the much larger e.
    value = x.e.expm1().abs() * ((x.e.abs() / SMALL).clamp(max=1) + x.e.abs())
    slope = x.e.expm1().abs() + x.e.exp() * x.e.abs()
    if as_gold:
        # Autograd of the definition computes exp(e) - 1 as a difference, whose FP64 rounding error is visible here.
        slope = slope + 1 + x.e.exp()
    kind = call.get("kl_estimator", "k3")
    if kind != "k3":
        value = x.e.abs() if kind == "k1" else x.e.square()
        slope = torch.ones_like(x.e) if kind == "k1" else x.e.abs()
    if call.get("kl_correction"):
        value, slope = value * x.ratio * x.growth, (slope + x.e.abs() + value) * x.ratio * x.growth
        slope = slope.sum(1, keepdim=True).expand(slope.shape) if call.get("importance_level") == "sequence" else slope
    return torch.where(x.mask, value, 0.0), torch.where(x.mask, slope, 0.0)


def _divisor(call: Inputs, mask: torch.Tensor, mean: str) -> torch.Tensor:
    count_argument = call.get("num_tokens", call.get("num_sequences"))
    if mean == "tokens":
        return mask.sum().clamp(min=1) if count_argument is None else torch.as_tensor(count_argument)
    count = max(len(mask), 1) if count_argument is None else count_argument
    length = call.get("max_completion_length", mask.shape[1]) if call.get("loss_type") == "dr_grpo" else 1
    return torch.as_tensor(count * max(length, 1))


def _metrics(call: Inputs, x: Tokens) -> torch.Tensor:
    count, weighted = x.mask.sum().clamp(min=1), torch.where(x.mask, x.ratio * x.growth, 0.0)
    mean, most, e = weighted.sum() / count, weighted.max(), x.e.abs()
    k3 = (e.expm1() * (1 + e)).sum() / count
    entropy = call["entropy"].abs().max() if call.get("entropy") is not None else mean
    values = {"k1": e.sum() / count, "k2": e.square().sum() / count, "k3": k3, "entropy": entropy}
    values |= {
        "ratio_mean": mean,
        "ratio_min": most,
        "ratio_max": most,
        "effective_samples": 4 * count * x.growth.max(),
    }
    return torch.stack([values.get(name, torch.ones_like(mean)).double() for name in METRICS])
