"""det_gemm in PyTorch: products of the CPU's library on blocks of fixed heights (``rl_kernels.core.products``).

The reduction order is the contract of this backend. An element of the forward product is the library's sum over K, with
FP32 accumulation, whose order depends on K, the dtypes and the library alone; the bias is added in FP32, and the result
is rounded to the output dtype. With segments each is such a sum in FP32, and a tree adds them. An element of the weight
gradient is a chain of FP32 additions, one for each 16 tokens in ascending order.
"""

from __future__ import annotations

import torch

from rl_kernels.core import products
from rl_kernels.core.calls import Launches, prepared
from rl_kernels.core.layout import flat_rows
from rl_kernels.det_gemm.chains import add_chains
from rl_kernels.det_gemm.segments import bounds, merge_segments


@prepared
def forward(a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> Launches:
    """Return ``a[M, K] @ weight[N, K]^T + bias[N]`` in ``out_dtype``."""
    multiply = products.prepare(flat_rows(a), weight.t(), bias, out_dtype)
    if a.ndim == 2:
        return lambda a, weight, bias, _: multiply(a, weight.t(), bias)
    return lambda a, weight, bias, _: _shaped(multiply(flat_rows(a), weight.t(), bias), a)


def segmented(
    a: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    segments: int,
    length: int,
) -> torch.Tensor:
    """Return the product of ``forward``, K in segments whose sums a tree merges."""
    if segments == 1:
        return _shaped(products.matmul(flat_rows(a), weight.t(), bias, out_dtype), a)
    cuts = bounds(a.shape[-1], segments, length)
    return _shaped(merge_segments(flat_rows(a), weight.t(), bias, out_dtype, cuts, products.matmul), a)


def _shaped(out: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Return ``out[M, N]`` with the leading dims of ``a``."""
    # Not a view: autograd would forbid in-place changes of a view.
    return out if a.ndim == 2 else torch.ops.aten._unsafe_view.default(out, (*a.shape[:-1], out.shape[1]))


def weight_gradient(a: torch.Tensor, dc: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Return ``a[M, K]^T @ dc[M, N]`` in ``out_dtype``."""
    left, right = flat_rows(a), flat_rows(dc)
    return products.write_dw(left, right, a.new_empty((left.shape[1], right.shape[1]), dtype=out_dtype))


def weight_gradient_into(a: torch.Tensor, dc: torch.Tensor, out: torch.Tensor) -> None:
    """Add ``a[M, K]^T @ dc[M, N]`` to ``out[K, N]``, which may have any strides."""
    products.chain_dw(flat_rows(a), flat_rows(dc), out)


def joined_into(a: torch.Tensor, dc: torch.Tensor, out: torch.Tensor, join_tokens: int) -> None:
    """Add chains of ``join_tokens`` rows of ``a[M, K]^T @ dc[M, N]`` to ``out[K, N]``."""
    add_chains(a, dc, out, join_tokens, weight_gradient)


def segmented_into(a: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, segments: int, length: int) -> None:
    """Write the FP32 sum of ``segmented`` to ``out[M, N]``."""
    out.copy_(segmented(a, weight, None, torch.float32, segments, length))
