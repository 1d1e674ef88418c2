"""The exchanges of ``exchange`` with gradients, for a loss that every rank computes alike.

| forward | gradient of ``x`` |
|---|---|
| ``all_reduce``: the sum over ranks | upstream, as it is |
| ``reduce_scatter``: this rank's slice of the sum | the upstreams of all ranks, gathered |
| ``all_gather``: the parts of all ranks | this rank's slice of upstream |
| ``split``: this rank's slice of what all ranks have | the upstreams of all ranks, gathered |
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup

from rl_kernels.core.distributed import exchange
from rl_kernels.core.distributed.groups import group_rank, group_size
from rl_kernels.core.torchlib.derivatives import first_order


def all_gather(x: torch.Tensor, group: ProcessGroup, dim: int = 0) -> torch.Tensor:
    """Return the tensors of all ranks, of one shape, concatenated along ``dim``; differentiable."""
    if not _has_gradient(x):
        return exchange.all_gather(x, group, dim)
    result: torch.Tensor = _AllGather.apply(x, group, dim)
    return result


def split(x: torch.Tensor, group: ProcessGroup, dim: int = 0) -> torch.Tensor:
    """Return this rank's slice along ``dim`` of a tensor that all ranks have; differentiable.

    Raises:
        ValueError: the number of ranks does not divide the size along ``dim``.
    """
    if x.shape[dim] % group_size(group):
        raise ValueError(f"x: expected dim {dim} to divide by {group_size(group)} ranks, got shape {tuple(x.shape)}")
    if not _has_gradient(x):
        return _slice(x, group, dim)
    result: torch.Tensor = _Split.apply(x, group, dim)
    return result


def all_reduce(
    x: torch.Tensor,
    group: ProcessGroup,
    *,
    order: str = "tree",
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the sum over the ranks of ``x[..., N]``: the same bits on each rank, over NCCL and gloo; differentiable.

    Args:
        x: the part of this rank, FP32 for a sum that is rounded once; all ranks have the same shape and dtype.
        group: the ranks.
        order: ``tree``, a balanced binary tree in the order of ranks; ``chain``, one rank after the other.
        bias: ``[N]``, added once to the sum; the same on all ranks. It gets no gradient.
        dtype: dtype of the result, to which the sum is rounded once; None is the dtype of ``x``.

    Raises:
        ValueError: ``order`` is none of these, or ``bias`` requires grad.
    """
    _check_bias(bias)
    options = {"order": order, "bias": bias, "dtype": dtype}
    if not _has_gradient(x):
        return exchange.all_reduce(x, group, **options)  # type: ignore[arg-type]
    result: torch.Tensor = _AllReduce.apply(x, group, options)
    return result


def reduce_scatter(
    x: torch.Tensor,
    group: ProcessGroup,
    *,
    dim: int = 0,
    order: str = "tree",
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return this rank's slice along ``dim`` of what ``all_reduce`` returns; differentiable.

    Raises:
        ValueError: as in ``all_reduce``, or the number of ranks does not divide the size along ``dim``.
    """
    _check_bias(bias)
    options = {"dim": dim, "order": order, "bias": bias, "dtype": dtype}
    if not _has_gradient(x):
        return exchange.reduce_scatter(x, group, **options)  # type: ignore[arg-type]
    result: torch.Tensor = _ReduceScatter.apply(x, group, options)
    return result


def _has_gradient(x: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def _check_bias(bias: torch.Tensor | None) -> None:
    if bias is not None and _has_gradient(bias):
        raise ValueError("bias: expected a tensor that does not require grad: it gets no gradient here")


def _slice(x: torch.Tensor, group: ProcessGroup, dim: int) -> torch.Tensor:
    return x.chunk(group_size(group), dim)[group_rank(group)].contiguous()


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return exchange.all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return first_order(_slice, upstream, ctx.group, ctx.dim), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return _slice(x, group, dim)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return first_order(exchange.all_gather, upstream, ctx.group, ctx.dim), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup, options: dict[str, Any]) -> torch.Tensor:
        ctx.dtype = x.dtype
        return exchange.all_reduce(x, group, **options)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return upstream.to(ctx.dtype), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup, options: dict[str, Any]) -> torch.Tensor:
        ctx.dtype, ctx.group, ctx.dim = x.dtype, group, options["dim"]
        return exchange.reduce_scatter(x, group, **options)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return first_order(exchange.all_gather, upstream.to(ctx.dtype), ctx.group, ctx.dim), None, None
