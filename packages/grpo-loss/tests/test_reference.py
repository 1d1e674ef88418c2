"""The definition against numbers worked out by hand and formulas written otherwise, in FP64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rl_kernels.core.testing import Draw
from rl_kernels.grpo_loss.reference import group_advantages, grpo_loss, grpo_loss_from_advantages

CURRENT = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -0.25, -3.0]], dtype=torch.float64)
LOG_RATIO = torch.tensor([[0.5, -0.5, 0.1], [0.5, -0.5, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, True, False]])
REWARDS = torch.tensor([1.0, 3.0], dtype=torch.float64)
"""Mean 2, deviation 1: advantages -1 and 1."""


def test_policy_loss_worked_out_by_hand() -> None:
    found = grpo_loss(CURRENT, CURRENT - LOG_RATIO, None, REWARDS, MASK, samples_per_prompt=2)
    # -min(ratio A, clamped A): for A = -1 ratio 1.65 counts whole and 0.61 as 0.8; for A = 1 1.65 as 1.2, 0.61 whole.
    terms = [math.exp(0.5), 0.8, math.exp(0.1), -1.2, -math.exp(-0.5)]
    assert float(found.policy_loss) == pytest.approx(sum(terms) / 5, rel=1e-14)
    assert found.loss == found.policy_loss
    assert found.kl == 0


def test_gradient_worked_out_by_hand() -> None:
    current = CURRENT.clone().requires_grad_()
    grpo_loss(current, CURRENT - LOG_RATIO, None, REWARDS, MASK, samples_per_prompt=2).loss.backward()
    slopes = [[math.exp(0.5), 0.0, math.exp(0.1)], [0.0, -math.exp(-0.5), 0.0]]
    torch.testing.assert_close(current.grad, torch.tensor(slopes, dtype=torch.float64) / 5, rtol=1e-14, atol=0)


def test_kl_worked_out_by_hand() -> None:
    ref = CURRENT + torch.tensor([[0.3, -0.3, 0.0], [1.0, -2.0, 50.0]], dtype=torch.float64)
    current = CURRENT.clone().requires_grad_()
    zero = torch.zeros(2, dtype=torch.float64)
    found = grpo_loss_from_advantages(current, None, ref, zero, MASK, beta=0.5)
    kl = sum(math.exp(e) - e - 1 for e in (0.3, -0.3, 0.0, 1.0, -2.0)) / 5
    assert float(found.kl) == pytest.approx(kl, rel=1e-14)
    assert float(found.loss.detach()) == pytest.approx(0.5 * kl, rel=1e-14)
    found.loss.backward()
    slopes = [[1 - math.exp(0.3), 1 - math.exp(-0.3), 0.0], [1 - math.e, 1 - math.exp(-2.0), 0.0]]
    torch.testing.assert_close(current.grad, 0.5 * torch.tensor(slopes, dtype=torch.float64) / 5)


def test_advantages_worked_out_by_hand() -> None:
    rewards = torch.tensor([5.0, 1.0, 3.0, 2.0, 2.0, 4.0, 8.0], dtype=torch.float64)
    found = group_advantages(rewards, group_boundaries=[0, 1, 3, 7])
    spread = math.sqrt((4 + 4 + 0 + 16) / 4)
    assert found.tolist() == [0.0, -1.0, 1.0, -2 / spread, -2 / spread, 0.0, 4 / spread]


def test_deviation_below_eps_is_replaced_by_it() -> None:
    rewards = torch.tensor([0.0, 0.2, 0.0, 2.0], dtype=torch.float64)
    found = group_advantages(rewards, samples_per_prompt=2, eps=0.5)
    torch.testing.assert_close(found, torch.tensor([-0.2, 0.2, -1.0, 1.0], dtype=torch.float64))


@pytest.mark.parametrize("boundaries", [[0, 4, 8], (0, 4, 8), torch.tensor([0, 4, 8])])
def test_groups_said_in_either_way(boundaries: Any) -> None:
    rewards = Draw(torch.float64).normal(8)
    found = group_advantages(rewards, group_boundaries=boundaries)
    assert torch.equal(found, group_advantages(rewards, samples_per_prompt=4))


def test_per_token_advantages_are_those_of_their_sequence() -> None:
    advantages = torch.tensor([-0.4, 1.3], dtype=torch.float64)
    old = CURRENT - LOG_RATIO
    whole = grpo_loss_from_advantages(CURRENT, old, None, advantages, MASK)
    per_token = grpo_loss_from_advantages(CURRENT, old, None, advantages[:, None].expand(2, 3), MASK)
    assert torch.equal(whole.loss, per_token.loss)


def test_masked_positions_are_never_read() -> None:
    ref = CURRENT + 0.2 * LOG_RATIO
    tensors = (CURRENT, CURRENT - LOG_RATIO, ref)
    clean = grpo_loss(*tensors, REWARDS, MASK, samples_per_prompt=2, beta=0.1)
    for garbage in (torch.nan, torch.inf, -torch.inf, 1e300):
        current, old, ref = (value.masked_fill(~MASK, garbage) for value in tensors)
        current.requires_grad_()
        found = grpo_loss(current, old, ref, REWARDS, MASK, samples_per_prompt=2, beta=0.1)
        assert found == clean
        (grad,) = torch.autograd.grad(found.loss, current)
        assert grad.isfinite().all()
        assert (grad[~MASK] == 0).all()


def test_only_the_loss_carries_a_gradient() -> None:
    found = grpo_loss(CURRENT.clone().requires_grad_(), None, CURRENT, REWARDS, MASK, samples_per_prompt=2, beta=0.1)
    assert [value.requires_grad for value in found] == [True, False, False]


def test_gradcheck() -> None:
    draw = Draw(torch.float64, seed=2)
    current, old, ref = (-draw.uniform(0.1, 2.0, 4, 5) for _ in range(3))
    rewards, mask = draw.normal(4), draw.mask(0.7, 4, 5)

    def function(value: torch.Tensor) -> torch.Tensor:
        return grpo_loss(value, old, ref, rewards, mask, group_boundaries=[0, 1, 4], beta=0.3).loss

    assert torch.autograd.gradcheck(function, current.requires_grad_())
