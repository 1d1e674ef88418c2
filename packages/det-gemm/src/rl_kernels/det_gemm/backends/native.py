"""det_gemm in PyTorch: products in FP64 on blocks of one shape, so that no library call depends on the row count.

The reduction order is the contract of this backend. An element of the forward product is one FP64 sum over K, rounded
once to FP32; the bias is added in FP32, and the result is rounded to the output dtype. With segments each is such a
sum, and a tree adds them in FP32. An element of the weight gradient is a chain of FP32 additions, one for each 16
tokens in ascending order; each adds an FP64 sum rounded to FP32.
"""

from __future__ import annotations

import torch

from rl_kernels.core import rowwise
from rl_kernels.det_gemm.chains import joined
from rl_kernels.det_gemm.segments import bounds, merged


def forward(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """Return ``a[M, K] @ b[K, N] + bias[N]`` in ``out_dtype``."""
    product = rowwise.matmul(a, b)
    if bias is not None:
        product += bias
    return product.to(out_dtype)


def segmented(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype, segments: int, length: int
) -> torch.Tensor:
    """Return ``a[M, K] @ b[K, N] + bias[N]`` in ``out_dtype``, K in segments whose sums a tree merges."""
    return merged(a, b, bias, out_dtype, bounds(a.shape[1], segments, length), rowwise.matmul)


def weight_gradient(a: torch.Tensor, dc: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Return ``a[M, K]^T @ dc[M, N]`` in ``out_dtype``."""
    total = a.new_zeros((a.shape[1], dc.shape[1]), dtype=rowwise.compute_dtype(a.dtype))
    return rowwise.chain_dw(a, dc, total).to(out_dtype)


def weight_gradient_into(a: torch.Tensor, dc: torch.Tensor, out: torch.Tensor) -> None:
    """Add ``a[M, K]^T @ dc[M, N]`` to ``out[K, N]``, which may have any strides."""
    rowwise.chain_dw(a, dc, out)


def joined_into(a: torch.Tensor, dc: torch.Tensor, out: torch.Tensor, join_tokens: int) -> None:
    """Add chains of ``join_tokens`` rows of ``a[M, K]^T @ dc[M, N]`` to ``out[K, N]``."""
    joined(a, dc, out, join_tokens, weight_gradient)


def segmented_into(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, segments: int, length: int) -> None:
    """Write the FP32 sum of ``segmented`` to ``out[M, N]``."""
    out.copy_(segmented(a, b, None, torch.float32, segments, length))
