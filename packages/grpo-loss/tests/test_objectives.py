"""Every objective against its closed form in FP64: values and gradients written out, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_kernels.core.testing import Draw, function_of
from rl_kernels.grpo_loss import METRICS, reference
from rl_kernels.grpo_loss.op import OPERATOR
from rl_kernels.grpo_loss.plan import FORMS
from rl_kernels.grpo_loss.presets import PRESETS

grpo_loss = function_of(OPERATOR)
grpo_loss_from_advantages = function_of(OPERATOR, "grpo_loss_from_advantages")

BATCH, LENGTH = 5, 7
SEQUENCE_MEANS, SEQUENCE_SUMS = ("grpo", "gspo", "sapo"), ("dr_grpo", "luspo")
LEVELS = [(name, level) for name in FORMS for level in ("token", "sequence") if (name, level) != ("gspo", "token")]
KL, TRUNCATED = {"beta": 0.3}, {"rollout_mode": "truncate", "rollout_min": 0.6, "rollout_max": 1.4}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"clip_low": 0.1, "clip_high": 0.35},
    {"old_logps": None},
    *(
        {**KL, "kl_estimator": kl, "kl_correction": correction}
        for kl in ("k1", "k2", "k3")
        for correction in (False, True)
    ),
    {"rollout_ratio": "token"},
    {"rollout_ratio": "token", **TRUNCATED},
    {"rollout_ratio": "sequence", "rollout_mode": "mask", "rollout_max": 1.4},
    {"advantages": "token"},
    {"advantages": "token", "rollout_ratio": "token", **KL, "kl_correction": True},
)
EXTRA = [
    ("bnpo", {"delta": 1.1}),
    ("grpo", {"delta": 1.5, "beta": 0.1}),
    ("luspo", {"delta": 1.05, "importance_level": "sequence"}),
    ("ppo", {"dual_clip": 1.3}),
    ("ppo", {"dual_clip": 3.0, "advantages": "token"}),
    ("cispo", {"cispo_floor": 0.8, "cispo_cap": 1.2}),
    ("dr_grpo", {"max_completion_length": 11}),
    ("dr_grpo", {"num_sequences": 9.0}),
    ("dapo", {"num_tokens": 13}),
]


def _call(loss_type: str, options: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    draw = Draw(dtype, seed=17)
    current = draw.uniform(1e-2, 1.0, BATCH, LENGTH).log()
    call: dict[str, Any] = {
        "current_logps": current,
        "old_logps": current + draw.normal(BATCH, LENGTH, scale=0.5),
        "ref_logps": current + draw.normal(BATCH, LENGTH, scale=0.4),
        "completion_mask": draw.mask(0.7, BATCH, LENGTH),
    }
    shapes: dict[str, tuple[int, ...]] = {"token": (BATCH, LENGTH), "sequence": (BATCH,)}
    call["advantages"] = draw.normal(*shapes[options.get("advantages", "sequence")])
    if "rollout_ratio" in options:
        call["rollout_ratio"] = draw.uniform(0.4, 1.8, *shapes[options["rollout_ratio"]])
    call["completion_mask"][2] = False
    given = {name: value for name, value in options.items() if name not in ("advantages", "rollout_ratio")}
    return {**call, "loss_type": loss_type, **given}


def _found(function: Callable[..., Any], call: dict[str, Any]) -> tuple[float, torch.Tensor]:
    leaf = call["current_logps"].clone().requires_grad_()
    loss = function(**{**call, "current_logps": leaf}).loss
    return float(loss.detach()), torch.autograd.grad(loss, leaf)[0]


def _exact(call: dict[str, Any]) -> tuple[float, torch.Tensor]:
    """Loss and gradient in Python's own floats, from the formulas of docs/objectives.md and their derivatives."""
    kind, level = call["loss_type"], call.get("importance_level")
    shared = level == "sequence" or kind == "gspo"
    sequences = call["current_logps"].shape[0]
    active = [[t for t in range(LENGTH) if call["completion_mask"][i, t]] for i in range(sequences)]
    total, grad = 0.0, torch.zeros(sequences, LENGTH, dtype=torch.float64)
    for i, tokens in enumerate(active):
        value, slopes = _sequence(call, i, tokens, kind, shared)
        scale = 1 / len(tokens) if tokens and kind in SEQUENCE_MEANS else 1.0
        total += scale * value
        for t in tokens:
            grad[i, t] = scale * slopes[t]
    if kind in (*SEQUENCE_MEANS, *SEQUENCE_SUMS):
        divisor = call.get("num_sequences", sequences)
        divisor *= call.get("max_completion_length", LENGTH) if kind == "dr_grpo" else 1
    else:
        divisor = call.get("num_tokens", sum(map(len, active)))
    return total / divisor, grad / divisor


