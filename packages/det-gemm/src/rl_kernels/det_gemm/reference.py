"""The definition of det_gemm in plain PyTorch; the gold when its inputs are FP64."""

from __future__ import annotations

import torch


def det_gemm(a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype | None = None, **_: int) -> torch.Tensor:
    """Return ``a[M, K] @ b[K, N]``, computed in FP32 (FP64 for FP64 inputs), then rounded to ``out_dtype``.

    Segments do not change what a product is.
    """
    return (_wide(a) @ _wide(b)).to(out_dtype or a.dtype)


def det_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **_: int) -> torch.Tensor:
    """Return ``x[..., K] @ weight[N, K]^T + bias[N]``, rounded to the dtype of ``x`` after the bias is added."""
    product = _wide(x) @ _wide(weight).t()
    return (product if bias is None else product + _wide(bias)).to(x.dtype)


def det_gemm_dw(
    a: torch.Tensor,
    dc: torch.Tensor,
    *,
    accumulate_into: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **_: int,
) -> torch.Tensor:
    """Return ``a[M, K]^T @ dc[M, N]``, added to a copy of ``accumulate_into``, in its dtype, if it is given."""
    product = _wide(a).t() @ _wide(dc)
    if accumulate_into is not None:
        return accumulate_into + product.to(accumulate_into.dtype)
    return product.to(out_dtype or a.dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()
