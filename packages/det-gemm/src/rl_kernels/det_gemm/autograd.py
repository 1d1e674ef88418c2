"""The differentiable products: two autograd Functions on the raw ops, or on the plans of a backend."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from rl_kernels.core.saved import save
from rl_kernels.core.torchlib.derivatives import first_order, is_asked_for, no_lost_derivatives
from rl_kernels.core.torchlib.observed import ops_are_observed
from rl_kernels.det_gemm.op import ops
from rl_kernels.det_gemm.segments import segment_length


class Sums(NamedTuple):
    """The cuts of the sums of a linear layer.

    Attributes:
        k_segments: segments of the sum over K, in the forward pass.
        dx_segments: segments of the sum over N, in the gradient of the input.
        join_tokens: rows of a chain of the gradients of weight and bias; None for one chain.
    """

    k_segments: int = 1
    dx_segments: int = 1
    join_tokens: int | None = None


class LinearOptions(NamedTuple):
    """The arguments of a linear layer that have no gradient; one tuple, because autograd inspects every argument.

    Attributes:
        main_grad: FP32 buffer ``[N, K]`` to which backward adds the gradient of the weight, or None.
        backend: name of the backend.
        plan: the backend's plan for operands of this kind, or None.
        sums: the cuts of the sums.
    """

    main_grad: torch.Tensor | None
    backend: str
    plan: Any
    sums: Sums


def product(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, backend: str, segments: tuple[int, int]
) -> torch.Tensor:
    """Return ``a @ b``; ``segments``: of the sum over K, and of the sum over N in the gradient of ``a``."""
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        result: torch.Tensor = _Product.apply(a, b, out_dtype, backend, segments)
        return result
    return _forward(a, b, None, out_dtype, segments[0], backend)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    main_grad: torch.Tensor | None,
    backend: str,
    plan: Any,
    sums: Sums,
) -> torch.Tensor:
    """Return ``x @ weight^T + bias``.

    Args:
        plan: a backend's plan for operands of this kind, or None. Its methods ``forward`` and ``gradients`` return None
            for tensors that it has not planned for.
        sums: the cuts of the sums.
    """
    requires_grad = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    if requires_grad and torch.is_grad_enabled():
        result: torch.Tensor = _Linear.apply(x, weight, bias, LinearOptions(main_grad, backend, plan, sums))
        return result
    return plain_linear(x, weight, bias, backend, plan, sums)


def plain_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    backend: str,
    plan: Any,
    sums: Sums,
) -> torch.Tensor:
    """Return ``x @ weight^T + bias``, without a gradient."""
    if plan is not None and not ops_are_observed():
        planned_out = plan.forward(x, weight, bias)
        if planned_out is not None:
            return planned_out
    out = _forward(flat_rows(x), weight.t(), bias, x.dtype, sums.k_segments, backend)
    # Not a view: autograd would forbid in-place changes of a view.
    return out if x.ndim == 2 else torch.ops.aten._unsafe_view.default(out, (*x.shape[:-1], weight.shape[0]))


def flat_rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x[..., K]`` as ``[M, K]``."""
    # The vmap of torch.autograd, for batched gradients, supports reshape but not flatten.
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _forward(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype, segments: int, backend: str
) -> torch.Tensor:
    if segments == 1:
        return ops["forward"](a, b, bias, out_dtype, backend)
    return ops["segmented"](a, b, bias, out_dtype, segments, segment_length(a.shape[1], segments), backend)


def _input_product(dc: torch.Tensor, b: torch.Tensor, segments: int, backend: str) -> torch.Tensor:
    """Return ``dc @ b``, a gradient that cannot be differentiated again."""
    result: torch.Tensor
    if segments == 1:
        result = first_order(ops["forward"], dc, b, None, dc.dtype, backend)
    else:
        length = segment_length(dc.shape[1], segments)
        result = first_order(ops["segmented"], dc, b, None, dc.dtype, segments, length, backend)
    return result


class _Product(torch.autograd.Function):
    """``a @ b``."""

    @staticmethod
    def forward(
        ctx: Any, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, backend: str, segments: tuple[int, int]
    ) -> torch.Tensor:
        save(ctx, a, b)
        ctx.backend, ctx.dx_segments = backend, segments[1]
        return _forward(a, b, None, out_dtype, segments[0], backend)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b = ctx.saved_tensors
        dc = upstream.to(a.dtype)
        da = db = None
        if is_needed(ctx, 0):
            da = _input_product(dc, b.t(), ctx.dx_segments, ctx.backend)
        if is_needed(ctx, 1):
            db = first_order(ops["weight_gradient"], a, dc, a.dtype, ctx.backend)
        return da, db, None, None, None


