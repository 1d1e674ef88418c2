"""Calls with an illegal objective, rollout ratio, normalizer or packing, and part of their messages."""

from __future__ import annotations

import math
from typing import Any

import torch

from rl_kernels.core.testing import given
from rl_kernels.core.testing.spec import Change, Inputs
from rl_kernels.lab.check.illegal import Row


def _value(match: str, **options: Any) -> Row:
    return f"{options}", given(**options), ValueError, match


def _type(match: str, **options: Any) -> Row:
    return f"{options}", given(**options), TypeError, match


def _too_many(name: str, dims: int) -> Change:
    """Return a change that gives an argument one more sequence than the call has."""

    def change(inputs: Inputs) -> Inputs:
        logps = inputs["current_logps"]
        return {**inputs, name: logps.new_ones((len(logps) + 1, *logps.shape[1:])[:dims])}

    return change


def _packed(**changes: Any) -> Change:
    """Return a change that packs the sequences of a good call and applies the wrong values."""

    def change(inputs: Inputs) -> Inputs:
        batch, length = inputs["current_logps"].shape
        names = ("current_logps", "old_logps", "ref_logps", "completion_mask")
        tokens = {name: None if inputs[name] is None else inputs[name].reshape(-1) for name in names}
        offsets = torch.arange(0, batch * length + 1, length, device=inputs["current_logps"].device)
        replaced = {name: value(offsets) if callable(value) else value for name, value in changes.items()}
        return {**inputs, **tokens, "cu_seqlens": offsets, **replaced}

    return change


def _wrong_counts(name: str, **options: Any) -> list[Row]:
    """Return calls in which a count is a tensor with an illegal value; at least one token of the call is active."""
    values = {
        "a number >= 0": torch.tensor(-5),
        "a finite number": torch.tensor(math.nan),
        "a number within": torch.tensor(1e300, dtype=torch.float64),
        "a number > 0, at least": torch.tensor(1e-40),
        "a number > 0, because a token is active": torch.tensor(0),
    }
    return [
        (f"{name} {value}", _at_device(name, value, options), ValueError, f"{name}: expected {expectation}")
        for expectation, value in values.items()
    ]


def _at_device(name: str, value: torch.Tensor, options: dict[str, Any]) -> Change:
    return lambda inputs: {**inputs, **options, name: value.to(inputs["current_logps"].device)}


