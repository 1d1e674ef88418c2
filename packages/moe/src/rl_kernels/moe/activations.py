"""Activations of experts in PyTorch, forward and backward; an element's bits do not depend on its position.

Forward steps are computed in FP32 and rounded to the dtype of gate and up, as a model's own modules round them. The
library's sigmoid and SiLU are left out: on a CPU their bits depend on an element's place in a vector.
"""

from __future__ import annotations

import math

import torch

from rl_kernels.moe.reference import LIMIT, SLOPE

NAMES = ("silu", "gelu_tanh", "clamped_swiglu")
_CUBIC, _SCALE = 0.044715, math.sqrt(2 / math.pi)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Return ``1 / (1 + e^-x)`` of FP32 values."""
    # Clamped, because the exponential would overflow.
    return 1 / (1 + (-x).clamp(max=80).exp())


def activate(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return ``act(gate) * up``, or for ``clamped_swiglu`` ``(up + 1) * gate * sigmoid(1.702 gate)`` of bounded ones."""
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
        bounded, other = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        inner = sigmoid(bounded * SLOPE)
        slope = inner + SLOPE * bounded * inner * (1 - inner)
        dgate = torch.where(gate <= LIMIT, dh * (other + 1) * slope, 0.0)
        return dgate, torch.where(up.abs() <= LIMIT, dh * (bounded * inner), 0.0)
    return dh * up * _slope(gate, activation), dh * _act(gate, activation)


def _act(x: torch.Tensor, activation: str) -> torch.Tensor:
    return x * sigmoid(x) if activation == "silu" else 0.5 * x * (1 + _tanh(x))


def _slope(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Return the derivative of ``_act``."""
    if activation == "silu":
        inner = sigmoid(x)
        return inner * (1 + x * (1 - inner))
    tanh = _tanh(x)
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * _SCALE * (1 + 3 * _CUBIC * x * x)


def _tanh(x: torch.Tensor) -> torch.Tensor:
    return (_SCALE * (x + _CUBIC * x * x * x)).tanh()