class _Linear(torch.autograd.Function):
    """``x @ weight^T + bias``; with ``options.main_grad``, backward adds the gradient of the weight to it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        options: LinearOptions,
    ) -> torch.Tensor:
        save(ctx, x, weight)
        # main_grad is not saved for backward: it is meant to change in place between this call and its backward pass.
        ctx.options = options
        return plain_linear(x, weight, bias, options.backend, options.plan, options.sums)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        options: LinearOptions = ctx.options
        no_lost_derivatives("det_linear", upstream, x, weight)
        needed = is_needed(ctx, 0), is_needed(ctx, 1)
        dx, dweight = gradients(upstream, x, weight, options, needed)
        dbias = None
        if is_needed(ctx, 2):
            dbias = bias_gradient(upstream, x, options.backend, options.sums.join_tokens)
        return dx, dweight, dbias, None


def is_needed(ctx: Any, number: int) -> bool:
    """Say whether the running backward pass needs the gradient of an argument of an autograd Function."""
    return bool(ctx.needs_input_grad[number]) and is_asked_for(ctx, number)


def gradients(
    upstream: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    options: LinearOptions,
    needed: tuple[bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of ``x`` and of the weight: None if not needed, or if it was added to ``main_grad``."""
    main_grad, backend, plan, sums = options
    needs_x, needs_weight = needed
    if needs_weight and sums.join_tokens is not None:
        dweight = _joined_gradient(upstream.to(x.dtype), x, main_grad, sums.join_tokens, backend)
        unjoined = options._replace(main_grad=None, sums=sums._replace(join_tokens=None))
        return gradients(upstream, x, weight, unjoined, (needs_x, False))[0], dweight
    # With grad mode on, the gradient may be differentiated again: the general path refuses that.
    if plan is not None and not torch.is_grad_enabled() and not ops_are_observed():
        planned = plan.gradients(upstream, x, weight, main_grad, needed)
        if planned is not None:
            if main_grad is None or not needs_weight:
                return planned[0], planned[1]
            if not main_grad.is_inference():
                increment_version(main_grad)
            return planned[0], None
    dc = upstream.to(x.dtype)
    dx = _input_gradient(dc, x, weight, sums.dx_segments, backend) if needs_x else None
    return dx, _weight_gradient(dc, x, main_grad, backend) if needs_weight else None


def bias_gradient(
    upstream: torch.Tensor, x: torch.Tensor, backend: str, join_tokens: int | None = None
) -> torch.Tensor:
    """Return the sum of the rows of the upstream gradient."""
    rows = flat_rows(upstream.to(x.dtype))
    if join_tokens is not None:
        total = _joined_gradient(rows.new_ones(len(rows), 1), rows, None, join_tokens, backend)
        assert total is not None
        return total[0]
    column: torch.Tensor = first_order(ops["weight_gradient"], rows.new_ones(len(rows), 1), rows, x.dtype, backend)
    return column[0]


def _input_gradient(
    dc: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, segments: int, backend: str
) -> torch.Tensor:
    dx = _input_product(flat_rows(dc), weight, segments, backend)
    return dx if x.ndim == 2 else dx.view(x.shape)


def _joined_gradient(
    dc: torch.Tensor, x: torch.Tensor, main_grad: torch.Tensor | None, join_tokens: int, backend: str
) -> torch.Tensor | None:
    """Return ``dc^T @ x`` as chains of ``join_tokens`` rows, or add it to ``main_grad``."""
    left, right = flat_rows(dc), flat_rows(x)
    if main_grad is not None:
        ops["joined_into"](left, right, main_grad, join_tokens, backend)
        return None
    total: torch.Tensor = first_order(_sum_of_chains, left, right, join_tokens, backend)
    return total


def _sum_of_chains(dc: torch.Tensor, x: torch.Tensor, join_tokens: int, backend: str) -> torch.Tensor:
    total = x.new_zeros((dc.shape[1], x.shape[1]), dtype=torch.float32)
    ops["joined_into"](dc, x, total, join_tokens, backend)
    return total.to(x.dtype)


def _weight_gradient(
    dc: torch.Tensor, x: torch.Tensor, main_grad: torch.Tensor | None, backend: str
) -> torch.Tensor | None:
    """Return the gradient of the weight, or add it to ``main_grad``."""
    if main_grad is None:
        dw: torch.Tensor = first_order(ops["weight_gradient"], flat_rows(dc), flat_rows(x), x.dtype, backend)
        return dw
    ops["weight_gradient_into"](flat_rows(dc), flat_rows(x), main_grad, backend)
    return None
