"""The backend ``cuda-sm90`` of det_gemm: the canonical chain by TMA and WGMMA; the tile depends on the shape."""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.core.calls import Launches, prepared
from rl_kernels.core.cuda.gemm.ahead import programs_of, segmented_of
from rl_kernels.core.cuda.gemm.matmul import Product
from rl_kernels.core.cuda.program import Program
from rl_kernels.det_gemm.chains import prepare_chains


@prepared
def forward(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> Launches:
    """Return ``a[M, K] @ b[K, N] + bias[N]`` in ``out_dtype``."""
    return _forward(a, b, bias, out_dtype, 1, 0)


@prepared
def segmented(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype, segments: int, length: int
) -> Launches:
    """Return ``a[M, K] @ b[K, N] + bias[N]`` in ``out_dtype``, K in segments whose chains a tree merges."""
    return _forward(a, b, bias, out_dtype, segments, length)


def _forward(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype, segments: int, length: int
) -> Launches:
    shape = *a.shape[:-1], b.shape[1]
    out = torch.empty(shape, dtype=out_dtype, device="meta")
    product = Product(a, b, out, bias, segments=segments, length=length)

    def launch(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, *_: Any) -> torch.Tensor:
        out = a.new_empty(shape, dtype=out_dtype)
        product(a, b, out, bias)
        return out

    return launch


@prepared
def segmented_into(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, segments: int, length: int) -> Launches:
    """Write the FP32 sum of ``segmented`` to ``out[M, N]``."""
    product = Product(a, b, out, segments=segments, length=length)
    return lambda a, b, out, *_: product(a, b, out)


@prepared
def weight_gradient(a: torch.Tensor, dc: torch.Tensor, out_dtype: torch.dtype) -> Launches:
    """Return ``a[M, K]^T @ dc[M, N]`` in ``out_dtype``."""
    shape = a.shape[-1], dc.shape[-1]
    product = Product(a, dc, torch.empty(shape, dtype=out_dtype, device="meta"), a_transposed=True)

    def launch(a: torch.Tensor, dc: torch.Tensor, _: torch.dtype) -> torch.Tensor:
        out = a.new_empty(shape, dtype=out_dtype)
        product(a, dc, out)
        return out

    return launch


@prepared
def weight_gradient_into(a: torch.Tensor, dc: torch.Tensor, out: torch.Tensor) -> Launches:
    """Continue the chain of ``a[M, K]^T @ dc[M, N]`` in ``out[K, N]``, which may have any strides."""
    return Product(a, dc, out, a_transposed=True, continues=True)


@prepared
def joined_into(a: torch.Tensor, dc: torch.Tensor, out: torch.Tensor, join_tokens: int) -> Launches:
    """Add chains of ``join_tokens`` rows of ``a[M, K]^T @ dc[M, N]`` to ``out[K, N]``."""
    return prepare_chains(a, dc, join_tokens, weight_gradient.prepare)


def programs(arch: str) -> list[Program]:
    """Return the programs to compile for a target: all of them for ``sm_90a``, none for others."""
    return programs_of(arch) + segmented_of(arch)
