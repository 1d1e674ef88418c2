"""The raw ops of the backends whose launches are prepared: a ``Product`` of core for each kind of operands."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from rl_kernels.core.calls import Launches, prepared
from rl_kernels.det_gemm.chains import prepare_chains


def raw_ops(product: Any) -> tuple[prepared, ...]:
    """Return the raw ops of a backend, in the order of ``op.SCHEMAS``; ``product`` is its class ``Product``."""
    makers = (_forward, _segmented, _segmented_into, _weight_gradient, _weight_gradient_into, _joined_into)
    return tuple(prepared(partial(make, product)) for make in makers)


def _forward(
    product: Any, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> Launches:
    """Return ``a[M, K] @ weight[N, K]^T + bias[N]`` in ``out_dtype``."""
    return _segmented(product, a, weight, bias, out_dtype, 1, 0)


def _segmented(
    product: Any,
    a: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    segments: int,
    length: int,
) -> Launches:
    """Return the product of ``_forward``, K in segments whose chains a tree merges."""
    shape, cut = (*a.shape[:-1], weight.shape[0]), {"segments": segments, "length": length}
    multiply = product(a, weight, a.new_empty(shape, dtype=out_dtype), bias, b_transposed=True, **cut)

    def launch(a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *_: Any) -> torch.Tensor:
        out = a.new_empty(*shape, dtype=out_dtype)
        multiply(a, weight, out, bias)
        return out

    return launch


def _segmented_into(
    product: Any, a: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, segments: int, length: int
) -> Launches:
    """Write the FP32 sum of ``_segmented`` to ``out[M, N]``."""
    multiply = product(a, weight, out, b_transposed=True, segments=segments, length=length)
    return lambda a, weight, out, *_: multiply(a, weight, out)


def _weight_gradient(product: Any, a: torch.Tensor, dc: torch.Tensor, out_dtype: torch.dtype) -> Launches:
    """Return ``a[M, K]^T @ dc[M, N]`` in ``out_dtype``."""
    shape = a.shape[-1], dc.shape[-1]
    multiply = product(a, dc, a.new_empty(shape, dtype=out_dtype), a_transposed=True)

    def launch(a: torch.Tensor, dc: torch.Tensor, _: torch.dtype) -> torch.Tensor:
        out = a.new_empty(*shape, dtype=out_dtype)
        multiply(a, dc, out)
        return out

    return launch


def _weight_gradient_into(product: Any, a: torch.Tensor, dc: torch.Tensor, out: torch.Tensor) -> Launches:
    """Continue the chain of ``a[M, K]^T @ dc[M, N]`` in ``out[K, N]``, which may have any strides."""
    multiply: Launches = product(a, dc, out, a_transposed=True, continues=True)
    return multiply


def _joined_into(product: Any, a: torch.Tensor, dc: torch.Tensor, out: torch.Tensor, join_tokens: int) -> Launches:
    """Add chains of ``join_tokens`` rows of ``a[M, K]^T @ dc[M, N]`` to ``out[K, N]``."""
    return prepare_chains(a, dc, join_tokens, partial(_weight_gradient, product))
