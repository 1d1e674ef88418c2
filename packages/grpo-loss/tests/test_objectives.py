"""Every objective in FP64 beside its definition, which shares no line with the backend; and its metrics by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_kernels.core.testing import Draw, function_of
from rl_kernels.grpo_loss import METRICS, reference
from rl_kernels.grpo_loss.call import FORMS
from rl_kernels.grpo_loss.objective import PRESETS
from rl_kernels.grpo_loss.op import OPERATOR

grpo_loss = function_of(OPERATOR)
grpo_loss_from_advantages = function_of(OPERATOR, "grpo_loss_from_advantages")

BATCH, LENGTH = 5, 7
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
    {"rollout_ratio": "sequence", "rollout_mode": "mask", "rollout_max": 1.0},
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
    arguments = {name: value for name, value in options.items() if name not in ("advantages", "rollout_ratio")}
    return {**call, "loss_type": loss_type, **arguments}


def _found(function: Callable[..., Any], call: dict[str, Any]) -> tuple[float, torch.Tensor]:
    leaf = call["current_logps"].clone().requires_grad_()
    loss = function(**{**call, "current_logps": leaf}).loss
    return float(loss.detach()), torch.autograd.grad(loss, leaf)[0]


def _agree(call: dict[str, Any]) -> None:
    loss, grad = _found(grpo_loss_from_advantages, call)
    expected, gold = _found(reference.grpo_loss_from_advantages, call)
    assert loss == pytest.approx(expected, rel=1e-12, abs=1e-14)
    torch.testing.assert_close(grad, gold, rtol=1e-12, atol=1e-14)
    assert not grad[~call["completion_mask"]].any()


@pytest.mark.parametrize(("loss_type", "level"), LEVELS)
def test_loss_and_gradient_match_the_definition(loss_type: str, level: str) -> None:
    for options in OPTIONS:
        _agree(_call(loss_type, {"importance_level": level, **options}))


@pytest.mark.smoke
def test_options_that_only_one_loss_type_has() -> None:
    for loss_type, options in EXTRA:
        _agree(_call(loss_type, options))


def test_presets_match_the_definition() -> None:
    for preset in PRESETS.values():
        assert {"clip_low", "clip_high", "loss_type"} <= preset.keys()
        call = {**_call(preset["loss_type"], {"beta": 0.1}), **preset}
        _agree(call)
        call |= {"rewards": call.pop("advantages"), "group_boundaries": [0, 2, 5]}
        assert torch.allclose(grpo_loss(**call).loss, reference.grpo_loss(**call).loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss_type", FORMS)
def test_micro_batches_add_up(loss_type: str) -> None:
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
    _, result = grpo_loss_from_advantages(*tensors, beta=0.1, entropy=entropy, return_metrics=True)
    r = [math.exp(0.5), math.exp(-0.5), 1.0]
    mean = {"k1": -0.2 / 3, "k2": (0.01 + 0.04 + 0.09) / 6, "entropy": 3.0, "clip_low": 1 / 3, "clip_high": 1 / 3}
    mean["k3"] = sum(math.expm1(x) - x for x in (0.1, -0.2, 0.3)) / 3
    mean |= {"ratio_mean": sum(r) / 3, "ratio_min": r[1], "ratio_max": r[0], "nonfinite": 0.0}
    mean["effective_samples"] = sum(r) ** 2 / sum(x * x for x in r)
    assert result.dtype == torch.float32
    assert dict(zip(METRICS, result.tolist(), strict=True)) == pytest.approx(mean, rel=1e-6)


def test_metrics_count_nonfinite_active_tokens() -> None:
    current = torch.tensor([[-1.0, torch.nan, -1.0, -torch.inf]])
    old = torch.tensor([[torch.inf, -1.0, -1.0, -1.0]])
    mask = torch.tensor([[True, True, True, False]])
    ref = torch.tensor([[-1.0, -1.0, torch.nan, torch.nan]])
    for beta, expected in ((0.0, 2), (0.1, 3)):
        _, metrics = grpo_loss_from_advantages(current, old, ref, torch.ones(1), mask, beta=beta, return_metrics=True)
        assert metrics[METRICS.index("nonfinite")] == expected


CURRENT = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -0.25, -3.0]], dtype=torch.float64)
LOG_RATIO = torch.tensor([[0.5, -0.5, 0.1], [0.5, -0.5, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, True, False]])
REWARDS = torch.tensor([1.0, 3.0], dtype=torch.float64)
"""Mean 2, deviation 1: advantages -1 and 1."""


@pytest.mark.smoke
def test_advantages_worked_out_by_hand() -> None:
    rewards = torch.tensor([5.0, 1.0, 3.0, 2.0, 2.0, 4.0, 8.0], dtype=torch.float64)
    result = reference.group_advantages(rewards, group_boundaries=[0, 1, 3, 7])
    spread = math.sqrt((4 + 4 + 0 + 16) / 4)
    assert result.tolist() == [0.0, -1.0, 1.0, -2 / spread, -2 / spread, 0.0, 4 / spread]


@pytest.mark.smoke
def test_definition_does_not_read_masked_positions() -> None:
    ref = CURRENT + 0.2 * LOG_RATIO
    tensors = (CURRENT, CURRENT - LOG_RATIO, ref)
    clean = reference.grpo_loss(*tensors, REWARDS, MASK, samples_per_prompt=2, beta=0.1)
    for garbage in (torch.nan, torch.inf, -torch.inf, 1e300):
        current, old, ref = (value.masked_fill(~MASK, garbage) for value in tensors)
        current.requires_grad_()
        result = reference.grpo_loss(current, old, ref, REWARDS, MASK, samples_per_prompt=2, beta=0.1)
        assert result == clean
        assert [value.requires_grad for value in result] == [True, False, False]
        (grad,) = torch.autograd.grad(result.loss, current)
        assert grad.isfinite().all()
        assert (grad[~MASK] == 0).all()
