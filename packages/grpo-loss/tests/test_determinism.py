"""Bits of grpo_loss that no single call's layout shows: its two halves, and blocks of sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_kernels.core.testing import Draw, bits_of, function_of
from rl_kernels.grpo_loss import group_advantages
from rl_kernels.grpo_loss.backends.native import backend as native
from rl_kernels.grpo_loss.op import OPERATOR

grpo_loss = function_of(OPERATOR)
grpo_loss_from_advantages = function_of(OPERATOR, "grpo_loss_from_advantages")

BATCH, LENGTH = 24, 3001
"""More elements than PyTorch gives to one thread, and more than one block."""


def _call(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    draw = Draw(dtype, seed=21)
    current = draw.uniform(1e-3, 1.0, BATCH, LENGTH).log()
    old, ref = ((current + draw.normal(BATCH, LENGTH, scale=scale)).clamp(max=0) for scale in (0.3, 0.1))
    mask = torch.arange(LENGTH) < draw.ids(LENGTH + 1, BATCH)[:, None]
    call = {"current_logps": current.requires_grad_(), "old_logps": old, "ref_logps": ref, "completion_mask": mask}
    return {**call, "rewards": draw.normal(BATCH), "beta": 0.04}


def _results(function: Callable[..., Any], call: dict[str, Any]) -> list[torch.Tensor]:
    found = function(**call)
    return [*(value.detach() for value in found), *torch.autograd.grad(found.loss, call["current_logps"])]


def _same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(bits_of(a), bits_of(b)) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("groups", [{"samples_per_prompt": 8}, {"group_boundaries": [0, 1, 9, 24]}])
@pytest.mark.usefixtures("poisoned_empty")
def test_halves_and_blocks_of_sequences_give_the_bits_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, groups: dict[str, Any]
) -> None:
    call = _call(dtype)
    expected = _results(grpo_loss, {**call, **groups})
    assert all(value.isfinite().all() for value in expected)
    advantages = group_advantages(rewards := call.pop("rewards"), **groups)
    assert _same(_results(grpo_loss_from_advantages, {**call, "advantages": advantages}), expected)
    per_token = advantages[:, None].expand(BATCH, LENGTH)
    assert _same(_results(grpo_loss_from_advantages, {**call, "advantages": per_token}), expected)
    for elements in (1, 5000, 1 << 30):
        monkeypatch.setattr(native, "BLOCK_ELEMENTS", elements)
        assert _same(_results(grpo_loss, {**call, "rewards": rewards, **groups}), expected), elements
