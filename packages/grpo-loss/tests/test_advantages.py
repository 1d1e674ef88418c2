"""Advantages: large offsets, equal rewards, groups of any size, boundaries that nobody checked."""

from __future__ import annotations

import pytest
import torch

from rl_kernels.core.operator import Call
from rl_kernels.core.testing import Draw
from rl_kernels.grpo_loss import group_advantages
from rl_kernels.grpo_loss import reference as definition
from rl_kernels.grpo_loss.estimator import Estimator
from rl_kernels.grpo_loss.op import OPERATOR, ops
from rl_kernels.grpo_loss.plan import Numbers, Plan

BACKENDS = [b.name for b in OPERATOR.backends if b.why_not(Call.of(torch.zeros(1))) is None]
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _exact(rewards: torch.Tensor, boundaries: list[int]) -> torch.Tensor:
    return definition.group_advantages(rewards.double(), group_boundaries=boundaries)


@pytest.mark.parametrize("offset", [0.0, 1000.0, -1000.0, 10000.0])
@pytest.mark.parametrize("size", [2, 7, 64])
def test_offset_of_rewards_costs_nothing(offset: float, size: int) -> None:
    rewards = offset + 0.1 * (torch.arange(4 * size) % 3 == 0).float()
    found = group_advantages(rewards, samples_per_prompt=size)
    truth = definition.group_advantages(rewards.double(), samples_per_prompt=size)
    assert (found.double() - truth).abs().max() < 1e-6
    assert truth.abs().max() > 0.5


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("reward", [0.1, -0.1, 1e-30, 1000.1, 0.0])
def test_equal_rewards_and_single_members_give_exactly_zero(dtype: torch.dtype, reward: float) -> None:
    rewards = torch.tensor([reward] * 7 + [3.3], dtype=dtype)
    found = group_advantages(rewards, group_boundaries=[0, 7, 8], eps=1e-30)
    assert found.tolist() == [0.0] * 8
    assert not found.signbit().any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_reward_that_is_no_number_spoils_its_group_alone(bad: float) -> None:
    rewards = Draw(torch.float32, seed=2).normal(12)
    clean = group_advantages(rewards, samples_per_prompt=4)
    rewards[5] = bad
    found = group_advantages(rewards, samples_per_prompt=4)
    assert found[4:8].isnan().all()
    assert torch.equal(found[[0, 1, 2, 3, 8, 9, 10, 11]], clean[[0, 1, 2, 3, 8, 9, 10, 11]])


def test_single_member_that_is_nan_gives_nan() -> None:
    found = group_advantages(torch.tensor([torch.nan, 1.0]), group_boundaries=[0, 1, 2])
    assert found.isnan().tolist() == [True, False]


def test_large_group_among_many_of_one() -> None:
    draw = Draw(torch.float32, seed=3)
    rewards = draw.normal(8000)
    boundaries = [*range(1500), *range(6500, 8001)]
    found = group_advantages(rewards, group_boundaries=boundaries)
    torch.testing.assert_close(found.double(), _exact(rewards, boundaries), rtol=1e-6, atol=1e-7)
    assert (found[:1499] == 0).all()
    assert (found[6500:] == 0).all()
    alone = group_advantages(rewards[1499:6500], group_boundaries=[0, 5001])
    assert torch.equal(found[1499:6500], alone)


def test_group_has_the_same_bits_wherever_it_stands() -> None:
    draw = Draw(torch.float32, seed=4)
    group = 300 + draw.normal(13)
    alone = group_advantages(group, group_boundaries=[0, 13])
    for before, after in ((1, 0), (3, 1), (64, 64), (1000, 7)):
        rewards = torch.cat((draw.normal(before), group, draw.normal(after)))
        boundaries = [0, before, before + 13, *([before + 13 + after] if after else [])]
        found = group_advantages(rewards, group_boundaries=torch.tensor(boundaries))
        assert torch.equal(found[before : before + 13], alone)


@pytest.mark.parametrize("dtype", FLOATS)
def test_dtype(dtype: torch.dtype) -> None:
    rewards = Draw(dtype, seed=5).normal(10)
    found = group_advantages(rewards.requires_grad_(), samples_per_prompt=5)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not found.requires_grad
    assert torch.equal(found, group_advantages(rewards.double(), samples_per_prompt=5).to(found.dtype))


def test_fp64_rewards_keep_fp64_accuracy() -> None:
    rewards = 1000.0 + Draw(torch.float64, seed=7).normal(9)
    shifted = group_advantages(rewards, samples_per_prompt=9)
    torch.testing.assert_close(shifted, _exact(rewards, [0, 9]), rtol=1e-12, atol=1e-12)


def test_no_rewards() -> None:
    assert group_advantages(torch.zeros(0), samples_per_prompt=4).shape == (0,)
    assert group_advantages(torch.zeros(0), group_boundaries=[0]).shape == (0,)
    with pytest.raises(ValueError, match=r"end at 0 .*, got \[0, 0\]"):
        group_advantages(torch.zeros(0), group_boundaries=[0, 0])


@pytest.mark.parametrize("samples", [3, 5, 16])
def test_samples_that_do_not_divide_the_batch_are_refused(samples: int) -> None:
    with pytest.raises(ValueError, match=f"samples_per_prompt: expected a divisor of the 8 rewards, got {samples}"):
        group_advantages(torch.zeros(8), samples_per_prompt=samples)


def test_message_shows_the_first_offsets_of_many() -> None:
    with pytest.raises(ValueError, match=r"got \[1, 2, 3, 4, 5, 6, 7, 8, \.\.\.\]"):
        group_advantages(torch.zeros(100), group_boundaries=range(1, 100))


@pytest.mark.parametrize(
    "boundaries", [[0, 1000], [-50, 2, 9], [3, 2, 1, 0], [5, 5], [2**62, -(2**62)], [0, 4, 10**9, 6], [7, 6]]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_unchecked_boundaries_never_read_out_of_bounds(boundaries: list[int], backend: str) -> None:
    eps = torch.tensor(1e-6, dtype=torch.float64)
    # What lies beside the rewards is never read: a NaN there would come out.
    around = torch.full((18,), torch.nan)
    rewards = around[6:12].copy_(Draw(torch.float32, seed=6).normal(6))
    found = ops["advantages"](rewards, torch.tensor(boundaries), 0, eps, Estimator().text, backend)
    assert found.shape == (6,)
    assert torch.equal(rewards, Draw(torch.float32, seed=6).normal(6))
    mask, numbers = torch.ones(6, 2, dtype=torch.bool), torch.tensor(Numbers(eps=1e-6), dtype=torch.float64)
    scores, others = (rewards, torch.tensor(boundaries), 0, None), (None, None, None, None, 0)
    texts = (Plan().text, Estimator().text, False)
    call = (torch.zeros(6, 2), None, None, *scores, mask, *others, numbers, *texts, backend)
    *_, count, slope = ops["forward_grad"](*call)
    assert count == 12
    assert slope.shape == (6, 2)
