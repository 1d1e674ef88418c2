"""``Objective``, ``Extras`` and ``Normalizer``: checked when they are made, frozen, and what a call makes of them."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch

from rl_kernels.core.testing import Draw
from rl_kernels.grpo_loss import (
    Normalizer,
    Objective,
    group_advantages,
    grpo_loss,
    grpo_loss_from_advantages,
)
from rl_kernels.grpo_loss.presets import PRESETS


def _call(**options: Any) -> dict[str, Any]:
    draw = Draw(torch.float32, seed=5)
    current = draw.uniform(1e-3, 1.0, 6, 9).log()
    old, ref = ((current + draw.normal(6, 9, scale=0.4)).clamp(max=0) for _ in range(2))
    call = {"current_logps": current, "old_logps": old, "ref_logps": ref, "rewards": draw.normal(6)}
    return {**call, "completion_mask": draw.mask(0.7, 6, 9), "samples_per_prompt": 3, **options}


def test_at_most_sixteen_parameters_besides_layout_and_ranks() -> None:
    for function in (grpo_loss, grpo_loss_from_advantages, group_advantages):
        names = inspect.signature(function).parameters.keys()
        assert len(names - {"cu_seqlens", "max_seqlen", "process_group"}) <= 16


def test_an_objective_is_equal_by_its_options_and_another_one_with_others() -> None:
    assert len({Objective(loss_type="dapo", clip_high=0.28), Objective.preset("dapo"), Objective()}) == 2
    assert "plan" not in repr(Objective())
    made = Objective.preset("verl:vanilla")
    assert dataclasses.replace(made, dual_clip=2.0).numbers.dual_clip == 2.0
    with pytest.raises(ValueError, match="dual_clip: expected None with loss_type 'grpo'"):
        dataclasses.replace(made, loss_type="grpo")


def test_presets_say_their_options_and_unknown_ones_are_refused() -> None:
    for name, options in PRESETS.items():
        made = Objective.preset(name)
        assert {option: getattr(made, option) for option in options} == options
        assert made.beta == 0.0
    with pytest.raises(ValueError, match=r"name: expected one of trl-1.10:grpo, .*, got 'ppo2'"):
        Objective.preset("ppo2")


def test_what_is_given_beside_an_objective_replaces_it() -> None:
    made = Objective(loss_type="dapo", clip_low=0.1, clip_high=0.3, kl_estimator="k2", beta=0.5)
    found = grpo_loss(**_call(), objective=made, loss_type="grpo", beta=0.2, clip_eps=0.15)
    whole = Objective(loss_type="grpo", clip_low=0.15, clip_high=0.15, kl_estimator="k2", beta=0.2)
    assert found == grpo_loss(**_call(), objective=whole)
    assert found != grpo_loss(**_call(), objective=made)
    assert grpo_loss(**_call(), objective=made, beta=0.0).kl == 0
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


def test_advantages_of_trl_in_a_group_of_nearly_equal_rewards() -> None:
    call = _call()
    rewards = 1.0 + 1e-4 * call.pop("rewards").double()
    groups = rewards.view(-1, call.pop("samples_per_prompt"))
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    objective = Objective.preset("trl-1.16:dapo")
    expected = grpo_loss_from_advantages(**call, advantages=advantages.flatten(), objective=objective).loss
    loss = grpo_loss(**call, rewards=rewards, samples_per_prompt=3, objective=objective).loss
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-7)


def test_advantages_are_those_of_the_objective() -> None:
    call = _call()
    estimated: dict[str, Any] = {"advantage_estimator": "sample", "eps_placement": "add", "eps": 1e-4}
    found = grpo_loss(**call, objective=Objective(**estimated))
    advantages = group_advantages(call.pop("rewards"), samples_per_prompt=call.pop("samples_per_prompt"), **estimated)
    assert found == grpo_loss_from_advantages(**call, advantages=advantages)
    # There they are given, and what an objective says of them is not read.
    assert found == grpo_loss_from_advantages(**call, advantages=advantages, objective=Objective(eps=0.5))


def test_numbers_of_a_later_call_of_the_same_kind_are_read() -> None:
    call = _call()
    one, *others = (grpo_loss(**call, normalizer=Normalizer(num_tokens=count)).loss for count in (1, 2, 4.0))
    assert [one / 2, one / 4] == others
    total = grpo_loss(**call, normalizer=Normalizer(num_tokens=call["completion_mask"].sum().float())).loss
    assert total == grpo_loss(**call).loss
    with pytest.raises(ValueError, match="num_tokens: expected a number > 0"):
        grpo_loss(**call, normalizer=Normalizer(num_tokens=0))
