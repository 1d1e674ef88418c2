"""NaN and infinities at active and at masked tokens, and counts of 0 where no token is active."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch

from rl_kernels.core.operator import Call
from rl_kernels.core.testing import Draw, function_of
from rl_kernels.grpo_loss import METRICS, Extras, Normalizer, Objective, api, grpo_loss, reference, sequence_losses
from rl_kernels.grpo_loss.call import FORMS
from rl_kernels.grpo_loss.op import OPERATOR

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


def _agree(call: dict[str, Any], backend: str) -> None:
    wide = {name: x.double() for name, x in call.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    expected = _results(reference.grpo_loss_from_advantages, call | wide)
    for value, gold in zip(_results(grpo_loss_from_advantages, call, backend=backend), expected, strict=True):
        torch.testing.assert_close(value, gold, rtol=1e-4, atol=1e-6, equal_nan=True)
    # reinforce has no ratio: of a tensor that it does not use nothing shows, and an infinity is one.
    assert call["loss_type"] == "reinforce" or expected[0].isnan()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("loss_type", "level"), LEVELS)
def test_nonfinite_active_token_makes_the_loss_nan(loss_type: str, level: str, backend: str) -> None:
    for options, value in product(OPTIONS.values(), (math.nan, math.inf, -math.inf)):
        # Off-policy an infinity of the current log-probabilities is an infinite ratio.
        call = _call(loss_type, level, options, on_policy=True)
        _agree(_with(call, "current_logps", PLACE, value), backend)
    call = _call(loss_type, level, {**OPTIONS["kl"], **OPTIONS["rollout"]}, on_policy=False)
    for name in ("current_logps", "old_logps", "ref_logps", "advantages", "rollout_ratio"):
        _agree(_with(call, name, PLACE, math.nan), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("loss_type", "level"), [("bnpo", "token"), ("ppo", "sequence")])
def test_tokens_with_advantage_0_have_no_effect(loss_type: str, level: str, backend: str) -> None:
    for name, value in product(("plain", "corrected kl without a reference"), (math.nan, math.inf)):
        call = _call(loss_type, level, OPTIONS[name], on_policy=True)
        call["advantages"][1] = 0.0
        expected = _results(grpo_loss_from_advantages, call, backend=backend)
        result = _results(grpo_loss_from_advantages, _with(call, "current_logps", PLACE, value), backend=backend)
        assert all(map(torch.equal, result, expected)), (name, value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_gradient_is_zero_for_any_upstream(backend: str) -> None:
    draw = Draw(torch.float32, DEVICE, seed=13)
    current, mask = draw.uniform(1e-3, 1.0, 4, 130).log().requires_grad_(), draw.mask(0.7, 4, 130)
    old = current.detach() + draw.normal(4, 130, scale=0.3)
    # A ratio that underflows to 0 has the slope -0 A: such a token is not taken for a masked one.
    old[0, 0], mask[0, 0] = 500.0, True
    arguments = (current, old, None, torch.ones(4, device=DEVICE), mask)
    for upstream in (torch.inf, torch.nan, -2.0):
        loss = grpo_loss_from_advantages(*arguments, backend=backend).loss
        (grad,) = torch.autograd.grad(loss, current, torch.tensor(upstream, device=DEVICE))
        assert not grad[~mask].any(), upstream
        assert not grad[~mask].signbit().any(), upstream
        assert grad[mask].isfinite().tolist() == [upstream == -2.0] * int(mask.sum())


ZEROS: tuple[Any, ...] = (0, 0.0, torch.tensor(0), torch.tensor(0.0, dtype=torch.float64), torch.tensor(0.0).bfloat16())


def count_of(loss_type: str, value: Any) -> Normalizer:
    name = "num_tokens" if FORMS[loss_type].mean == "tokens" else "num_sequences"
    return Normalizer(**{name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss_type", FORMS)
def test_no_active_token_and_a_count_of_0_give_0(loss_type: str, backend: str) -> None:
    objective = Objective(loss_type=loss_type, beta=0.1, kl_correction=True)
    options: dict[str, Any] = {"objective": objective, "backend": backend}
    for shape, zero in product(((3, 4), (0, 4), (3, 0)), ZEROS if backend == "native" else ZEROS[2:3]):
        tokens, rows = torch.full(shape, torch.nan, device=DEVICE), torch.full(shape[:1], torch.nan, device=DEVICE)
        arguments = tokens.clone().requires_grad_(), tokens, tokens, rows, torch.zeros(shape, device=DEVICE).bool()
        options |= {"extras": Extras(rollout_ratio=rows, entropy=tokens), "normalizer": count_of(loss_type, zero)}
        output, metrics = api.grpo_loss_from_advantages(*arguments, **options, return_metrics=True)
        losses = sequence_losses(*arguments, **options)
        (output.loss + losses.sum()).backward()
        for result in (*output, metrics, losses, arguments[0].grad):
            assert not result.any(), (shape, zero, result)
    # Packed, with rewards.
    current = torch.full((5,), torch.nan, device=DEVICE, requires_grad=True)
    mask, rewards = torch.zeros(5, dtype=torch.bool, device=DEVICE), torch.rand(2, device=DEVICE)
    options |= {"objective": Objective(loss_type=loss_type), "normalizer": count_of(loss_type, mask.sum())}
    options |= {"extras": None, "cu_seqlens": torch.tensor([0, 0, 5], device=DEVICE)}
    loss = grpo_loss(current, None, None, rewards, mask, samples_per_prompt=2, **options).loss
    loss.backward()
    assert loss == 0
    assert not current.grad.any()


@pytest.mark.parametrize("wrong", [-5, math.nan, math.inf, 0])
def test_wrong_counts_raise_unless_unchecked(wrong: float) -> None:
    arguments = (torch.zeros(2, 3), None, None, torch.ones(2), torch.tensor([[True, False, False]] * 2))
    count = Normalizer(num_tokens=torch.tensor(wrong))
    for function in (api.grpo_loss_from_advantages, sequence_losses):
        with pytest.raises(ValueError, match="num_tokens: expected a"):
            function(*arguments, normalizer=count)
        function(*arguments, normalizer=count, validate=False)


def test_count_may_be_below_1() -> None:
    # One token, of two ranks: TRL divides by the tokens of a rank on average.
    arguments = (torch.zeros(1, 1), None, None, torch.ones(1), torch.ones(1, 1, dtype=torch.bool))
    for half in (0.5, torch.tensor(0.5)):
        assert api.grpo_loss_from_advantages(*arguments, normalizer=Normalizer(num_tokens=half)).loss == -2


@pytest.mark.parametrize("backend", BACKENDS)
def test_effective_samples_are_0_where_all_ratios_underflow(backend: str) -> None:
    current, mask = torch.full((2, 3), -300.0, device=DEVICE), torch.ones(2, 3, dtype=torch.bool, device=DEVICE)
    arguments = (current, torch.zeros_like(current), None, torch.ones(2, device=DEVICE), mask)
    _, metrics = api.grpo_loss_from_advantages(*arguments, return_metrics=True, backend=backend)
    assert metrics[METRICS.index("effective_samples")] == 0
    assert metrics.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nonfinite_tokens_are_counted(backend: str) -> None:
    call = _call("grpo", "token", {}, on_policy=False)
    for name, value in (("current_logps", math.nan), ("old_logps", -math.inf)):
        _, metrics = grpo_loss_from_advantages(
            **_with(_with(call, name, PLACE, value), name, (2, 1), value), return_metrics=True, backend=backend
        )
        assert metrics[METRICS.index("nonfinite")] == 2


@pytest.mark.parametrize("loss_type", ["grpo", "vespo"])
def test_log_ratios_at_their_bounds(loss_type: str) -> None:
    """The sum of a sequence's log-ratios, and a token's, are bounded by 20."""
    for shift in (-45.0, -30.0, -19.0, 19.0, 25.0, 45.0):
        call = _call(loss_type, "token", {}, on_policy=False)
        call["old_logps"] = call["current_logps"] - shift / 5
        call["old_logps"][2, 2] += shift
        expected = reference.grpo_loss_from_advantages(**call)
        found = grpo_loss_from_advantages(**call, backend="native")
        torch.testing.assert_close(found.loss.double(), expected.loss.double(), rtol=1e-4, atol=1e-6)
