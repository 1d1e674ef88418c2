"""``Objective``: its checks, equality, presets, and the keywords that override it."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch

from rl_kernels.core.testing import Case, Draw, spec_of
from rl_kernels.grpo_loss import (
    Normalizer,
    Objective,
    group_advantages,
    grpo_loss,
    grpo_loss_from_advantages,
)
from rl_kernels.grpo_loss.objective import PRESETS
from rl_kernels.grpo_loss.op import OPERATOR


def _call(**options: Any) -> dict[str, Any]:
    case = Case("call", {"prompts": 2, "samples": 3, "completion": 9}, {"density": 0.7, "noise": 0.4})
    return {**spec_of(OPERATOR).inputs(case, Draw(torch.float32, seed=5)), **options}


def test_public_functions_have_at_most_16_options() -> None:
    for function in (grpo_loss, grpo_loss_from_advantages, group_advantages):
        names = inspect.signature(function).parameters.keys()
        assert len(names - {"cu_seqlens", "max_seqlen", "process_group"}) <= 16


def test_objectives_are_equal_by_their_options() -> None:
    assert len({Objective(loss_type="dapo", clip_high=0.28), Objective.preset("dapo"), Objective()}) == 2
    assert "plan" not in repr(Objective())
    objective = Objective.preset("verl:vanilla")
    assert dataclasses.replace(objective, dual_clip=2.0).numbers.dual_clip == 2.0
    with pytest.raises(ValueError, match="dual_clip: expected None with loss_type 'grpo'"):
        dataclasses.replace(objective, loss_type="grpo")


def test_presets() -> None:
    for name, options in PRESETS.items():
        objective = Objective.preset(name)
        assert {option: getattr(objective, option) for option in options} == options
        assert objective.beta == 0.0
    with pytest.raises(ValueError, match=r"name: expected one of trl-1.10:grpo, .*, got 'ppo2'"):
        Objective.preset("ppo2")


def test_keywords_override_the_objective() -> None:
    objective = Objective(loss_type="dapo", clip_low=0.1, clip_high=0.3, kl_estimator="k2", beta=0.5)
    result = grpo_loss(**_call(), objective=objective, loss_type="grpo", beta=0.2, clip_eps=0.15)
    whole = Objective(loss_type="grpo", clip_low=0.15, clip_high=0.15, kl_estimator="k2", beta=0.2)
    assert result == grpo_loss(**_call(), objective=whole)
    assert result != grpo_loss(**_call(), objective=objective)
    assert grpo_loss(**_call(), objective=objective, beta=0.0).kl == 0
    assert grpo_loss(**_call(), beta=1) == grpo_loss(**_call(), beta=1.0)
    for wrong in (True, [0.1]):
        with pytest.raises((TypeError, ValueError), match=r"^beta: "):
            grpo_loss(**_call(), beta=wrong)


def test_old_logps_get_no_gradient() -> None:
    call = _call()
    call["old_logps"].requires_grad_()
    assert not grpo_loss(**call).loss.requires_grad
    # The profiler observes ops, so PyTorch's dispatcher calls them.
    with torch.autograd.profiler.profile():
        assert not grpo_loss(**call).loss.requires_grad


def test_trl_preset_adds_eps_to_a_small_deviation() -> None:
    call = _call()
    rewards = 1.0 + 1e-4 * call.pop("rewards").double()
    groups = rewards.view(-1, call.pop("samples_per_prompt"))
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    objective = Objective.preset("trl-1.16:dapo")
    expected = grpo_loss_from_advantages(**call, advantages=advantages.flatten(), objective=objective).loss
    loss = grpo_loss(**call, rewards=rewards, samples_per_prompt=3, objective=objective).loss
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-7)


def test_advantage_options_of_the_objective_are_used() -> None:
    call = _call()
    estimated: dict[str, Any] = {"advantage_estimator": "sample", "eps_placement": "add", "eps": 1e-4}
    result = grpo_loss(**call, objective=Objective(**estimated))
    advantages = group_advantages(call.pop("rewards"), samples_per_prompt=call.pop("samples_per_prompt"), **estimated)
    assert result == grpo_loss_from_advantages(**call, advantages=advantages)
    # There they are given, and what an objective says of them is not read.
    assert result == grpo_loss_from_advantages(**call, advantages=advantages, objective=Objective(eps=0.5))


def test_count_is_read_in_each_call() -> None:
    call = _call()
    one, *others = (grpo_loss(**call, normalizer=Normalizer(num_tokens=count)).loss for count in (1, 2, 4.0))
    assert [one / 2, one / 4] == others
    total = grpo_loss(**call, normalizer=Normalizer(num_tokens=call["completion_mask"].sum().float())).loss
    assert total == grpo_loss(**call).loss
    with pytest.raises(ValueError, match="num_tokens: expected a number > 0"):
        grpo_loss(**call, normalizer=Normalizer(num_tokens=0))
