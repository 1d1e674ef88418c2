"""Activations of experts in PyTorch, forward and backward; an element's bits do not depend on its position.

Forward steps are computed in FP32 and rounded to the dtype of gate and up, as a model's own modules round them. The
library's sigmoid and SiLU are left out: on a CPU their bits depend on an element's place in a vector.
"""

from __future__ import annotations

import math

import torch

from rl_kernels.moe.reference import LIMIT, SLOPE

NAMES = ("silu", "gelu_tanh", "clamped_swiglu")
CUBIC, TWICE = 0.044715, 2 * math.sqrt(2 / math.pi)
"""Constants of the tanh form of GELU, https://arxiv.org/abs/1606.08415; the second one doubled."""


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Return ``1 / (1 + e^-x)`` of FP32 values."""
    # Clamped, because the exponential would overflow.
    return 1 / (1 + (-x).clamp(max=80).exp())


def activate(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return ``act(gate) * up``, or ``(up + 1) * gate * sigmoid(1.702 gate)`` of bounded ones: ``clamped_swiglu``."""
    dtype = gate.dtype
    gate, up = gate.float(), up.float()
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        inner = sigmoid((gate * SLOPE).to(dtype).float()).to(dtype).float()
        return ((up + 1).to(dtype).float() * (gate * inner).to(dtype).float()).to(dtype)
    return (_act(gate, activation).to(dtype).float() * up).to(dtype)


def activate_backward(
    dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of gate and up in FP32, from that of the activation, ``dh``, in FP32."""
    gate, up = gate.float(), up.float()
    if activation == "clamped_swiglu":
        bounded, other = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT) + 1
        dgate = torch.where(gate <= LIMIT, dh * other * _slope(bounded, activation), 0.0)
        return dgate, torch.where(up.abs() <= LIMIT, dh * _act(bounded, activation), 0.0)
    return dh * up * _slope(gate, activation), dh * _act(gate, activation)


def _act(x: torch.Tensor, activation: str) -> torch.Tensor:
    return x * sigmoid(_argument(x, activation))


def _slope(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Return the derivative of ``_act``."""
    inner = sigmoid(_argument(x, activation))
    factor: torch.Tensor | float = SLOPE if activation == "clamped_swiglu" else 1.0
    if activation == "gelu_tanh":
        factor = TWICE * (1 + 3 * CUBIC * (x * x))
    return inner + x * factor * inner * (1 - inner)


def _argument(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Return the a of ``x sigmoid(a)``, which each activation is; ``1 + tanh(b) = 2 sigmoid(2b)``."""
    if activation == "gelu_tanh":
        return TWICE * (x + CUBIC * (x * x * x))
    return x * SLOPE if activation == "clamped_swiglu" else x
