"""log_softmax and mean by the rules of PyTorch; the order of a row's sum depends on its length alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.constants import SEGMENT
from rl_kernels.core.dispatch import choose
from rl_kernels.core.gpu import device_of
from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.core.rowwise.sums import tree_sum
from rl_kernels.core.torchlib.scalars import scalar
from rl_kernels.core.triton_lib.launch import ceil_div, launch
from rl_kernels.fused_logp.op import OPERATOR, describe, ops
from rl_kernels.models.fused.conditions import fits

BLOCK = 4096
"""Elements per program."""
MOST_ROWS = 64
"""Most rows per program."""
AT_ONCE = 256
"""Elements of a row that a program loads at a time."""


def log_probabilities(x: torch.Tensor, dim: int, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return log_softmax over any dim, bitwise identical to ``fused_logp``; contiguous, without a gradient.

    The largest value of a row is subtracted before the log of its sum, so large values lose no precision. Computed in
    FP32 (FP64 for FP64) and rounded once. A row that is all -inf, or holds NaN or +inf, gives NaN.

    Args:
        x: FP32, BF16, FP16 or FP64, any strides, any number of dims.
        dim: the dim of a row.
        out_dtype: dtype of the result; by default that of ``x``.

    Raises:
        TypeError, IndexError: an argument is not as above; the message names it.
    """
    check.tensor("input", x, check.FLOATS)
    place = one_dim(dim, x.ndim)
    out_dtype = out_dtype or x.dtype
    if not x.numel():
        return x.new_empty(x.shape, dtype=out_dtype)
    turned = x.movedim(place, -1) if x.ndim else x.reshape(1)
    rows = turned.reshape(-1, turned.shape[-1])
    chosen = choose(OPERATOR, describe(rows)).name
    work = compute_dtype(x.dtype)
    ids = torch.zeros(rows.shape[0], dtype=torch.int64, device=x.device)
    _, norm = ops["forward"](rows, ids, scalar(1.0, work), None, None, None, chosen)
    result = _minus_norm(rows, norm, out_dtype).view(turned.shape)
    return result.movedim(-1, place).contiguous() if x.ndim else result[0]


def _minus_norm(rows: torch.Tensor, norm: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``rows[N, V] - norm[:, 0] - norm[:, 1]``, never above 0, rounded once."""
    if not fits(rows):
        return (rows.to(norm.dtype) - norm[:, :1]).sub_(norm[:, 1:]).clamp_(max=0).to(dtype)
    from rl_kernels.models.clients.batch_invariant_ops import kernels

    out = rows.new_empty(rows.shape, dtype=dtype)
    count, columns = rows.shape
    with device_of(rows):
        grid = count, ceil_div(columns, BLOCK)
        launch(kernels.log_softmax, grid, rows, norm, out, columns, *rows.stride(), BLOCK, num_warps=8)
    return out


def log_softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return ``log_probabilities(x, dim)``, differentiable."""
    if isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled():
        result: torch.Tensor = _LogSoftmax.apply(x, dim)
        return result
    return log_probabilities(x, dim)


class _LogSoftmax(torch.autograd.Function):
    """``log_probabilities`` with PyTorch's gradient, which depends on the row alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
        out = log_probabilities(x, dim)
        ctx.save_for_backward(out)
        ctx.dim, ctx.dtype = dim, x.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (out,) = ctx.saved_tensors
        return torch.ops.aten._log_softmax_backward_data(grad, out, ctx.dim, ctx.dtype), None


def mean(
    x: torch.Tensor, dim: int | Sequence[int] | None, keepdim: bool, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the mean over some dims, or over all dims if dim is None or empty; differentiable.

    The sum is a tree over segments of the elements in the order of the dims. Computed in FP32 (FP64 if ``x`` or
    ``dtype`` is) and rounded once. The mean of no elements is NaN.

    Args:
        x: floating-point, or with a ``dtype`` also integer; any strides.
        dim: dims, counted from either end.
        keepdim: keep the reduced dims, with size 1.
        dtype: floating-point dtype of the result; by default that of ``x``.

    Raises:
        TypeError, ValueError, IndexError: an argument is not as above; the message names it.
    """
    if x.is_complex() or (dtype is None and not x.is_floating_point()):
        raise TypeError(f"input: expected a floating dtype, or integers and a floating dtype argument, got {x.dtype}")
    dtype = dtype or x.dtype
    if not dtype.is_floating_point:
        raise TypeError(f"dtype: expected a floating dtype, got {dtype}")
    reduced = dims(dim, x.ndim)
    remaining = [place for place in range(x.ndim) if place not in reduced]
    count = 1
    for place in reduced:
        count *= x.shape[place]
    rows = x.permute([*remaining, *reduced]).reshape([*(x.shape[place] for place in remaining), count])
    work = torch.float64 if torch.float64 in (x.dtype, dtype) else torch.float32
    if _fits_triton(rows, dtype):
        result = _row_means(rows, dtype)
    else:
        total = tree_sum(rows.to(work))
        # Divide by a tensor: for a Python number PyTorch on a GPU multiplies by the reciprocal, which rounds twice.
        result = (total / total.new_full((), count)).to(dtype)
    return result.view([1 if place in reduced else size for place, size in enumerate(x.shape)]) if keepdim else result


def _fits_triton(x: torch.Tensor, dtype: torch.dtype) -> bool:
    if x.requires_grad and torch.is_grad_enabled():
        return False
    return dtype in check.HALF_AND_FLOAT and bool(x.numel()) and fits(x)


def _row_means(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``tree_sum(x[..., n]) / n`` in a dtype, bitwise identical to the PyTorch path."""
    from rl_kernels.models.clients.batch_invariant_ops import kernels

    rows = x.reshape(-1, x.shape[-1])
    count, columns = rows.shape
    width = 1 << (min(columns, SEGMENT) - 1).bit_length()
    at = min(width, AT_ONCE)
    segments, rows_per_program = ceil_div(columns, width), min(BLOCK // width, MOST_ROWS)
    out, whole = x.new_empty(x.shape[:-1], dtype=dtype), segments == 1
    sums = out if whole else x.new_empty((count, segments), dtype=torch.float32)
    with device_of(x):
        grid = (ceil_div(count, rows_per_program) * segments,)
        sizes = count, columns, *rows.stride(), segments
        levels = at.bit_length() - 1
        launch(kernels.segment_sums, grid, rows, sums, *sizes, rows_per_program, width, at, levels, whole, num_warps=4)
        if not whole:
            grid = (ceil_div(count, MOST_ROWS),)
            launch(kernels.means, grid, sums, out, count, segments, columns, MOST_ROWS, num_warps=2)
    return out


def dims(dim: int | Sequence[int] | None, ndim: int) -> list[int]:
    """Return the indices of dims in ascending order; all dims for None or an empty list."""
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return list(range(ndim))
    places = sorted(one_dim(d, ndim) for d in ([dim] if isinstance(dim, int) else dim))
    if len(set(places)) < len(places):
        raise ValueError(f"dim: expected each dim once, got {tuple(dim) if not isinstance(dim, int) else dim}")
    # PyTorch lets a tensor without dims have dim 0.
    return places if ndim else []


def one_dim(dim: int, ndim: int) -> int:
    """Return the index of a dim that may be counted from the end."""
    check.integer("dim", dim)
    most = max(ndim, 1)
    if not -most <= dim < most:
        raise IndexError(f"dim: expected a dim from {-most} to {most - 1}, got {dim}")
    return dim % most
