"""The exchanges of ``exchange`` with gradients, for a loss that every rank computes alike.

| forward | gradient of ``x`` |
|---|---|
| ``all_reduce``: the sum over ranks | upstream, as it is |
| ``reduce_scatter``: this rank's slice of the sum | the upstreams of all ranks, gathered |
| ``all_gather``: the parts of all ranks | this rank's slice of upstream |
| ``split``: this rank's slice of what all ranks have | the upstreams of all ranks, gathered |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed import ProcessGroup

from rl_kernels.core.distributed import exchange
from rl_kernels.core.distributed.groups import group_rank, group_size
from rl_kernels.core.torchlib.derivatives import first_order


def all_gather(x: torch.Tensor, group: ProcessGroup, dim: int = 0) -> torch.Tensor:
    """Return the tensors of all ranks, of one shape, concatenated along ``dim``; differentiable."""
    return _exchanged(x, partial(exchange.all_gather, group=group, dim=dim), _slice, group, dim)


def split(x: torch.Tensor, group: ProcessGroup, dim: int = 0) -> torch.Tensor:
    """Return this rank's slice along ``dim`` of a tensor that all ranks have; differentiable.

    Raises:
        ValueError: the number of ranks does not divide the size along ``dim``.
    """
    if x.shape[dim] % group_size(group):
        raise ValueError(f"x: expected dim {dim} to divide by {group_size(group)} ranks, got shape {tuple(x.shape)}")
    return _exchanged(x, partial(_slice, group=group, dim=dim), exchange.all_gather, group, dim)


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
    return _exchanged(x, partial(exchange.all_reduce, group=group, order=order, bias=bias, dtype=dtype))


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
    run = partial(exchange.reduce_scatter, group=group, dim=dim, order=order, bias=bias, dtype=dtype)
    return _exchanged(x, run, exchange.all_gather, group, dim)


def _has_gradient(x: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def _check_bias(bias: torch.Tensor | None) -> None:
    if bias is not None and _has_gradient(bias):
        raise ValueError("bias: expected a tensor that does not require grad: it gets no gradient here")


def _slice(x: torch.Tensor, group: ProcessGroup, dim: int) -> torch.Tensor:
    return x.chunk(group_size(group), dim)[group_rank(group)].contiguous()


def _exchanged(x: torch.Tensor, run: Callable[..., torch.Tensor], *gradient: Any) -> torch.Tensor:
    """Return ``run(x)``; ``gradient`` is what is called with the upstream gradient, and its other arguments."""
    if not _has_gradient(x):
        return run(x)
    result: torch.Tensor = _Exchange.apply(x, run, gradient)
    return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: Callable[..., torch.Tensor], gradient: tuple[Any, ...]) -> torch.Tensor:
        ctx.dtype, ctx.gradient = x.dtype, gradient
        return run(x)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        upstream = upstream.to(ctx.dtype)
        if not ctx.gradient:
            return upstream, None, None
        function, *arguments = ctx.gradient
        return first_order(function, upstream, *arguments), None, None