def _sequence(
    call: dict[str, Any], i: int, tokens: list[int], kind: str, shared: bool
) -> tuple[float, dict[int, float]]:
    """Sum of the terms of a sequence, and its derivative by the log-probability of each of its tokens."""
    x = {t: float(call["current_logps"][i, t]) for t in tokens}
    old = call.get("old_logps")
    d = {t: x[t] - float(old[i, t]) if old is not None else 0.0 for t in tokens}
    mean = math.fsum(d.values()) / max(len(tokens), 1)
    ratio = {t: math.exp(mean if shared else d[t]) for t in tokens}
    a = {t: float(call["advantages"][i] if call["advantages"].ndim == 1 else call["advantages"][i, t]) for t in tokens}
    w = {t: _rollout(call, i, t) for t in tokens}
    value, own, through = 0.0, dict.fromkeys(tokens, 0.0), dict.fromkeys(tokens, 0.0)
    for t in tokens:
        if kind in ("cispo", "vespo", "reinforce"):
            weight = 1.0 if kind == "reinforce" else ratio[t]
            if kind == "cispo":
                weight = min(max(ratio[t], call.get("cispo_floor", 0.0)), call.get("cispo_cap", 5.0))
            if kind == "vespo":
                weight = _vespo(call, i, tokens, d, a[t])
            weight *= 1.0 if kind == "vespo" else w[t]
            value -= weight * a[t] * x[t]
            own[t] -= weight * a[t]
        else:
            term, slope = _of_ratio(call, kind, ratio[t], a[t])
            value += w[t] * term
            through[t] += w[t] * slope
        if call.get("beta"):
            e, r = float(call["ref_logps"][i, t]) - x[t], ratio[t]
            k, dk = {"k1": (-e, 1.0), "k2": (e * e / 2, -e), "k3": (math.expm1(e) - e, -math.expm1(e))}[
                call.get("kl_estimator", "k3")
            ]
            corrected = call.get("kl_correction", False)
            value += call["beta"] * k * (r if corrected else 1.0)
            own[t] += call["beta"] * dk * (r if corrected else 1.0)
            through[t] += call["beta"] * k * r if corrected else 0.0
    if shared:
        spread = math.fsum(through.values()) / max(len(tokens), 1)
        through = dict.fromkeys(tokens, spread)
    return value, {t: own[t] + through[t] for t in tokens}


def _of_ratio(call: dict[str, Any], kind: str, r: float, a: float) -> tuple[float, float]:
    """A term and its derivative by the log of the ratio."""
    if kind == "sapo":
        tau = call.get("sapo_temperature_pos", 1.0) if a > 0 else call.get("sapo_temperature_neg", 1.05)
        gate = 1 / (1 + math.exp(-tau * (r - 1)))
        return -4 / tau * gate * a, -4 * gate * (1 - gate) * r * a
    low, high = 1 - call.get("clip_low", 0.2), 1 + call.get("clip_high", 0.2)
    capped, delta = min(r, call.get("delta", math.inf)), call.get("delta", math.inf)
    clipped = min(max(r, low), high)
    value, slope = -capped * a, -r * a if r <= delta else 0.0
    if -clipped * a > value:
        value, slope = -clipped * a, -r * a if low <= r <= high else 0.0
    if a < 0 and value > -call.get("dual_clip", math.inf) * a:
        value, slope = -call["dual_clip"] * a, 0.0
    return value, slope


def _rollout(call: dict[str, Any], i: int, t: int) -> float:
    if call.get("rollout_ratio") is None:
        return 1.0
    given = call["rollout_ratio"]
    w = float(given[i] if given.ndim == 1 else given[i, t])
    low, high = call.get("rollout_min", 0.0), call.get("rollout_max", math.inf)
    if call.get("rollout_mode") == "mask":
        return w if low <= w <= high else 0.0
    return min(max(w, low), high)


def _vespo(call: dict[str, Any], i: int, tokens: list[int], d: dict[int, float], a: float) -> float:
    log_w = sum(min(max(d[t], -20.0), 20.0) for t in tokens)
    if call.get("rollout_ratio") is not None:
        counted = tokens if call["rollout_ratio"].ndim == 2 else [0]
        least = math.log(1e-8)
        weights = [_rollout(call, i, t) for t in counted]
        log_w += sum(min(max(math.log(w) if w else -math.inf, least), 20.0) for w in weights)
    log_w = min(max(log_w, math.log(1e-8)), 20.0)
    k, lam = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
    return math.exp(lam + k * log_w - lam * math.exp(log_w))


