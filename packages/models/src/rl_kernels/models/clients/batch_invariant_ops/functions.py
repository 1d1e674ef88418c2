"""The functions of batch_invariant_ops and its copies; they work without the mode and are differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from rl_kernels import norm
from rl_kernels.core import validate as check
from rl_kernels.det_gemm import det_gemm, det_linear
from rl_kernels.models.clients.batch_invariant_ops import products, reductions

ATTENTION_BLOCK = 64
"""Number of queries, and of keys, in a block of ``det_attention``."""


def matmul_persistent(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``a @ b + bias``; each row depends on that row of ``a``, on b and bias alone, bit for bit.

    Args:
        a: ``[M, K]``, FP32, BF16 or FP16, any strides; differentiable.
        b: ``[K, N]`` in the dtype of ``a``, any strides; differentiable.
        bias: ``[N]`` in that dtype, added in FP32 before the one rounding, or None; differentiable.

    Returns:
        ``[M, N]`` in the dtype of ``a``.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
    """
    check.tensor("a", a, check.HALF_AND_FLOAT, ndim=2)
    check.tensor("b", b, check.HALF_AND_FLOAT, ndim=2)
    check.shape("b", b, (a.shape[1], b.shape[1]), "K of a by N")
    check.same_dtype(a=a, b=b)
    if bias is None:
        return det_gemm(a, b)
    check.tensor("bias", bias, check.HALF_AND_FLOAT, ndim=1)
    return products.linear(a, b.t(), bias)


def mm_batch_invariant(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``matmul_persistent(a, b)``, which documents shapes, dtypes and errors."""
    return matmul_persistent(a, b)


def addmm_batch_invariant(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``matmul_persistent(a, b, bias)``, which documents shapes, dtypes and errors."""
    return matmul_persistent(a, b, bias)


def linear_batch_invariant(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``det_linear(input[..., K], weight[N, K], bias[N])``, which documents dtypes and errors."""
    return det_linear(input, weight, bias)


def bmm_batch_invariant(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``a[b] @ b[b]`` for each of the B pairs of matrices, one ``det_gemm`` each.

    Args:
        a: ``[B, M, K]``, FP32, BF16 or FP16, any strides; differentiable without ``out``.
        b: ``[B, K, N]`` in the dtype of ``a``, any strides; differentiable without ``out``. One matrix expanded over B
            is multiplied with all rows at once.
        out: ``[B, M, N]`` in that dtype, overwritten and returned, or None.

    Returns:
        ``[B, M, N]`` in the dtype of ``a``.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
    """
    check.tensor("a", a, check.HALF_AND_FLOAT, ndim=3)
    check.tensor("b", b, check.HALF_AND_FLOAT, ndim=3)
    result = products.batches("a", a, "b", b)
    if out is None:
        return result
    check.tensor("out", out, (a.dtype,))
    check.shape("out", out, result.shape, "B by M of a by N of b")
    check.same_device(a=a, out=out)
    return out.copy_(result)


def log_softmax(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Return log_softmax of each row, bitwise identical to ``fused_logp`` for each token.

    Args:
        input: FP32, BF16, FP16 or FP64, any strides; differentiable.
        dim: the dim of a row; any dim, where the original takes only the last.

    Returns:
        contiguous, in the shape and dtype of ``input``; computed in FP32 (FP64 for FP64).

    Raises:
        TypeError, IndexError: an argument is not as above; the message names it.
    """
    return reductions.log_softmax(input, dim)


def mean_dim(
    input: torch.Tensor, dim: int | Sequence[int], keepdim: bool = False, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the mean over one dim, or over several.

    Args:
        input: floating-point or integer, any shape, any strides; differentiable.
        dim: dims, counted from either end; an empty list means all.
        keepdim: keep the reduced dims, with size 1.
        dtype: floating-point dtype of the result; by default that of ``input``, FP32 for integers.

    Returns:
        the mean, computed in FP32 (FP64 if ``input`` or ``dtype`` is) and rounded once.

    Raises:
        TypeError, ValueError, IndexError: an argument is not as above; the message names it.
    """
    if not isinstance(input, torch.Tensor):
        raise TypeError(f"input: expected a tensor, got {type(input).__name__}")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype: expected a torch.dtype or None, got {type(dtype).__name__}")
    if dtype is None and products.is_exact(input):
        dtype = torch.float32
    return reductions.mean(input, dim, keepdim, dtype)


def mean_batch_invariant(
    input: torch.Tensor, dim: Sequence[int], keepdim: bool = False, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return ``mean_dim`` over a list of dims, with its arguments and errors."""
    return mean_dim(input, dim, keepdim, dtype)


def rms_norm(input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Return ``input / sqrt(mean(input^2) + eps) * weight`` over the last dim, rounded once.

    Args:
        input: ``[..., D]``, FP32, BF16, FP16 or FP64, any strides; differentiable.
        weight: ``[D]``, in any of these dtypes (FP64 only if input is FP64); differentiable.
        eps: added to the mean of squares, >= 0.

    Returns:
        ``[..., D]`` in the dtype of ``input``.

    Raises:
        TypeError, ValueError: an argument is not as above; the message of ``rl_kernels.norm.rms_norm`` names it;
            it calls ``input`` x.
    """
    return norm.rms_norm(input, weight, eps=eps, cast_first=False)


def rms_norm_batch_invariant(input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Return ``rms_norm(input, weight, eps)``, with its arguments and errors."""
    return rms_norm(input, weight, eps)


class AttentionBlockSize(NamedTuple):
    """Number of queries (``block_m``) and keys (``block_n``) in a tile of an attention."""

    block_m: int
    block_n: int


def get_batch_invariant_attention_block_size() -> AttentionBlockSize:
    """Return the block sizes of ``det_attention``, which do not depend on the batch."""
    return AttentionBlockSize(ATTENTION_BLOCK, ATTENTION_BLOCK)
