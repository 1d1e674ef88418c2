"""What is not a number at an active token shows in the loss as it does in the definition, whatever the objective."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rl_kernels.core.operator import Call
from rl_kernels.core.testing import Draw, function_of
from rl_kernels.grpo_loss import reference
from rl_kernels.grpo_loss.op import OPERATOR
from rl_kernels.grpo_loss.plan import FORMS

grpo_loss_from_advantages = function_of(OPERATOR, "grpo_loss_from_advantages")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CALL = Call.of(torch.zeros(1, device=DEVICE))
BACKENDS = [backend.name for backend in OPERATOR.backends if backend.why_not(CALL) is None]
LEVELS = [(name, level) for name in FORMS for level in ("token", "sequence") if (name, level) != ("gspo", "token")]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kl": {"beta": 0.3},
    "corrected kl": {"beta": 0.3, "kl_correction": True},
    "corrected kl without a reference": {"kl_correction": True, "kl_estimator": "k1"},
    "rollout": {"rollout_mode": "mask", "rollout_max": 1.4},
    "advantage a token": {"advantages": "token"},
}
BATCH, LENGTH = 3, 5
PLACE = (1, 2)


def _call(loss_type: str, level: str, options: dict[str, Any], *, on_policy: bool) -> dict[str, Any]:
    draw = Draw(torch.float32, DEVICE, seed=23)
    current = draw.uniform(1e-2, 1.0, BATCH, LENGTH).log()
    mask = torch.ones(BATCH, LENGTH, dtype=torch.bool, device=DEVICE)
    mask[0, 3:], mask[1, 0] = False, False
    per_token = options.get("advantages") == "token"
    call = {
        "current_logps": current,
        "old_logps": None if on_policy else current + draw.normal(BATCH, LENGTH, scale=0.1),
        "ref_logps": current + draw.normal(BATCH, LENGTH, scale=0.1) if "beta" in options else None,
        "advantages": draw.uniform(0.5, 1.5, *((BATCH, LENGTH) if per_token else (BATCH,))),
        "completion_mask": mask,
        "rollout_ratio": draw.uniform(0.5, 1.5, BATCH, LENGTH) if "rollout_mode" in options else None,
        **{name: value for name, value in options.items() if name != "advantages"},
    }
    return {**call, "loss_type": loss_type, "importance_level": level}


def _with(call: dict[str, Any], name: str, place: tuple[int, int], value: float) -> dict[str, Any]:
    tensor = call[name].clone()
    tensor[place[: tensor.ndim]] = value
    return {**call, name: tensor}


def _results(function: Any, call: dict[str, Any], **options: Any) -> list[torch.Tensor]:
    """Return loss, both its parts and the gradient."""
    leaf = call["current_logps"].clone().requires_grad_()
    output = function(**{**call, "current_logps": leaf}, **options)
    output.loss.backward()
    assert leaf.grad is not None
    return [*(value.detach().double() for value in output), leaf.grad.double()]


def _wide(call: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for key, value in call.items()
    }


def _agree(call: dict[str, Any], backend: str) -> None:
    expected = _results(reference.grpo_loss_from_advantages, _wide(call))
    for value, gold in zip(_results(grpo_loss_from_advantages, call, backend=backend), expected, strict=True):
        torch.testing.assert_close(value, gold, rtol=1e-4, atol=1e-6, equal_nan=True)
    # reinforce has no ratio: of a tensor that it does not use nothing shows, and an infinity is one.
    assert call["loss_type"] == "reinforce" or expected[0].isnan()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("loss_type", "level"), LEVELS)
def test_on_policy_a_log_probability_that_is_not_finite_makes_the_loss_nan(
    loss_type: str, level: str, name: str, value: float, backend: str
) -> None:
    call = _call(loss_type, level, OPTIONS[name], on_policy=True)
    _agree(_with(call, "current_logps", PLACE, value), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["current_logps", "old_logps", "ref_logps", "advantages", "rollout_ratio"])
@pytest.mark.parametrize(("loss_type", "level"), LEVELS)
def test_nan_of_any_tensor_makes_the_loss_nan(loss_type: str, level: str, name: str, backend: str) -> None:
    options = {**OPTIONS["kl"], **OPTIONS["rollout"]}
    _agree(_with(_call(loss_type, level, options, on_policy=False), name, PLACE, math.nan), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize(("loss_type", "level"), LEVELS)
def test_what_is_not_finite_where_masked_changes_no_bit(
    loss_type: str, level: str, on_policy: bool, backend: str
) -> None:
    call = _call(loss_type, level, OPTIONS["kl"], on_policy=on_policy)
    expected = _results(grpo_loss_from_advantages, call, backend=backend)
    for name in ("current_logps", "ref_logps", *(() if on_policy else ("old_logps",))):
        for value in (math.nan, math.inf, -math.inf):
            found = _results(grpo_loss_from_advantages, _with(call, name, (1, 0), value), backend=backend)
            assert all(map(torch.equal, found, expected)), (name, value)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["plain", "corrected kl without a reference"])
@pytest.mark.parametrize(("loss_type", "level"), [("bnpo", "token"), ("ppo", "sequence")])
def test_where_the_advantage_is_0_nothing_counts(
    loss_type: str, level: str, name: str, value: float, backend: str
) -> None:
    call = _call(loss_type, level, OPTIONS[name], on_policy=True)
    call["advantages"][1] = 0.0
    expected = _results(grpo_loss_from_advantages, call, backend=backend)
    found = _results(grpo_loss_from_advantages, _with(call, "current_logps", PLACE, value), backend=backend)
    assert all(map(torch.equal, found, expected))