def _agree(call: dict[str, Any]) -> None:
    loss, grad = _exact(call)
    for function in (grpo_loss_from_advantages, reference.grpo_loss_from_advantages):
        found_loss, found_grad = _found(function, call)
        assert found_loss == pytest.approx(loss, rel=1e-12, abs=1e-14)
        torch.testing.assert_close(found_grad, grad, rtol=1e-12, atol=1e-14)
        assert not found_grad[~call["completion_mask"]].any()


@pytest.mark.parametrize(("loss_type", "level"), LEVELS)
def test_value_and_gradient_are_those_of_the_closed_form(loss_type: str, level: str) -> None:
    for options in OPTIONS:
        _agree(_call(loss_type, {"importance_level": level, **options}))


@pytest.mark.smoke
def test_options_of_a_type() -> None:
    for loss_type, options in EXTRA:
        _agree(_call(loss_type, options))


def test_preset_is_its_formula_and_both_functions_take_it() -> None:
    for made in PRESETS.values():
        assert {"clip_low", "clip_high", "loss_type"} <= made.keys()
        call = {**_call(made["loss_type"], {"beta": 0.1}), **made}
        _agree(call)
        call |= {"rewards": call.pop("advantages"), "group_boundaries": [0, 2, 5]}
        assert torch.allclose(grpo_loss(**call).loss, reference.grpo_loss(**call).loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss_type", FORMS)
def test_micro_batches_add_up_to_the_whole(loss_type: str) -> None:
    call = _call(loss_type, {"beta": 0.1}, torch.float32)
    loss, grad = _found(grpo_loss_from_advantages, call)
    count, rows = call["completion_mask"].sum(), [name for name, x in call.items() if isinstance(x, torch.Tensor)]
    name, count = ("num_tokens", count) if FORMS[loss_type].mean == "tokens" else ("num_sequences", torch.tensor(BATCH))
    grads = []
    for size in (1, 2, BATCH):
        parts = [call | {row: call[row][i : i + size] for row in rows} for i in range(0, BATCH, size)]
        results = [_found(grpo_loss_from_advantages, {**part, name: count}) for part in parts]
        assert sum(loss for loss, _ in results) == pytest.approx(loss, rel=1e-5, abs=1e-6)
        grads.append(torch.cat([grad for _, grad in results]))
    # A gradient belongs to its sequence: no split changes a bit of it.
    assert all(torch.equal(each, grads[0]) for each in grads)
    torch.testing.assert_close(grads[0], grad, rtol=1e-6, atol=1e-8)


def test_metrics_worked_out_by_hand() -> None:
    current = torch.tensor([[-1.0, -2.0, -3.0, torch.nan]]).double()
    d = torch.tensor([[0.5, -0.5, 0.0, 0.0]]).double()
    e = torch.tensor([[0.1, -0.2, 0.3, 0.0]]).double()
    mask = torch.tensor([[True, True, True, False]])
    advantages = torch.tensor([[1.0, -1.0, 1.0, 1.0]]).double()
    tensors = (current, current - d, current + e, advantages, mask)
    entropy = torch.tensor([[1.0, 2.0, 6.0, torch.inf]])
    _, found = grpo_loss_from_advantages(*tensors, beta=0.1, entropy=entropy, return_metrics=True)
    r = [math.exp(0.5), math.exp(-0.5), 1.0]
    mean = {"k1": -0.2 / 3, "k2": (0.01 + 0.04 + 0.09) / 6, "entropy": 3.0, "clip_low": 1 / 3, "clip_high": 1 / 3}
    mean["k3"] = sum(math.expm1(x) - x for x in (0.1, -0.2, 0.3)) / 3
    mean |= {"ratio_mean": sum(r) / 3, "ratio_min": r[1], "ratio_max": r[0], "nonfinite": 0.0}
    mean["effective_samples"] = sum(r) ** 2 / sum(x * x for x in r)
    assert found.dtype == torch.float32
    assert dict(zip(METRICS, found.tolist(), strict=True)) == pytest.approx(mean, rel=1e-6)


def test_metrics_count_active_tokens_that_are_not_finite() -> None:
    current = torch.tensor([[-1.0, torch.nan, -1.0, -torch.inf]])
    old = torch.tensor([[torch.inf, -1.0, -1.0, -1.0]])
    mask = torch.tensor([[True, True, True, False]])
    _, found = grpo_loss_from_advantages(current, old, None, torch.ones(1), mask, return_metrics=True)
    assert found[METRICS.index("nonfinite")] == 2
