"""The public functions of the package: validation, dispatch, and the one autograd.Function behind them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd.graph import increment_version

from rl_kernels.core import validate as check
from rl_kernels.core.dispatch import choose, planned_choice, remembered_choice
from rl_kernels.core.main_grad import gather
from rl_kernels.core.torchlib import (
    autocast_dtype,
    autocast_linear,
    first_order,
    is_asked_for,
    is_looked_at,
    no_lost_derivatives,
)
from rl_kernels.det_gemm import canary
from rl_kernels.det_gemm.op import OPERATOR, describe, describe_dw, ops


def det_gemm(
    a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype | None = None, backend: str | None = None
) -> torch.Tensor:
    """Return ``a @ b``, each row of it a function of that row of ``a`` and of ``b`` alone, bit for bit.

    Products of the operands' dtype are accumulated in FP32 or better, without TF32, in an order that K alone fixes, and
    rounded once to ``out_dtype``. The gradient of ``a`` keeps the same promise. The gradient of ``b`` is a sum over the
    rows: same bits every run, in a chain of 16 rows a step, so that rows with zero gradient appended change no bit.

    Args:
        a: ``[M, K]``, FP32, BF16 or FP16, any strides; differentiable.
        b: ``[K, N]`` in the dtype of ``a``, any strides; differentiable.
        out_dtype: FP32, BF16 or FP16; by default that of the operands. An upstream gradient of another dtype than the
            operands' is rounded to theirs before the two products of the backward pass.
        backend: name of a backend, ``auto``, or None for what is forced elsewhere, if anything.

    Returns:
        ``[M, N]`` in ``out_dtype``.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
        BackendUnavailable: the backend asked for cannot run this call.
        CanaryMismatch: this GPU gives other bits than were recorded for its architecture; seen at the first call.
    """
    chosen = _chosen_for_gemm(a, b, out_dtype, backend)
    no_lost_derivatives("det_gemm", a, b)
    return _product(a, b, out_dtype or a.dtype, chosen)


@remembered_choice
def _chosen_for_gemm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None, backend: str | None) -> str:
    check.tensor("a", a, check.HALF_AND_FLOAT, ndim=2)
    check.tensor("b", b, check.HALF_AND_FLOAT, ndim=2)
    check.shape("b", b, (a.shape[1], b.shape[1]), "K of a by N")
    check.same_dtype(a=a, b=b)
    check.same_device(a=a, b=b)
    _validate_options(out_dtype, backend)
    return choose(OPERATOR, describe(a, b), backend).name


def det_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, backend: str | None = None
) -> torch.Tensor:
    """Return ``x @ weight^T + bias``, each row a function of that row of ``x`` and the parameters alone, bit for bit.

    The product is that of ``det_gemm``; the bias is added in FP32 before the one rounding to the dtype of the operands.
    The weight is read as it lies, never copied or transposed. Where ``weight.main_grad`` exists (FP32, shape of the
    weight, any strides), backward continues the chain of sums in it, in place, and the weight gets no ``.grad``:
    splitting the rows over several backward passes at multiples of 16 then changes no bit of it. What other ops leave
    in ``.grad`` in the same pass, such as an embedding that shares the weight, is added to it at the end (eager only).

    Args:
        x: ``[..., K]``, FP32, BF16 or FP16, any strides, any number of leading dims, none included; differentiable.
        weight: ``[N, K]`` in the dtype of ``x``; differentiable.
        bias: ``[N]`` in the dtype of ``x``, or None; differentiable.
        backend: name of a backend, ``auto``, or None for what is forced elsewhere, if anything.

    Under ``torch.autocast`` the three are first cast to the autocast dtype, as ``F.linear`` does.

    Returns:
        ``[..., N]`` in the dtype of the operands.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
        BackendUnavailable: the backend asked for cannot run this call.
        CanaryMismatch: this GPU gives other bits than were recorded for its architecture; seen at the first call.
    """
    autocast = autocast_dtype(x)
    chosen, plan = _chosen_for_linear(x, weight, bias, autocast, backend)
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is not None:
        check.main_grad("weight.main_grad", main_grad, weight)
    operand, matrix = x, weight
    if autocast is not None:
        operand, matrix, bias = autocast_linear(x, weight, bias)
    no_lost_derivatives("det_linear", operand, matrix, bias)
    canary.guard(operand, chosen)
    if _needs_graph(operand, matrix, bias):
        out = _Linear.apply(operand, matrix, bias, main_grad, chosen, plan)
    else:
        out = _linear(operand, matrix, bias, chosen, plan)
    if main_grad is not None and weight.requires_grad:
        gather("weight", weight, out)
    return out


def _plan(
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    autocast: torch.dtype | None,
    backend: str | None,
) -> Any:
    """Return what a backend has that plans a linear layer for tensors of one kind, or None."""
    make = getattr(OPERATOR.backend(name).load(), "plan_linear", None)
    plain = {type(value) for value in (x, weight, bias)} <= {torch.Tensor, torch.nn.Parameter, type(None)}
    return make(x, weight, bias) if make and plain and autocast is None else None


@planned_choice(_plan)
def _chosen_for_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    autocast: torch.dtype | None,
    backend: str | None,
) -> str:
    check.tensor("x", x, check.HALF_AND_FLOAT, least=1)
    check.tensor("weight", weight, check.HALF_AND_FLOAT, ndim=2)
    check.shape("weight", weight, (weight.shape[0], x.shape[-1]), "N by the last dim of x")
    if bias is not None:
        check.tensor("bias", bias, check.HALF_AND_FLOAT, ndim=1)
        check.shape("bias", bias, weight.shape[:1], "the first dim of weight")
    check.same_device(x=x, weight=weight, bias=bias)
    check.backend_name(backend)
    if autocast is not None:
        x, weight, bias = autocast_linear(x, weight, bias)
    check.same_dtype(x=x, weight=weight, bias=bias)
    return choose(OPERATOR, describe(x, weight.t(), bias), backend).name


def det_gemm_dw(
    a: torch.Tensor,
    dc: torch.Tensor,
    *,
    accumulate_into: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Return ``a^T @ dc``, the gradient of ``b`` in ``det_gemm(a, b)``, or continue it in a buffer.

    The sum over the M rows is a chain of 16 rows a step, in FP32. With ``accumulate_into`` the chain goes on from what
    the buffer holds, so a batch that is split at multiples of 16 rows gives bitwise the gradient of the whole.

    Args:
        a: ``[M, K]``, FP32, BF16 or FP16, any strides.
        dc: ``[M, N]`` in the dtype of ``a``, any strides.
        accumulate_into: ``[K, N]``, FP32, any strides; updated in place and returned.
        out_dtype: FP32, BF16 or FP16; by default that of the operands. With ``accumulate_into`` None or FP32.
        backend: name of a backend, ``auto``, or None for what is forced elsewhere, if anything.

    Returns:
        ``[K, N]`` in ``out_dtype``, or ``accumulate_into``. It carries no gradient.

    Raises:
        TypeError, ValueError: an argument is not as above, or one requires grad while grad mode is on.
        BackendUnavailable: the backend asked for cannot run this call.
        CanaryMismatch: this GPU gives other bits than were recorded for its architecture; seen at the first call.
    """
    check.tensor("a", a, check.HALF_AND_FLOAT, ndim=2)
    check.tensor("dc", dc, check.HALF_AND_FLOAT, ndim=2)
    check.shape("dc", dc, (a.shape[0], dc.shape[1]), "M of a by N")
    check.same_dtype(a=a, dc=dc)
    check.same_device(a=a, dc=dc)
    _validate_options(out_dtype, backend)
    if accumulate_into is not None:
        check.tensor("accumulate_into", accumulate_into, (torch.float32,))
        check.shape("accumulate_into", accumulate_into, (a.shape[1], dc.shape[1]), "K of a by N of dc")
        check.same_device(a=a, accumulate_into=accumulate_into)
        check.own_storage("accumulate_into", accumulate_into)
        if out_dtype not in (None, torch.float32):
            raise ValueError(f"out_dtype: expected None or torch.float32 with accumulate_into, got {out_dtype}")
    _validate_no_grad(a=a, dc=dc, accumulate_into=accumulate_into)
    no_lost_derivatives("det_gemm_dw", a, dc, accumulate_into)
    chosen = choose(OPERATOR, describe_dw(a, dc), backend).name
    canary.guard(a, chosen)
    if accumulate_into is None:
        return ops["weight_gradient"](a, dc, out_dtype or a.dtype, chosen)
    ops["weight_gradient_into"](a, dc, accumulate_into, chosen)
    return accumulate_into