OFFSETS = "cu_seqlens: expected "
PACKING: list[Row] = [
    ("cu_seqlens a list", _packed(cu_seqlens=[0, 4]), TypeError, OFFSETS + "a tensor"),
    ("cu_seqlens of floats", _packed(cu_seqlens=lambda x: x.float()), TypeError, OFFSETS + "dtype"),
    ("cu_seqlens of two dims", _packed(cu_seqlens=lambda x: x[None]), ValueError, OFFSETS + "1 dims"),
    ("cu_seqlens empty", _packed(cu_seqlens=lambda x: x[:0]), ValueError, OFFSETS + "at least 1 offset"),
    ("cu_seqlens elsewhere", _packed(cu_seqlens=lambda x: x.to("meta")), ValueError, OFFSETS + "device"),
    ("cu_seqlens not from 0", _packed(cu_seqlens=lambda x: x + 1), ValueError, OFFSETS + "offsets that rise from 0"),
    ("cu_seqlens falling", _packed(cu_seqlens=lambda x: x.flip(0)), ValueError, OFFSETS + "offsets that rise from 0"),
    ("cu_seqlens of others", _packed(cu_seqlens=lambda x: 2 * x), ValueError, OFFSETS + "offsets that rise from 0"),
    (
        "cu_seqlens of two dims of tokens",
        given(cu_seqlens=torch.tensor([0])),
        ValueError,
        "current_logps: expected 1 dims",
    ),
    ("max_seqlen too small", _packed(max_seqlen=lambda x: int(x[1]) - 1), ValueError, "max_seqlen: expected at least "),
    ("max_seqlen negative", _packed(max_seqlen=-1), ValueError, "max_seqlen: expected an integer >= 0"),
    ("max_seqlen of 70 bits", _packed(max_seqlen=2**70), ValueError, "max_seqlen: expected an integer <="),
    ("max_seqlen a fraction", _packed(max_seqlen=2.0), TypeError, "max_seqlen: expected an integer"),
    ("max_seqlen of padded tokens", given(max_seqlen=9), ValueError, "max_seqlen: expected None without cu_seqlens"),
]
ROLLOUT: list[Row] = [
    ("rollout_ratio a number", given(rollout_ratio=1.0), TypeError, "rollout_ratio: expected a tensor"),
    ("rollout_ratio of no dims", given(rollout_ratio=torch.ones(())), ValueError, "rollout_ratio: expected at least 1"),
    ("rollout_ratio of others", _too_many("rollout_ratio", 1), ValueError, "rollout_ratio: expected shape"),
    _value("rollout_mode: expected one of 'truncate', 'mask'", rollout_mode="clip"),
    _value("rollout_mode: expected None without rollout_ratio", rollout_mode="mask"),
    _value("rollout_min: expected None without rollout_mode", rollout_min=0.5),
    _value("rollout_max: expected a number >= 0", rollout_mode="mask", rollout_max=-1.0),
    _value("rollout_min: expected a number <= rollout_max", rollout_mode="mask", rollout_min=2.0, rollout_max=1.0),
]
NORMALIZERS: list[Row] = [
    _value("num_tokens: expected a number >= 0", num_tokens=-0.5),
    _value("num_tokens: expected a number > 0", num_tokens=1e-40),
    _value("num_tokens: expected a number > 0, because a token is active", num_tokens=0),
    _type("num_tokens: expected a number", num_tokens="8"),
    _value("num_tokens: expected 0 dims", num_tokens=torch.ones(1)),
    _type("num_tokens: expected dtype", num_tokens=torch.ones((), dtype=torch.bool)),
    (
        "num_tokens elsewhere",
        given(num_tokens=torch.ones((), device="meta")),
        ValueError,
        "num_tokens: expected device",
    ),
    *_wrong_counts("num_tokens", loss_type="cispo"),
    *_wrong_counts("num_sequences", loss_type="luspo"),
    _value("num_sequences: expected None with loss_type 'dapo'", num_sequences=4),
    _value("num_tokens: expected None with loss_type 'grpo'", loss_type="grpo", num_tokens=4),
    _value("max_completion_length: expected None with loss_type 'dapo'", max_completion_length=4),
    _value("max_completion_length: expected an integer >= 1", loss_type="dr_grpo", max_completion_length=0),
    _value("max_completion_length: expected an integer <=", loss_type="dr_grpo", max_completion_length=2**70),
]
OBJECTIVES: list[Row] = [
    _value("loss_type: expected one of 'bnpo', 'grpo'", loss_type="grpo2"),
    _type("objective: expected an Objective, got dict", objective={"beta": 0.1}),
    _type("extras: expected Extras", extras=(None,)),
    _type("normalizer: expected Normalizer", normalizer=torch.tensor(3.0)),
    _value("clip_low: expected a number >= 0", clip_low=-0.1),
    _type("clip_high: expected a number", clip_high="0.2"),
    _value("delta: expected a number > 0", delta=0.0),
    _value("delta: expected None with loss_type 'sapo'", loss_type="sapo", delta=2.0),
    _value("dual_clip: expected a number > 1", loss_type="ppo", dual_clip=1.0),
    _value("dual_clip: expected None with loss_type 'dapo'", dual_clip=3.0),
    _value("delta, dual_clip: expected at most one", loss_type="ppo", dual_clip=3.0, delta=2.0),
    _value("cispo_cap: expected a number > 0", cispo_cap=0.0),
    _value("cispo_floor: expected a number <= cispo_cap", cispo_floor=6.0),
    _value("sapo_temperature_pos: expected a number > 0", sapo_temperature_pos=0.0),
    _value("vespo_k_neg: expected a number >= 0", vespo_k_neg=-1.0),
    _value("vespo_lambda_pos: expected a number > 0", vespo_lambda_pos=0.0),
    _value("importance_level: expected one of 'token', 'sequence'", importance_level="row"),
    _value(
        "importance_level: expected 'sequence' or None with loss_type 'gspo'",
        loss_type="gspo",
        importance_level="token",
    ),
    _value("kl_estimator: expected one of 'k1', 'k2', 'k3'", kl_estimator="k4"),
    _type("kl_correction: expected a bool", kl_correction=1),
    _type("return_metrics: expected a bool", return_metrics=None),
    ("entropy of others", _too_many("entropy", 2), ValueError, "entropy: expected shape"),
]
ESTIMATORS: list[Row] = [
    _value("advantage_estimator: expected one of 'population'", advantage_estimator="mean"),
    _value("eps_placement: expected one of 'max', 'add'", eps_placement="min"),
    _type("skip_nan: expected a bool", skip_nan="yes"),
]
LOSS = (*OBJECTIVES, *NORMALIZERS, *ROLLOUT, *PACKING)
"""Illegal calls of both losses."""
