"""The definition of experts in plain PyTorch; the gold when its inputs are FP64."""

from __future__ import annotations

import torch
import torch.nn.functional as F

LIMIT, SLOPE = 7.0, 1.702
"""Bound of gate and up, and factor of the sigmoid's argument, in ``clamped_swiglu``."""


def experts(
    hidden: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    activation: str = "silu",
    interleaved: bool = False,
    transposed: bool = False,
    **_: object,
) -> torch.Tensor:
    """Return ``sum_s weights[t, s] * expert(ids[t, s])(hidden[t]) + shared[t]`` ``[T, D]``.

    Sums are in FP32 (FP64 for FP64 inputs). The outputs of both products, and each step of the activation, are rounded
    to the dtype of ``hidden``.
    """
    dtype = hidden.dtype
    if transposed:
        gate_up, down = gate_up.mT, down.mT
    is_here = ids < gate_up.shape[0]
    chosen = ids.clamp(max=gate_up.shape[0] - 1).long()
    z = torch.einsum("td,tskd->tsk", _wide(hidden), _wide(gate_up)[chosen])
    z = z if gate_up_bias is None else z + _wide(gate_up_bias)[chosen]
    gate, up = split(z.to(dtype), interleaved)
    y = torch.einsum("tsf,tsdf->tsd", _wide(activate(gate, up, activation)), _wide(down)[chosen])
    y = (y if down_bias is None else y + _wide(down_bias)[chosen]).to(dtype)
    y = torch.where(is_here[..., None], _wide(weights).to(_wide(y).dtype)[..., None] * _wide(y), 0.0)
    total = y.sum(1)
    return (total if shared is None else total + _wide(shared)).to(dtype)


def split(z: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gate and up ``[..., F]``, views of ``z[..., 2F]``."""
    if interleaved:
        return z[..., ::2], z[..., 1::2]
    gate, up = z.chunk(2, -1)
    return gate, up


def activate(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return what the second product takes; each step is rounded to the dtype of ``gate``, as models do."""
    if activation == "silu":
        return F.silu(gate) * up
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * SLOPE))


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()
