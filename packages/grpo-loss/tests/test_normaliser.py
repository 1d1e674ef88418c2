"""Counts that divide: 0 gives a loss of 0 where no token is active; tensors are checked like numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rl_kernels.core.operator import Call
from rl_kernels.grpo_loss import (
    METRICS,
    Extras,
    Normaliser,
    Objective,
    grpo_loss,
    grpo_loss_from_advantages,
    sequence_losses,
)
from rl_kernels.grpo_loss.op import OPERATOR
from rl_kernels.grpo_loss.plan import FORMS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CALL = Call.of(torch.zeros(1, device=DEVICE))
BACKENDS = [backend.name for backend in OPERATOR.backends if backend.why_not(CALL) is None]
ZEROS: tuple[Any, ...] = (0, 0.0, torch.tensor(0), torch.tensor(0.0, dtype=torch.float64), torch.tensor(0.0).bfloat16())


def count_of(loss_type: str, value: Any) -> Normaliser:
    name = "num_tokens" if FORMS[loss_type].mean == "tokens" else "num_sequences"
    return Normaliser(**{name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (3, 0)])
@pytest.mark.parametrize("loss_type", FORMS)
def test_no_active_token_and_a_count_of_0_give_0(loss_type: str, shape: tuple[int, int], backend: str) -> None:
    tokens, rows = torch.full(shape, torch.nan, device=DEVICE), torch.full(shape[:1], torch.nan, device=DEVICE)
    mask = torch.zeros(shape, dtype=torch.bool, device=DEVICE)
    objective = Objective(loss_type=loss_type, beta=0.1, kl_correction=True)
    options: dict[str, Any] = {"objective": objective, "backend": backend}
    options["extras"] = Extras(rollout_ratio=rows, entropy=tokens)
    for zero in ZEROS if backend == "native" else ZEROS[2:3]:
        options["normaliser"] = count_of(loss_type, zero)
        current = tokens.clone().requires_grad_()
        output, metrics = grpo_loss_from_advantages(current, tokens, tokens, rows, mask, **options, return_metrics=True)
        losses = sequence_losses(current, tokens, tokens, rows, mask, **options)
        (output.loss + losses.sum()).backward()
        for found in (*output, metrics, losses, current.grad):
            assert not found.any(), (zero, found)


@pytest.mark.parametrize("loss_type", ["dapo", "dr_grpo"])
def test_packed_rewards_without_active_tokens(loss_type: str) -> None:
    current = torch.full((5,), torch.nan, device=DEVICE, requires_grad=True)
    mask, rewards = torch.zeros(5, dtype=torch.bool, device=DEVICE), torch.rand(2, device=DEVICE)
    options: dict[str, Any] = {"loss_type": loss_type, "normaliser": count_of(loss_type, mask.sum())}
    extras = Extras(cu_seqlens=torch.tensor([0, 0, 5], device=DEVICE))
    loss = grpo_loss(current, None, None, rewards, mask, samples_per_prompt=2, extras=extras, **options).loss
    loss.backward()
    assert loss == 0
    assert not current.grad.any()


@pytest.mark.parametrize("wrong", [-5, math.nan, math.inf, 0])
def test_wrong_counts_are_refused_and_without_validate_not_read(wrong: float) -> None:
    logps = torch.zeros(2, 3)
    given = (logps, None, None, torch.ones(2), torch.tensor([[True, False, False]] * 2))
    count = Normaliser(num_tokens=torch.tensor(wrong))
    for function in (grpo_loss_from_advantages, sequence_losses):
        with pytest.raises(ValueError, match="num_tokens: expected a"):
            function(*given, normaliser=count)
        function(*given, normaliser=count, validate=False)


def test_a_share_of_the_tokens_may_be_below_1_as_number_and_tensor() -> None:
    # One token, of two ranks: TRL divides by the tokens of a rank on average.
    given = (torch.zeros(1, 1), None, None, torch.ones(1), torch.ones(1, 1, dtype=torch.bool))
    for half in (0.5, torch.tensor(0.5)):
        assert grpo_loss_from_advantages(*given, normaliser=Normaliser(num_tokens=half)).loss == -2


@pytest.mark.parametrize("backend", BACKENDS)
def test_effective_samples_are_0_where_all_ratios_underflow(backend: str) -> None:
    current, mask = torch.full((2, 3), -300.0, device=DEVICE), torch.ones(2, 3, dtype=torch.bool, device=DEVICE)
    given = (current, torch.zeros_like(current), None, torch.ones(2, device=DEVICE), mask)
    _, metrics = grpo_loss_from_advantages(*given, return_metrics=True, backend=backend)
    assert metrics[METRICS.index("effective_samples")] == 0
    assert metrics.isfinite().all()
