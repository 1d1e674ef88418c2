"""The calls of the canary (``core.canary``): losses whose kernels use exp, log, sqrt and quotients."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rl_kernels.core.canary import integers, numbers
from rl_kernels.grpo_loss.advantages import group_advantages
from rl_kernels.grpo_loss.api import grpo_loss
from rl_kernels.grpo_loss.objective import Objective

BATCH, TOKENS, SAMPLES = 12, 300, 4
OBJECTIVES = (
    Objective(beta=0.04),
    Objective(loss_type="gspo", beta=0.04, kl_estimator="k2"),
    Objective(loss_type="sapo"),
    Objective(loss_type="vespo"),
)


def results(dtype: torch.dtype, device: torch.device, backend: str) -> Iterator[torch.Tensor]:
    """Yield advantages, losses and metrics."""
    inputs = _inputs(dtype, device)
    yield group_advantages(inputs[3], samples_per_prompt=SAMPLES, backend=backend)
    for objective in OBJECTIVES:
        result = grpo_loss(
            *inputs, samples_per_prompt=SAMPLES, objective=objective, return_metrics=True, backend=backend
        )
        yield from (*result.output, result.metrics)


def gradients(dtype: torch.dtype, device: torch.device, backend: str) -> Iterator[torch.Tensor]:
    """Yield the gradient of the log-probabilities."""
    current, *inputs = _inputs(dtype, device)
    current.requires_grad_()
    for objective in OBJECTIVES:
        result = grpo_loss(current, *inputs, samples_per_prompt=SAMPLES, objective=objective, backend=backend)
        yield from torch.autograd.grad(result.loss, current)


def _inputs(dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Return log-probabilities of three policies, rewards and mask."""
    logps = [numbers(BATCH, TOKENS, salt=salt, dtype=dtype, device=device) - 1.0 for salt in (1, 2, 3)]
    rewards = numbers(BATCH, salt=4, dtype=torch.float32, device=device, scale=2.0)
    return [*logps, rewards, integers(BATCH, TOKENS, below=5, salt=5, device=device) > 0]