def _validate_options(out_dtype: torch.dtype | None, backend: str | None) -> None:
    if out_dtype is not None:
        check.choice("out_dtype", out_dtype, check.HALF_AND_FLOAT)
    check.backend_name(backend)


def _validate_no_grad(**tensors: torch.Tensor | None) -> None:
    if not torch.is_grad_enabled():
        return
    for name, value in tensors.items():
        if value is not None and value.requires_grad:
            raise ValueError(f"{name}: expected a tensor that does not require grad, det_gemm_dw has no gradient")


def _needs_graph(*values: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(value is not None and value.requires_grad for value in values)


def _product(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, chosen: str) -> torch.Tensor:
    canary.guard(a, chosen)
    if _needs_graph(a, b):
        return _Product.apply(a, b, out_dtype, chosen)
    return ops["forward"](a, b, None, out_dtype, chosen)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, chosen: str, plan: Any) -> torch.Tensor:
    if plan is not None and not is_looked_at():
        found = plan.forward(x, weight, bias)
        if found is not None:
            return found
    out = ops["forward"](_rows(x), weight.t(), bias, x.dtype, chosen)
    # Not a view of it, which autograd would not let anybody change in place.
    return out if x.ndim == 2 else torch.ops.aten._unsafe_view.default(out, (*x.shape[:-1], weight.shape[0]))


