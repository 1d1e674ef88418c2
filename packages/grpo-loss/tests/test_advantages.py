"""Advantages of equal and missing rewards, sizes that do not fit, and unchecked boundaries.

That a group's bits do not depend on other groups is checked by the transform ``groups`` of the cases.
"""

from __future__ import annotations

import pytest
import torch

from rl_kernels.core.operator import Call
from rl_kernels.core.testing import Draw
from rl_kernels.grpo_loss import group_advantages
from rl_kernels.grpo_loss.call import Estimator, Formula, Numbers
from rl_kernels.grpo_loss.op import OPERATOR, ops

BACKENDS = [b.name for b in OPERATOR.backends if b.why_not(Call.of(torch.zeros(1))) is None]
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("dtype", FLOATS)
def test_equal_rewards_and_single_members_give_exactly_zero(dtype: torch.dtype) -> None:
    for reward in (0.1, -0.1, 1e-30, 1000.1, 0.0):
        rewards = torch.tensor([reward] * 7 + [3.3], dtype=dtype)
        result = group_advantages(rewards, group_boundaries=[0, 7, 8], eps=1e-30)
        assert result.tolist() == [0.0] * 8
        assert not result.signbit().any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nonfinite_reward_makes_its_group_nan(bad: float) -> None:
    rewards = Draw(torch.float32, seed=2).normal(13)
    clean = group_advantages(rewards, group_boundaries=[0, 4, 8, 12, 13])
    rewards[5] = bad
    result = group_advantages(rewards, group_boundaries=[0, 4, 8, 12, 13])
    assert result[4:8].isnan().all()
    assert torch.equal(result[[*range(4), *range(8, 13)]], clean[[*range(4), *range(8, 13)]])
    rewards[12] = torch.nan
    assert group_advantages(rewards, group_boundaries=[0, 4, 8, 12, 13])[12].isnan()


@pytest.mark.smoke
def test_wrong_group_sizes_raise() -> None:
    assert group_advantages(torch.zeros(0), group_boundaries=[0]).shape == (0,)
    for count, groups, message in (
        (0, {"group_boundaries": [0, 0]}, r"end at 0 .*, got \[0, 0\]"),
        (8, {"samples_per_prompt": 3}, "samples_per_prompt: expected a divisor of the 8 rewards, got 3"),
        (8, {"samples_per_prompt": 16}, "samples_per_prompt: expected a divisor of the 8 rewards, got 16"),
        (100, {"group_boundaries": range(1, 100)}, r"got \[1, 2, 3, 4, 5, 6, 7, 8, \.\.\.\]"),
    ):
        with pytest.raises(ValueError, match=message):
            group_advantages(torch.zeros(count), **groups)


@pytest.mark.parametrize(
    "boundaries", [[0, 1000], [-50, 2, 9], [3, 2, 1, 0], [5, 5], [2**62, -(2**62)], [0, 4, 10**9, 6], [7, 6]]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_unchecked_boundaries_never_read_out_of_bounds(boundaries: list[int], backend: str) -> None:
    eps = torch.tensor(1e-6, dtype=torch.float64)
    # What lies beside the rewards is never read: a NaN there would come out.
    around = torch.full((18,), torch.nan)
    rewards = around[6:12].copy_(Draw(torch.float32, seed=6).normal(6))
    result = ops["advantages"](rewards, torch.tensor(boundaries), 0, eps, Estimator().text, backend)
    assert result.shape == (6,)
    assert torch.equal(rewards, Draw(torch.float32, seed=6).normal(6))
    mask, numbers = torch.ones(6, 2, dtype=torch.bool), torch.tensor(Numbers(eps=1e-6), dtype=torch.float64)
    scores, others = (rewards, torch.tensor(boundaries), 0, None), (None, None, None, None, 0)
    texts = (Formula().text, Estimator().text, False)
    call = (torch.zeros(6, 2), None, None, *scores, mask, *others, numbers, *texts, backend)
    *_, count, slope = ops["forward_grad"](*call)
    assert count == 12
    assert slope.shape == (6, 2)
