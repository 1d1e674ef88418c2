"""The gates of a Gated DeltaNet: decays and strengths in FP32, with one definition wherever the model runs."""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.core.rowwise.sums import sum_over_rows
from rl_kernels.core.saved import save
from rl_kernels.core.torchlib.derivatives import first_order
from rl_kernels.models import activations
from rl_kernels.models.fused import delta_gates


def gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log decays ``-exp(a_log) softplus(a + dt_bias)`` and strengths ``sigmoid(b)``, both FP32.

    The formula is that of https://arxiv.org/abs/2412.06464. Gradients of a_log and dt_bias are sums over the tokens in
    steps of 16: a tree for each, steps in ascending order. Steps without a gradient change no bit.

    Args:
        a: ``[B, T, Hv]``, differentiable.
        b: ``[B, T, Hv]``, differentiable.
        a_log: ``[Hv]``, differentiable.
        dt_bias: ``[Hv]``, differentiable.
    """
    if not torch.is_grad_enabled() or not any([x.requires_grad for x in (a, b, a_log, dt_bias)]):
        return _gates(a, b, a_log, dt_bias)
    result: tuple[torch.Tensor, torch.Tensor] = _Gates.apply(a, b, a_log, dt_bias)
    return result


def _gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if delta_gates.takes(a, b, a_log, dt_bias):
        return delta_gates.delta_gates(a, b, a_log, dt_bias)
    decays = -a_log.float().exp() * activations.softplus(a.float() + dt_bias.float())
    return decays, activations.sigmoid(b.float())


class _Gates(torch.autograd.Function):
    """Saves the operands, which are small: a number for each token and head."""

    @staticmethod
    def forward(ctx: Any, *operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        save(ctx, *operands)
        return _gates(*operands)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        operands = ctx.saved_tensors
        results = first_order(_gates_backward, *grads, *operands)
        return tuple(value.to(x.dtype) for value, x in zip(results, operands, strict=True))


def _gates_backward(
    grad_decays: torch.Tensor,
    grad_strengths: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    if delta_gates.takes(a, b, a_log, dt_bias):
        return delta_gates.delta_gates_backward(grad_decays, grad_strengths, a, b, a_log, dt_bias)
    decays, strengths = _gates(a, b, a_log, dt_bias)
    slopes = activations.sigmoid(a.float() + dt_bias.float())
    grad_a = -a_log.float().exp() * slopes * grad_decays
    grad_b = grad_strengths * strengths * (1 - strengths)
    rows = torch.cat((grad_decays * decays, grad_a), -1).flatten(0, -2)
    grad_a_log, grad_bias = sum_over_rows(rows, rows.new_zeros(rows.shape[1])).chunk(2)
    return grad_a, grad_b, grad_a_log, grad_bias
