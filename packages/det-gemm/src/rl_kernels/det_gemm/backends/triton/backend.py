"""det_gemm in Triton: the canonical chain; the tile depends on the shape."""

from __future__ import annotations

import torch

from rl_kernels.core.triton_lib import gemm
from rl_kernels.det_gemm.chains import add_chains


def forward(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """Return ``a[M, K] @ b[K, N] + bias[N]`` in ``out_dtype``."""
    out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
    gemm.matmul(a, b, out, bias=bias)
    return out


def segmented(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype, segments: int, length: int
) -> torch.Tensor:
    """Return ``a[M, K] @ b[K, N] + bias[N]`` in ``out_dtype``, K in segments whose chains a tree merges."""
    out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
    gemm.matmul(a, b, out, bias=bias, segments=segments, length=length)
    return out


def weight_gradient(a: torch.Tensor, dc: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Return ``a[M, K]^T @ dc[M, N]`` in ``out_dtype``."""
    out = a.new_empty((a.shape[1], dc.shape[1]), dtype=out_dtype)
    gemm.matmul(a.t(), dc, out)
    return out


def weight_gradient_into(a: torch.Tensor, dc: torch.Tensor, out: torch.Tensor) -> None:
    """Continue the chain of ``a[M, K]^T @ dc[M, N]`` in ``out[K, N]``, which may have any strides."""
    gemm.matmul(a.t(), dc, out, continues=True)


def joined_into(a: torch.Tensor, dc: torch.Tensor, out: torch.Tensor, join_tokens: int) -> None:
    """Add chains of ``join_tokens`` rows of ``a[M, K]^T @ dc[M, N]`` to ``out[K, N]``."""
    add_chains(a, dc, out, join_tokens, weight_gradient)


def segmented_into(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, segments: int, length: int) -> None:
    """Write the FP32 sum of ``segmented`` to ``out[M, N]``."""
    out.copy_(segmented(a, b, None, torch.float32, segments, length))