def _rows(x: torch.Tensor) -> torch.Tensor:
    # torch.autograd's own vmap, of gradients in batches, knows reshape and not flatten.
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


class _Product(torch.autograd.Function):
    """``a @ b``."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, backend: str) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.backend = backend
        return ops["forward"](a, b, None, out_dtype, backend)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b = ctx.saved_tensors
        dc = upstream.to(a.dtype)
        da = db = None
        if _is_needed(ctx, 0):
            da = first_order(ops["forward"], dc, b.t(), None, a.dtype, ctx.backend)
        if _is_needed(ctx, 1):
            db = first_order(ops["weight_gradient"], a, dc, a.dtype, ctx.backend)
        return da, db, None, None


class _Linear(torch.autograd.Function):
    """``x @ weight^T + bias``; where there is a ``main_grad[N, K]``, backward adds the gradient of the weight to it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        main_grad: torch.Tensor | None,
        backend: str,
        plan: Any,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        # Not saved for backward: it is meant to change in place between this call and its backward pass.
        ctx.main_grad, ctx.backend, ctx.plan = main_grad, backend, plan
        return _linear(x, weight, bias, backend, plan)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dc = upstream.to(x.dtype)
        # A gradient that may be differentiated itself goes the way that refuses it.
        plan = ctx.plan
        if plan is not None and (torch.is_grad_enabled() or is_looked_at()):
            plan = None
        no_lost_derivatives("det_linear", dc, x, weight)
        dx = _input_gradient(dc, x, weight, ctx.backend, plan) if _is_needed(ctx, 0) else None
        dweight = _weight_gradient(dc, x, ctx.main_grad, ctx.backend, plan) if _is_needed(ctx, 1) else None
        dbias = None
        if _is_needed(ctx, 2):
            rows = _rows(dc)
            dbias = first_order(ops["weight_gradient"], rows.new_ones(len(rows), 1), rows, x.dtype, ctx.backend)[0]
        return dx, dweight, dbias, None, None, None


def _is_needed(ctx: Any, number: int) -> bool:
    return ctx.needs_input_grad[number] and is_asked_for(ctx, number)


def _input_gradient(dc: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, backend: str, plan: Any) -> torch.Tensor:
    found = None if plan is None else plan.input_gradient(dc, weight)
    if found is None:
        found = first_order(ops["forward"], _rows(dc), weight, None, x.dtype, backend)
        found = found if x.ndim == 2 else found.view(x.shape)
    return found


def _weight_gradient(
    dc: torch.Tensor, x: torch.Tensor, main_grad: torch.Tensor | None, backend: str, plan: Any
) -> torch.Tensor | None:
    """Return the gradient of the weight, or add it to ``main_grad``."""
    found = None if plan is None else plan.weight_gradient(dc, x, main_grad)
    if main_grad is None:
        return first_order(ops["weight_gradient"], _rows(dc), _rows(x), x.dtype, backend) if found is None else found
    if found is None:
        ops["weight_gradient_into"](_rows(dc), _rows(x), main_grad, backend)
    elif not main_grad.is_inference():
        increment_version(main_grad)
    return None
