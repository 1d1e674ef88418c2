"""The definition of rms_norm and layer_norm in plain PyTorch; the gold when its inputs are FP64."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rl_kernels.norm.results import NormAndSum


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    offset: float = 0.0,
    cast_first: bool = True,
) -> torch.Tensor | NormAndSum:
    """Return ``x / sqrt(mean(x^2) + eps) * (weight + offset)``, for ``x + residual`` if there is one.

    A gate multiplies it by ``silu(gate)``.
    """
    total, row = _summed(x, residual)
    row = row * torch.rsqrt(row.square().mean(-1, keepdim=True) + eps)
    dtype = x.dtype
    if cast_first and weight is not None:
        dtype = torch.promote_types(x.dtype, weight.dtype)
        row = row.to(x.dtype).to(row.dtype)
    if weight is not None:
        row = row * (weight.to(row.dtype) + offset)
    if gate is not None:
        if cast_first:
            row = row.to(dtype).to(row.dtype)
        row, dtype = row * F.silu(gate.to(row.dtype)), x.dtype
    return _result(row.to(dtype), total, residual)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
) -> torch.Tensor | NormAndSum:
    """Return ``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias``, for ``x + residual`` if there is one."""
    total, row = _summed(x, residual)
    row = row - row.mean(-1, keepdim=True)
    row = row * torch.rsqrt(row.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        row = row * weight.to(row.dtype)
    if bias is not None:
        row = row + bias.to(row.dtype)
    return _result(row.to(x.dtype), total, residual)


def _summed(x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum in the dtype of x, and the rounded sum in FP32 (FP64 for FP64)."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    total = x if residual is None else (x.to(dtype) + residual.to(dtype)).to(x.dtype)
    return total, total.to(dtype)


def _result(output: torch.Tensor, total: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor | NormAndSum:
    return output if residual is None else NormAndSum(output, total)
