"""Cases of the objectives: every loss type, level and option is in some case; and the tensors they need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rl_kernels.core.testing import Case, Draw, Inputs

FROM = "grpo_loss_from_advantages"
GROUPS = "group_advantages"
KEYWORDS = (
    *("loss_type", "clip_low", "clip_high", "delta", "dual_clip", "cispo_floor", "cispo_cap", "importance_level"),
    *("sapo_temperature_pos", "sapo_temperature_neg"),
    *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    *("kl_estimator", "kl_correction", "rollout_mode", "rollout_min", "rollout_max"),
    *("max_completion_length", "return_metrics", "advantage_estimator", "eps_placement", "skip_nan"),
)
"""Options of a case that become keyword arguments unchanged."""
SEQUENCE = {"importance_level": "sequence"}
RANGE: dict[str, Any] = {"rollout_min": 0.5, "rollout_max": 1.5}
LARGE = {"noise": 0.8, "density": 0.7}
"""Ratios on both sides of every bound."""
CORRECTED = {"beta": 0.2, "kl_correction": True}
VESPO = {"vespo_k_pos": 1.5, "vespo_lambda_pos": 2.0, "vespo_k_neg": 2.5, "vespo_lambda_neg": 1.5}
GATES = {"sapo_temperature_pos": 0.7, "sapo_temperature_neg": 1.6}
ALL_OF_IT = {"return_metrics": True, "entropy": True}


def _loss(name: str, loss_type: str, *options: Mapping[str, Any], function: str = "", **more: Any) -> Case:
    sizes = {"prompts": 2, "samples": 4, "completion": 11}
    merged = {key: value for part in options for key, value in part.items()}
    return Case(name, sizes, {"loss_type": loss_type, **LARGE, **merged, **more}, function)


def _groups(name: str, **options: Any) -> Case:
    return Case(f"groups-{name}", {"prompts": 5, "samples": 4}, {"offset": 100.0, **options}, GROUPS)


OBJECTIVES = (
    _loss("grpo", "grpo", beta=0.1, clip_low=0.1, clip_high=0.3, masked_sequence=True),
    _loss("grpo-of-sequences", "grpo", SEQUENCE, CORRECTED, delta=1.4, function=FROM, masked_sequence=True),
    _loss("bnpo-two-sided", "bnpo", delta=1.1, function=FROM, clip_low=0.3, clip_high=0.4, noise=0.3, per_token=True),
    _loss("bnpo-of-sequences", "bnpo", SEQUENCE, ALL_OF_IT, function=FROM, beta=0.1, per_token=True, rollout="token"),
    _loss("dr-grpo", "dr_grpo", advantage_estimator="none", max_completion_length=16, sequences=24.0),
    _loss("dr-grpo-of-its-length", "dr_grpo", function=FROM, max_completion_length=9, sequences=torch.float32),
    _loss("dapo", "dapo", clip_low=0.2, clip_high=0.28, tokens=torch.int64, advantage_estimator="sample"),
    _loss("dapo-beside-others", "dapo", function=FROM, tokens=200.5),
    _loss("luspo", "luspo", SEQUENCE, function=FROM, beta=0.05, sequences=torch.float32, kl_estimator="k1"),
    _loss("luspo-a-token", "luspo", delta=1.3, clip_low=0.05),
    _loss("cispo", "cispo", ALL_OF_IT, cispo_floor=0.8, cispo_cap=1.2, rollout="token", rollout_mode="mask", **RANGE),
    _loss("cispo-of-sequences", "cispo", SEQUENCE, ALL_OF_IT, function=FROM, cispo_floor=0.9, cispo_cap=1.1),
    _loss(
        "cispo-packed", "cispo", function=FROM, packed=True, max_seqlen=11, cispo_cap=1.3, tokens=70, rollout="sequence"
    ),
    _loss("sapo", "sapo", GATES, CORRECTED),
    _loss("sapo-of-sequences", "sapo", SEQUENCE, function=FROM, sapo_temperature_pos=2.0, sapo_temperature_neg=0.5),
    _loss("vespo", "vespo", VESPO, SEQUENCE, noise=0.1, rollout="token", beta=0.1),
    _loss(
        "vespo-of-sequences", "vespo", VESPO, function=FROM, noise=0.1, rollout="sequence", rollout_mode="mask", **RANGE
    ),
    _loss("gspo", "gspo", CORRECTED, ALL_OF_IT, clip_low=0.03, clip_high=0.04, sequences=9.0),
    _loss("gspo-a-token", "gspo", function=FROM, per_token=True, rollout="sequence", rollout_mode="truncate", **RANGE),
    _loss("ppo", "ppo", ALL_OF_IT, dual_clip=1.5, beta=0.3, kl_estimator="k2", eps_placement="add", eps=1e-4),
    _loss("ppo-a-token", "ppo", CORRECTED, function=FROM, dual_clip=1.3, per_token=True, kl_estimator="k2"),
    _loss(
        "reinforce", "reinforce", CORRECTED, kl_estimator="k1", rollout="sequence", advantage_estimator="leave_one_out"
    ),
    _loss(
        "missing-rewards", "grpo", {"missing": 3, "skip_nan": True}, advantage_estimator="batch", eps_placement="add"
    ),
    _loss("packed", "grpo", CORRECTED, ALL_OF_IT, packed=True, max_seqlen=12),
    _loss(
        "packed-a-token", "bnpo", SEQUENCE, function=FROM, packed=True, per_token=True, rollout="token", max_seqlen=11
    ),
    _groups("sample", advantage_estimator="sample", eps_placement="add", eps=1e-4),
    _groups("leave-one-out", advantage_estimator="leave_one_out", missing=3, skip_nan=True),
    _groups("no-scale", advantage_estimator="none", group_sizes=(1, 4, 2)),
    _groups("batch", advantage_estimator="batch", missing=4, skip_nan=True, eps_placement="add", eps=1e-4),
)


def extras(options: Mapping[str, Any], call: Inputs, draw: Draw) -> Inputs:
    """Return the tensors that the options of a case need."""
    shape, tensors = call["current_logps"].shape, {}
    if "rollout" in options:
        tensors["rollout_ratio"] = draw.uniform(0.3, 2.0, *(shape if options["rollout"] == "token" else shape[:1]))
    if options.get("entropy"):
        tensors["entropy"] = draw.uniform(0.0, 3.0, *shape)
    for name in ("tokens", "sequences"):
        value = options.get(name)
        if isinstance(value, torch.dtype):
            value = torch.tensor(draw.integer(100, 200), dtype=value, device=draw.device)
        if value is not None:
            tensors[f"num_{name}"] = value
    if "max_seqlen" in options:
        tensors["max_seqlen"] = options["max_seqlen"]
    return tensors


def pack(call: Inputs, draw: Draw, offsets_dtype: torch.dtype) -> Inputs:
    """Return the call with packed sequences of different lengths, one of them empty, masked tokens included."""
    batch, length = call["current_logps"].shape
    lengths = torch.tensor([(5 * i + length) % (length + 1) for i in range(batch)])[draw.permutation(batch)]
    inside = (torch.arange(length) < lengths[:, None]).to(call["current_logps"].device)
    packed = {
        name: value[inside]
        for name, value in call.items()
        if isinstance(value, torch.Tensor) and value.shape == inside.shape
    }
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    return {**call, **packed, "cu_seqlens": offsets.to(call["current_logps"].device, offsets_dtype)}
