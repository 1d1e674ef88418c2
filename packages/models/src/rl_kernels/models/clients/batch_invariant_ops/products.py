"""Products of matrices by the rules of ``torch.mm``, ``addmm`` and ``bmm``, on ``det_gemm``.

A row of a product depends on that row of the left operand and on the right operand alone. ``det_gemm`` does not take
FP64: on a CPU it is summed in blocks of one fixed size, on a GPU it is refused.
"""

from __future__ import annotations

import torch

from rl_kernels.core import fp64
from rl_kernels.core import validate as check
from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.core.torchlib.ops import as_native
from rl_kernels.det_gemm import det_gemm, det_linear

Number = int | float


def is_exact(*tensors: torch.Tensor) -> bool:
    """Say whether all tensors are integers: their sums are not rounded, so any order has the same bits."""
    return not any(value.is_floating_point() or value.is_complex() for value in tensors)


def matrices(
    left: str, a: torch.Tensor, right: str, b: torch.Tensor, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return ``a[M, K] @ b[K, N]`` in ``out_dtype``, by default the dtype of the operands.

    Args:
        left: name of ``a`` in messages.
        a: FP32, BF16 or FP16, on a CPU FP64 too; any strides.
        right: name of ``b`` in messages.
        b: in the dtype and on the device of ``a``, any strides.
        out_dtype: FP32, BF16 or FP16; for FP64 None or FP64.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
    """
    _check(left, a, right, b, ndim=2)
    if a.dtype != torch.float64:
        return det_gemm(a, b, out_dtype=out_dtype)
    if out_dtype not in (None, torch.float64):
        raise ValueError(f"out_dtype: expected None or torch.float64 for FP64 operands, got {out_dtype}")
    result: torch.Tensor = as_native(fp64.matmul, a, b)
    return result


def batches(
    left: str, a: torch.Tensor, right: str, b: torch.Tensor, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return ``a[B, M, K] @ b[B, K, N]``: B products by ``matrices``, with its arguments and errors."""
    _check(left, a, right, b, ndim=3)
    if a.shape[0] != b.shape[0]:
        raise ValueError(f"{right}: expected {a.shape[0]} matrices (as many as {left}), got {b.shape[0]}")
    count, rows, inner = a.shape
    if count and not b.stride(0):
        # One matrix for the whole batch, such as a weight that matmul expanded: a single product with more rows.
        product = matrices(left, a.reshape(count * rows, inner), right, b[0], out_dtype)
        return product.view(count, rows, b.shape[2])
    out = a.new_empty((count, rows, b.shape[2]), dtype=out_dtype)
    for place in range(count):
        out[place] = matrices(left, a[place], right, b[place], out_dtype)
    return out


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return ``det_linear`` in the dtype of its operands, also under autocast: the caller decides about casts."""
    with torch.autocast(x.device.type, enabled=False):
        return det_linear(x, weight, bias)


def affine(
    bias: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    beta: Number = 1,
    alpha: Number = 1,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return ``beta * bias + alpha * (a @ b)``, computed in FP32 (FP64 for FP64) and rounded once.

    Args:
        bias: any shape that broadcasts to ``[M, N]``, in the dtype of ``a`` or in ``out_dtype``; not read if beta is 0.
        a: ``[M, K]``, dtypes as for ``matrices``; messages call it ``mat1``.
        b: ``[K, N]`` in the dtype of ``a``; messages call it ``mat2``.
        beta: a real number.
        alpha: a real number.
        out_dtype: as for ``matrices``.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
    """
    for name, number in (("beta", beta), ("alpha", alpha)):
        if isinstance(number, complex):
            raise TypeError(f"{name}: expected a real number, got {number}")
    _check("mat1", a, "mat2", b, ndim=2)
    _check_bias(bias, a, b, out_dtype)
    if beta == 0 and alpha == 1:
        return matrices("mat1", a, "mat2", b, out_dtype)
    plain = beta == 1 and alpha == 1 and bias.dtype == a.dtype != torch.float64
    if plain and out_dtype in (None, a.dtype) and bias.shape == b.shape[1:]:
        return linear(a, b.t(), bias)
    # The steps of det_linear's epilogue: a bias expanded over all rows gives the same bits as a bias ``[N]``.
    total = matrices("mat1", a, "mat2", b, compute_dtype(a.dtype))
    # Each step rounds: vector code does not use a fused multiply-add for every element.
    if alpha != 1:
        total = total * alpha
    if beta != 0:
        term = bias.to(total.dtype)
        total = total + (term if beta == 1 else term * beta)
    return total.to(out_dtype or a.dtype)


def _check(left: str, a: torch.Tensor, right: str, b: torch.Tensor, ndim: int) -> None:
    fits = a.ndim == b.ndim == ndim and a.dtype == b.dtype and a.device == b.device and a.shape[-1] == b.shape[-2]
    if fits and a.dtype in check.HALF_AND_FLOAT:
        return
    dtypes = check.FLOATS if a.device.type == "cpu" else check.HALF_AND_FLOAT
    check.tensor(left, a, dtypes, ndim=ndim)
    check.tensor(right, b, dtypes, ndim=ndim)
    check.same_dtype(**{left: a, right: b})
    check.same_device(**{left: a, right: b})
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"{right}: expected {a.shape[-1]} rows (the columns of {left}), got shape {tuple(b.shape)}")


def _check_bias(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None) -> None:
    if bias.dtype not in (a.dtype, out_dtype):
        raise TypeError(f"input: expected dtype {a.dtype} (that of mat1), got {bias.dtype}")
    check.same_device(mat1=a, input=bias)
    expected = (a.shape[0], b.shape[1])
    sizes = zip(reversed(bias.shape), reversed(expected), strict=False)
    if bias.ndim > len(expected) or any(size not in (1, whole) for size, whole in sizes):
        raise ValueError(f"input: expected a shape that broadcasts to {expected}, got {tuple(bias.shape)}")
