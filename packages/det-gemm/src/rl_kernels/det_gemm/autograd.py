"""The differentiable product: one autograd Function on the raw ops, for det_gemm and det_linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from rl_kernels.core.calls import Ready
from rl_kernels.core.saved import save
from rl_kernels.core.torchlib.derivatives import first_order, is_asked_for
from rl_kernels.core.torchlib.ops import Op
from rl_kernels.det_gemm.op import ops
from rl_kernels.det_gemm.segments import segment_length


class Settings(NamedTuple):
    """What a product computes with besides its tensors; one tuple, because autograd inspects every argument.

    Attributes:
        ready: the backend, and its launches of the forward pass.
        out_dtype: dtype of the output.
        k_segments: segments of the sum over K, in the forward pass.
        dx_segments: segments of the sum over N, in the gradient of the left operand.
        join_tokens: rows of a chain of the gradients of weight and bias; None for one chain.
        main_grad: FP32 buffer ``[N, K]`` to which backward adds the gradient of the weight, or None.
        is_linear: whether the right operand is ``weight[N, K]``, used as its transpose, and not ``b[K, N]``.
    """

    ready: Ready
    out_dtype: torch.dtype
    k_segments: int = 1
    dx_segments: int = 1
    join_tokens: int | None = None
    main_grad: torch.Tensor | None = None
    is_linear: bool = True


def needs_graph(*tensors: torch.Tensor | None) -> bool:
    """Say whether autograd must record a call with these tensors."""
    if torch.is_grad_enabled():
        # A loop, because a comprehension takes longer.
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False


def output(x: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None, settings: Settings) -> torch.Tensor:
    """Return ``x[..., K] @ b[K, N] + bias``, without a gradient."""
    weight = right if settings.is_linear else right.t()
    op, args = raw_product(x, weight, bias, settings.out_dtype, settings.k_segments)
    out: torch.Tensor = op.call(settings.ready, *args)
    return out


def raw_product(
    a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype, segments: int
) -> tuple[Op, tuple[Any, ...]]:
    """Return the raw op of ``a @ weight^T + bias``, and its arguments but for the backend."""
    if segments == 1:
        return ops["forward"], (a, weight, bias, out_dtype)
    return ops["segmented"], (a, weight, bias, out_dtype, segments, segment_length(a.shape[-1], segments))


def raw_sum(
    a: torch.Tensor, dc: torch.Tensor, main_grad: torch.Tensor | None, join_tokens: int | None
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the raw op of ``a[M, K]^T @ dc[M, N]``, or of adding it to ``main_grad``, and its arguments likewise."""
    if join_tokens is not None:
        if main_grad is None:
            return _sum_of_chains, (a, dc, join_tokens)
        return ops["joined_into"], (a, dc, main_grad, join_tokens)
    if main_grad is not None:
        return ops["weight_gradient_into"], (a, dc, main_grad)
    return ops["weight_gradient"], (a, dc, a.dtype)


def _sum_of_chains(a: torch.Tensor, dc: torch.Tensor, join_tokens: int, backend: str) -> torch.Tensor:
    total = a.new_zeros((a.shape[-1], dc.shape[-1]), dtype=torch.float32)
    ops["joined_into"](a, dc, total, join_tokens, backend)
    return total.to(a.dtype)


def ones_of_rows(dc: torch.Tensor) -> torch.Tensor:
    """Return the ``[..., 1]`` whose product with ``dc[..., N]`` is the sum of its rows: the gradient of a bias."""
    return dc.new_ones((*dc.shape[:-1], 1))


class Product(torch.autograd.Function):
    """``x @ b + bias``; with ``settings.main_grad``, backward adds the gradient of the weight to it."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None, settings: Settings
    ) -> torch.Tensor:
        """Return the product, and save its operands."""
        save(ctx, x, right)
        # main_grad is not saved for backward: it is meant to change in place between this call and its backward pass.
        ctx.settings = settings
        weight = right if settings.is_linear else right.t()
        op, args = raw_product(x, weight, bias, settings.out_dtype, settings.k_segments)
        out: torch.Tensor = op.call(settings.ready, *args)
        return out

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients; that of the right operand is None if it was added to ``main_grad``."""
        x, right = ctx.saved_tensors
        (backend, _), _, _, dx_segments, join_tokens, main_grad, is_linear = ctx.settings
        dc, dx, dright, dbias = upstream if upstream.dtype == x.dtype else upstream.to(x.dtype), None, None, None
        if ctx.needs_input_grad[0] and is_asked_for(ctx, 0):
            op, args = raw_product(dc, right.t() if is_linear else right, None, dc.dtype, dx_segments)
            dx = first_order(op, *args, backend)
        if ctx.needs_input_grad[1] and is_asked_for(ctx, 1):
            a, b = (dc, x) if is_linear else (x, dc)
            add, args = raw_sum(a, b, main_grad, join_tokens)
            dright = first_order(add, *args, backend)
        if ctx.needs_input_grad[2] and is_asked_for(ctx, 2):
            add, args = raw_sum(ones_of_rows(dc), dc, None, join_tokens)
            dbias = first_order(add, *args, backend)[0]
        return dx, dright, dbias, None
