"""The differentiable layers of ``parallel``: products of a rank's part of a weight, and the exchange of their sums."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from rl_kernels.core.distributed import all_gather, group_rank, group_size, reduce_product
from rl_kernels.core.saved import save
from rl_kernels.core.torchlib.derivatives import first_order, no_lost_derivatives
from rl_kernels.core.torchlib.observed import ops_are_observed
from rl_kernels.det_gemm.autograd import (
    LinearOptions,
    Sums,
    bias_gradient,
    flat_rows,
    gradients,
    is_needed,
    plain_linear,
)
from rl_kernels.det_gemm.op import ops

PLAIN = Sums()
"""The sums of a layer that are not cut."""


class Cut(NamedTuple):
    """The cut of a sum over ranks.

    Attributes:
        group: the ranks, or None for one process.
        segments: number of segments of this rank.
        length: terms of a segment.
        scatter_dim: dim along which each rank keeps its slice of the sum, or None for the whole sum.
    """

    group: ProcessGroup | None
    segments: int
    length: int
    scatter_dim: int | None

    def product(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        shape: tuple[int, ...],
        backend: str,
        plan: Any,
    ) -> torch.Tensor:
        """Return ``a @ b + bias`` in the dtype of ``a`` and in ``shape``, summed over ranks, or this rank's slice.

        ``plan`` is the plan of the layer, or None; its ``segmented_into`` says whether it launched the product.
        """
        if ops_are_observed():
            plan = None
        if self.group is None:
            if plan is not None:
                out = a.new_empty(shape)
                if plan.segmented_into(a, b, out.view(len(a), -1), bias, self.segments, self.length):
                    return out
            return ops["segmented"](a, b, bias, a.dtype, self.segments, self.length, backend).view(shape)

        def write(part: torch.Tensor, first: int, end: int) -> None:
            rows = a[first:end]
            if plan is None or not plan.segmented_into(rows, b, part, None, self.segments, self.length):
                ops["segmented_into"](rows, b, part, self.segments, self.length, backend)

        options: dict[str, Any] = {"scatter_dim": self.scatter_dim, "bias": bias, "dtype": a.dtype}
        return reduce_product(write, shape, a, self.group, **options)


class ShardOptions(NamedTuple):
    """The arguments of a parallel layer that have no gradient.

    Attributes:
        main_grad: FP32 buffer to which backward adds the gradient of this rank's weight, or None.
        backend: name of the backend.
        plan: the backend's plan for operands of this kind, or None.
        cut: the cut of the sum over ranks.
    """

    main_grad: torch.Tensor | None
    backend: str
    plan: Any
    cut: Cut

    def of_weight(self) -> LinearOptions:
        """Return the options of ``gradients`` for this rank's weight."""
        return LinearOptions(self.main_grad, self.backend, self.plan, PLAIN)


def layer(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: ShardOptions,
    *,
    of_columns: bool,
) -> torch.Tensor:
    """Return the output of a column-parallel or a row-parallel layer."""
    function = _Column if of_columns else _Row
    if not (torch.is_grad_enabled() and any(v is not None and v.requires_grad for v in (x, weight, bias))):
        return function.output(x, weight, bias, options)
    out: torch.Tensor = function.apply(x, weight, bias, options)
    return out


class _Column(torch.autograd.Function):
    """``x @ weight^T + bias`` for a rank's rows of the weight."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, options: ShardOptions
    ) -> torch.Tensor:
        save(ctx, x, weight)
        # main_grad is not saved for backward: it is meant to change in place between this call and its backward pass.
        ctx.options = options
        return _Column.output(x, weight, bias, options)

    @staticmethod
    def output(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, options: ShardOptions) -> torch.Tensor:
        """Return the output of the layer; it needs no exchange."""
        return plain_linear(x, weight, bias, options.backend, options.plan, PLAIN)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        no_lost_derivatives("column_parallel_linear", upstream, x, weight)
        options: ShardOptions = ctx.options
        dc = upstream.to(x.dtype)
        dx = None
        if is_needed(ctx, 0):
            dx = first_order(
                _column_input_gradient, flat_rows(dc), weight, x, options.cut, options.backend, options.plan
            )
        _, dweight = gradients(dc, x, weight, options.of_weight(), (False, is_needed(ctx, 1)))
        return dx, dweight, bias_gradient(dc, x, options.backend) if is_needed(ctx, 2) else None, None


def _column_input_gradient(
    dc: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, cut: Cut, backend: str, plan: Any
) -> torch.Tensor:
    """Return the gradient of x, or zeros around this rank's slice of it."""
    part = cut.product(dc, weight, None, x.shape, backend, plan)
    if cut.scatter_dim is None or cut.group is None:
        return part
    whole = part.new_zeros(x.shape)
    whole.chunk(group_size(cut.group), cut.scatter_dim)[group_rank(cut.group)].copy_(part)
    return whole


class _Row(torch.autograd.Function):
    """The sum over ranks of ``x @ weight^T``, plus bias."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, options: ShardOptions
    ) -> torch.Tensor:
        save(ctx, x, weight)
        ctx.options = options
        return _Row.output(x, weight, bias, options)

    @staticmethod
    def output(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, options: ShardOptions) -> torch.Tensor:
        """Return the sum over ranks."""
        _, backend, plan, cut = options
        total = cut.product(flat_rows(x), weight.t(), bias, (*x.shape[:-1], weight.shape[0]), backend, plan)
        # Not a view: autograd would forbid in-place changes of a view.
        return torch.ops.aten._unsafe_view.default(total, tuple(total.shape)) if total._is_view() else total

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        no_lost_derivatives("row_parallel_linear", upstream, x, weight)
        options: ShardOptions = ctx.options
        cut, dc = options.cut, upstream.to(x.dtype)
        if cut.scatter_dim is not None and cut.group is not None:
            dc = first_order(all_gather, dc, cut.group, cut.scatter_dim)
        needed = is_needed(ctx, 0), is_needed(ctx, 1)
        dx, dweight = gradients(dc, x, weight, options.of_weight(), needed)
        return dx, dweight, bias_gradient(dc, x, options.backend) if is_needed(ctx, 2) else None, None
