"""The backend ``cuda-sm90`` of det_gemm: the canonical chain by TMA and WGMMA; the tile depends on the shape."""

from __future__ import annotations

import torch

from rl_kernels.core.cuda.gemm.ahead import programs_of, segmented_of
from rl_kernels.core.cuda.gemm.matmul import matmul
from rl_kernels.core.cuda.program import Program
from rl_kernels.det_gemm.backends.cuda_sm90.planned import plan_linear as plan_linear
from rl_kernels.det_gemm.chains import add_chains
from rl_kernels.det_gemm.segments import bounds, merge_segments


def forward(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """Return ``a[M, K] @ b[K, N] + bias[N]`` in ``out_dtype``."""
    out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
    matmul(a, b, out, bias=bias)
    return out


def segmented(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype, segments: int, length: int
) -> torch.Tensor:
    """Return ``a[M, K] @ b[K, N] + bias[N]`` in ``out_dtype``, K in segments whose chains a tree merges."""
    out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
    if matmul(a, b, out, bias=bias, segments=segments, length=length):
        return out
    return merge_segments(a, b, bias, out_dtype, bounds(a.shape[1], segments, length), _chain)


def segmented_into(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, segments: int, length: int) -> None:
    """Write the FP32 sum of ``segmented`` to ``out[M, N]``."""
    if not matmul(a, b, out, segments=segments, length=length):
        out.copy_(merge_segments(a, b, None, torch.float32, bounds(a.shape[1], segments, length), _chain))


def _chain(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = a.new_empty((a.shape[0], b.shape[1]), dtype=torch.float32)
    matmul(a, b, out)
    return out


def weight_gradient(a: torch.Tensor, dc: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Return ``a[M, K]^T @ dc[M, N]`` in ``out_dtype``."""
    out = a.new_empty((a.shape[1], dc.shape[1]), dtype=out_dtype)
    matmul(a.t(), dc, out)
    return out


def weight_gradient_into(a: torch.Tensor, dc: torch.Tensor, out: torch.Tensor) -> None:
    """Continue the chain of ``a[M, K]^T @ dc[M, N]`` in ``out[K, N]``, which may have any strides."""
    matmul(a.t(), dc, out, continues=True)


def joined_into(a: torch.Tensor, dc: torch.Tensor, out: torch.Tensor, join_tokens: int) -> None:
    """Add chains of ``join_tokens`` rows of ``a[M, K]^T @ dc[M, N]`` to ``out[K, N]``."""
    add_chains(a, dc, out, join_tokens, weight_gradient)


def programs(arch: str) -> list[Program]:
    """Return the programs to compile for a target: all of them for ``sm_90a``, none for others."""
    return programs_of(arch) + segmented_of(arch)
