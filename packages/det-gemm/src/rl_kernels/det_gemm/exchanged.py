"""The differentiable layers of ``parallel``: products of a rank's part of a weight, and the exchange of their sums."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from rl_kernels.core.distributed import all_gather, group_rank, group_size, reduce_product
from rl_kernels.core.layout import flat_rows
from rl_kernels.core.saved import save
from rl_kernels.core.torchlib.derivatives import first_order, is_asked_for
from rl_kernels.det_gemm.autograd import Settings, needs_graph, ones_of_rows, output, raw_product, raw_sum
from rl_kernels.det_gemm.op import ops


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
        self, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, shape: tuple[int, ...], backend: str
    ) -> torch.Tensor:
        """Return ``a @ weight^T + bias`` in the dtype of ``a`` and in ``shape``: summed over ranks, or a slice."""
        if self.group is None:
            out: torch.Tensor = ops["segmented"](a, weight, bias, a.dtype, self.segments, self.length, backend)
            return out

        rows = flat_rows(a)

        def write(part: torch.Tensor, first: int, end: int) -> None:
            ops["segmented_into"](rows[first:end], weight, part, self.segments, self.length, backend)

        options: dict[str, Any] = {"scatter_dim": self.scatter_dim, "bias": bias, "dtype": a.dtype}
        return reduce_product(write, shape, a, self.group, **options)


def layer(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    settings: Settings,
    cut: Cut,
    *,
    of_columns: bool,
) -> torch.Tensor:
    """Return the output of a column-parallel or a row-parallel layer."""
    out: torch.Tensor
    if needs_graph(x, weight, bias):
        out = _Parallel.apply(x, weight, bias, settings, cut, of_columns)
    else:
        out = _output(x, weight, bias, settings, cut, of_columns)
    return out


def _output(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, settings: Settings, cut: Cut, of_columns: bool
) -> torch.Tensor:
    """Return the output of a layer; that of a column-parallel one needs no exchange."""
    if of_columns:
        return output(x, weight, bias, settings)
    shape = (*x.shape[:-1], weight.shape[0])
    total = cut.product(x, weight, bias, shape, settings.ready.backend)
    # Not a view: autograd would forbid in-place changes of a view.
    return torch.ops.aten._unsafe_view.default(total, tuple(total.shape)) if total._is_view() else total


class _Parallel(torch.autograd.Function):
    """``x @ weight^T + bias`` for a rank's rows of the weight, or the sum of these products over ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        settings: Settings,
        cut: Cut,
        of_columns: bool,
    ) -> torch.Tensor:
        save(ctx, x, weight)
        # main_grad is not saved for backward: it is meant to change in place between this call and its backward pass.
        ctx.settings, ctx.cut, ctx.of_columns = settings, cut, of_columns
        return _output(x, weight, bias, settings, cut, of_columns)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        cut, backend, dc, dx = ctx.cut, ctx.settings.ready.backend, upstream.to(x.dtype), None
        if not ctx.of_columns and cut.scatter_dim is not None and cut.group is not None:
            dc = first_order(all_gather, dc, cut.group, cut.scatter_dim)
        if _is_needed(ctx, 0) and ctx.of_columns:
            dx = first_order(_column_input_gradient, dc, weight, x, cut, backend)
        elif _is_needed(ctx, 0):
            op, args = raw_product(dc, weight.t(), None, dc.dtype, 1)
            dx = first_order(op, *args, backend)
        return dx, *_gradients_of_parameters(ctx, dc, x), None, None, None


def _column_input_gradient(
    dc: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, cut: Cut, backend: str
) -> torch.Tensor:
    """Return the gradient of x, or zeros around this rank's slice of it."""
    part = cut.product(dc, weight.t(), None, x.shape, backend)
    if cut.scatter_dim is None or cut.group is None:
        return part
    whole = part.new_zeros(x.shape)
    whole.chunk(group_size(cut.group), cut.scatter_dim)[group_rank(cut.group)].copy_(part)
    return whole


def _is_needed(ctx: Any, number: int) -> bool:
    return bool(ctx.needs_input_grad[number]) and is_asked_for(ctx, number)


def _gradients_of_parameters(
    ctx: Any, dc: torch.Tensor, x: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of this rank's weight and bias: None if not needed, or if it was added to ``main_grad``."""
    settings: Settings = ctx.settings
    dweight = dbias = None
    if _is_needed(ctx, 1):
        add, args = raw_sum(dc, x, settings.main_grad, None)
        dweight = first_order(add, *args, settings.ready.backend)
    if _is_needed(ctx, 2):
        add, args = raw_sum(ones_of_rows(dc), dc, None, None)
        dbias = first_order(add, *args, settings.ready.backend)[0]
    return dweight, dbias
