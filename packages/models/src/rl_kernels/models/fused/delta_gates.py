"""The gates of a Gated DeltaNet in one launch, instead of PyTorch's eight; backward in two."""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.core.constants import STEP
from rl_kernels.core.gpu import device_of
from rl_kernels.core.triton_lib.launch import ceil_div, launch, next_power_of_2
from rl_kernels.models.fused.conditions import fits

BLOCK = 1024


def takes(*operands: Any) -> bool:
    """Say whether the launches can take a, b, A_log and dt_bias."""
    a, b, a_log, dt_bias = operands
    fitting = fits(a, b) and fits(a_log) and fits(dt_bias) and bool(a.numel())
    return fitting and a.device == a_log.device == dt_bias.device


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``-exp(a_log) softplus(a + dt_bias)`` and ``sigmoid(b)`` of ``a, b[B, T, Hv]``, FP32; no gradient."""
    from rl_kernels.models.fused import kernels

    a, b = a.contiguous(), b.contiguous()
    decays, strengths = torch.empty_like(a, dtype=torch.float32), torch.empty_like(b, dtype=torch.float32)
    with device_of(a):
        grid = (ceil_div(a.numel(), BLOCK),)
        launch(
            kernels.delta_gates_forward,
            grid,
            *(a, b, a_log, dt_bias, decays, strengths),
            numbers=(a.numel(), a.shape[-1], BLOCK),
            num_warps=4,
        )
    return decays, strengths


def delta_gates_backward(
    grad_decays: torch.Tensor,
    grad_strengths: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of a and b, in their dtype, and of a_log and dt_bias, in FP32."""
    from rl_kernels.models.fused import kernels

    a, b, grad_decays, grad_strengths = (
        x.resolve_neg().contiguous() for x in (a, b, grad_decays.float(), grad_strengths.float())
    )
    heads, rows = a.shape[-1], a.numel() // a.shape[-1]
    width, steps = next_power_of_2(heads), ceil_div(rows, STEP)
    grad_a, grad_b = torch.empty_like(a), torch.empty_like(b)
    sums, totals = (a.new_empty((n, 2, heads), dtype=torch.float32) for n in (steps, 1))
    with device_of(a):
        operands = (a, b, a_log, dt_bias, grad_decays, grad_strengths, grad_a, grad_b, sums)
        launch(kernels.delta_gates_backward, (steps,), *operands, numbers=(rows, heads, width, STEP), num_warps=4)
        launch(kernels.delta_gates_sums, (2,), sums, totals, numbers=(steps, heads, width, STEP), num_warps=4)
    return grad_a, grad_b, totals[0, 0], totals[0, 1]
