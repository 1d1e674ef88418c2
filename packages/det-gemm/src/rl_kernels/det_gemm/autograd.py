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
    """How sums are cut: segments of that over K and of that over N, and rows of a chain, None for one chain."""

    k_segments: int = 1
    dx_segments: int = 1
    join_tokens: int | None = None


def product(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, chosen: str, segments: tuple[int, int]
) -> torch.Tensor:
    """Return ``a @ b``; ``segments`` of the sum over K, and of that over N of the gradient of ``a``."""
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        found: torch.Tensor = _Product.apply(a, b, out_dtype, chosen, segments)
        return found
    return _forward(a, b, None, out_dtype, segments[0], chosen)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    main_grad: torch.Tensor | None,
    chosen: str,
    plan: Any,
    sums: Sums,
) -> torch.Tensor:
    """Return ``x @ weight^T + bias``.

    Args:
        plan: a backend's plan for operands of this kind, or None. Its methods ``forward`` and ``gradients`` return None
            for tensors that it has not planned for.
        sums: how the sums are cut.
    """
    requires_grad = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    if requires_grad and torch.is_grad_enabled():
        found: torch.Tensor = _Linear.apply(x, weight, bias, (main_grad, chosen, plan, sums))
        return found
    return plain_linear(x, weight, bias, chosen, plan, sums)


def plain_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    chosen: str,
    plan: Any,
    sums: Sums,
) -> torch.Tensor:
    """Return ``x @ weight^T + bias``, without a gradient."""
    if plan is not None and not ops_are_observed():
        found = plan.forward(x, weight, bias)
        if found is not None:
            return found
    out = _forward(flat_rows(x), weight.t(), bias, x.dtype, sums.k_segments, chosen)
    # Not a view: autograd would forbid in-place changes of a view.
    return out if x.ndim == 2 else torch.ops.aten._unsafe_view.default(out, (*x.shape[:-1], weight.shape[0]))


def flat_rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x[..., K]`` as ``[M, K]``."""
    # The vmap of torch.autograd, for batched gradients, supports reshape but not flatten.
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _forward(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype, segments: int, chosen: str
) -> torch.Tensor:
    if segments == 1:
        return ops["forward"](a, b, bias, out_dtype, chosen)
    return ops["segmented"](a, b, bias, out_dtype, segments, segment_length(a.shape[1], segments), chosen)


def _input_product(dc: torch.Tensor, b: torch.Tensor, segments: int, backend: str) -> torch.Tensor:
    """Return ``dc @ b``, a gradient that cannot be differentiated again."""
    found: torch.Tensor
    if segments == 1:
        found = first_order(ops["forward"], dc, b, None, dc.dtype, backend)
    else:
        length = segment_length(dc.shape[1], segments)
        found = first_order(ops["segmented"], dc, b, None, dc.dtype, segments, length, backend)
    return found


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
    """``x @ weight^T + bias``; with a ``main_grad[N, K]``, backward adds the gradient of the weight to it.

    ``how`` is (main_grad, backend, plan, sums): one argument, because autograd inspects every argument.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        how: tuple[torch.Tensor | None, str, Any, Sums],
    ) -> torch.Tensor:
        save(ctx, x, weight)
        # main_grad is not saved for backward: it is meant to change in place between this call and its backward pass.
        ctx.how = how
        return plain_linear(x, weight, bias, *how[1:])

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        main_grad, backend, plan, sums = ctx.how
        no_lost_derivatives("det_linear", upstream, x, weight)
        needed = is_needed(ctx, 0), is_needed(ctx, 1)
        found = gradients(upstream, x, weight, main_grad, needed, (backend, plan, sums))
        of_bias = bias_gradient(upstream, x, backend, sums.join_tokens) if is_needed(ctx, 2) else None
        return *found, of_bias, None


def is_needed(ctx: Any, number: int) -> bool:
    """Say whether the running backward pass needs the gradient of an argument of an autograd Function."""
    return bool(ctx.needs_input_grad[number]) and is_asked_for(ctx, number)


def gradients(
    upstream: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    main_grad: torch.Tensor | None,
    needed: tuple[bool, bool],
    how: tuple[str, Any, Sums],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of ``x`` and of the weight, None where not needed, or where it is added to ``main_grad``.

    ``how`` is (backend, plan, sums).
    """
    backend, plan, sums = how
    of_x, of_weight = needed
    if of_weight and sums.join_tokens is not None:
        of_rows = _joined(upstream.to(x.dtype), x, main_grad, sums.join_tokens, backend)
        one = Sums(dx_segments=sums.dx_segments)
        return gradients(upstream, x, weight, None, (of_x, False), (backend, plan, one))[0], of_rows
    # With grad mode on, the gradient may be differentiated again: the general path refuses that.
    if plan is not None and not torch.is_grad_enabled() and not ops_are_observed():
        found = plan.gradients(upstream, x, weight, main_grad, needed)
        if found is not None:
            if main_grad is None or not of_weight:
                return found[0], found[1]
            if not main_grad.is_inference():
                increment_version(main_grad)
            return found[0], None
    dc = upstream.to(x.dtype)
    dx = _input_gradient(dc, x, weight, sums.dx_segments, backend) if of_x else None
    return dx, _weight_gradient(dc, x, main_grad, backend) if of_weight else None


def bias_gradient(
    upstream: torch.Tensor, x: torch.Tensor, backend: str, join_tokens: int | None = None
) -> torch.Tensor:
    """Return the sum of the rows of the upstream gradient."""
    rows = flat_rows(upstream.to(x.dtype))
    if join_tokens is not None:
        total = _joined(rows.new_ones(len(rows), 1), rows, None, join_tokens, backend)
        assert total is not None
        return total[0]
    found: torch.Tensor = first_order(ops["weight_gradient"], rows.new_ones(len(rows), 1), rows, x.dtype, backend)
    return found[0]


def _input_gradient(
    dc: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, segments: int, backend: str
) -> torch.Tensor:
    found = _input_product(flat_rows(dc), weight, segments, backend)
    return found if x.ndim == 2 else found.view(x.shape)


def _joined(
    dc: torch.Tensor, x: torch.Tensor, main_grad: torch.Tensor | None, join_tokens: int, backend: str
) -> torch.Tensor | None:
    """Return ``dc^T @ x`` as chains of ``join_tokens`` rows, or add it to ``main_grad``."""
    left, right = flat_rows(dc), flat_rows(x)
    if main_grad is not None:
        ops["joined_into"](left, right, main_grad, join_tokens, backend)
        return None
    found: torch.Tensor = first_order(_sum_of_chains, left, right, join_tokens, backend)
    return found


def _sum_of_chains(dc: torch.Tensor, x: torch.Tensor, join_tokens: int, backend: str) -> torch.Tensor:
    total = x.new_zeros((dc.shape[1], x.shape[1]), dtype=torch.float32)
    ops["joined_into"](dc, x, total, join_tokens, backend)
    return total.to(x.dtype)


def _weight_gradient(
    dc: torch.Tensor, x: torch.Tensor, main_grad: torch.Tensor | None, backend: str
) -> torch.Tensor | None:
    """Return the gradient of the weight, or add it to ``main_grad``."""
    if main_grad is None:
        found: torch.Tensor = first_order(ops["weight_gradient"], flat_rows(dc), flat_rows(x), x.dtype, backend)
        return found
    ops["weight_gradient_into"](flat_rows(dc), flat_rows(x), main_grad, backend)
    return None
