"""The definition against numbers worked out by hand, in FP64; test_objectives has the formulas of the losses."""

from __future__ import annotations

import math

import pytest
import torch

from rl_kernels.grpo_loss.reference import group_advantages, grpo_loss

pytestmark = pytest.mark.smoke
CURRENT = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -0.25, -3.0]], dtype=torch.float64)
LOG_RATIO = torch.tensor([[0.5, -0.5, 0.1], [0.5, -0.5, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, True, False]])
REWARDS = torch.tensor([1.0, 3.0], dtype=torch.float64)
"""Mean 2, deviation 1: advantages -1 and 1."""


def test_advantages_worked_out_by_hand() -> None:
    rewards = torch.tensor([5.0, 1.0, 3.0, 2.0, 2.0, 4.0, 8.0], dtype=torch.float64)
    found = group_advantages(rewards, group_boundaries=[0, 1, 3, 7])
    spread = math.sqrt((4 + 4 + 0 + 16) / 4)
    assert found.tolist() == [0.0, -1.0, 1.0, -2 / spread, -2 / spread, 0.0, 4 / spread]


def test_masked_positions_are_never_read() -> None:
    ref = CURRENT + 0.2 * LOG_RATIO
    tensors = (CURRENT, CURRENT - LOG_RATIO, ref)
    clean = grpo_loss(*tensors, REWARDS, MASK, samples_per_prompt=2, beta=0.1)
    for garbage in (torch.nan, torch.inf, -torch.inf, 1e300):
        current, old, ref = (value.masked_fill(~MASK, garbage) for value in tensors)
        current.requires_grad_()
        found = grpo_loss(current, old, ref, REWARDS, MASK, samples_per_prompt=2, beta=0.1)
        assert found == clean
        assert [value.requires_grad for value in found] == [True, False, False]
        (grad,) = torch.autograd.grad(found.loss, current)
        assert grad.isfinite().all()
        assert (grad[~MASK] == 0).all()
