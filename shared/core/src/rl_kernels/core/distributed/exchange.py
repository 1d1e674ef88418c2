"""Collectives whose sums have a fixed order: reductions are exchanges of parts and a local sum.

NCCL and gloo promise no order of their own reductions across numbers of ranks. So each rank receives the parts of all
ranks for its slice of the result (all-to-all), adds them in the order of ranks, and the slices are gathered. For few
numbers one all-gather of all parts is faster, and gives the same bits. ``functions`` adds gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import distributed
from torch.distributed import ProcessGroup

from rl_kernels.core.distributed.groups import gather_into, group_size
from rl_kernels.core.distributed.reductions import Write, reduction_of
from rl_kernels.core.distributed.sums import ORDERS, total

FEW_BYTES = 8 << 20
"""Largest number of received bytes with which an all-reduce gathers all parts."""


def all_gather(x: torch.Tensor, group: ProcessGroup, dim: int = 0) -> torch.Tensor:
    """Return the tensors of all ranks, of one shape, concatenated along ``dim``."""
    size = group_size(group)
    if size == 1:
        return x
    parts = _gathered(x.contiguous(), group, size)
    if dim % max(x.ndim, 1) == 0:
        return parts.flatten(0, 1) if x.ndim else parts
    return parts.movedim(0, dim % x.ndim).flatten(dim % x.ndim, dim % x.ndim + 1)


def begin_all_gather(x: torch.Tensor, group: ProcessGroup) -> Callable[[], torch.Tensor]:
    """Begin ``all_gather`` along dim 0; return a function that waits for it and returns its result.

    On a GPU the exchange runs beside the kernels that are launched between, and the current stream waits, not the host.
    """
    size, x = group_size(group), x.contiguous()
    if size == 1:
        return lambda: x
    parts = x.new_empty((size, *x.shape))
    work = gather_into(parts.view(-1), x.view(-1), group, async_op=True)

    def end() -> torch.Tensor:
        work.wait()
        return parts.flatten(0, 1)

    return end


def all_reduce(
    x: torch.Tensor,
    group: ProcessGroup,
    *,
    order: str = "tree",
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the sum that ``functions.all_reduce`` documents."""
    _check_order(order)
    size = group_size(group)
    if size == 1:
        return total(x[None], order, bias, dtype)
    x = x.contiguous()
    if _is_symmetric(x, order):
        planned = reduction_of(group, x, x.shape, dtype or x.dtype, bias=bias)
        if planned is not None:
            return planned.of_part(x, bias)
    if x.nbytes * (size - 1) <= FEW_BYTES:
        return total(_gathered(x, group, size), order, bias, dtype)
    rows = x.reshape(-1, x.shape[-1] if bias is not None else 1)
    count = rows.shape[0]
    rows_of_rank = -(-count // size)
    if rows_of_rank * size != count:
        rows = F.pad(rows, (0, 0, 0, rows_of_rank * size - count))
    mine = total(_parts_of_slice(rows, size, group), order, bias, dtype)
    return _gathered(mine, group, size).flatten(0, 1)[:count].reshape(x.shape)


def reduce_scatter(
    x: torch.Tensor,
    group: ProcessGroup,
    *,
    dim: int = 0,
    order: str = "tree",
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the slice that ``functions.reduce_scatter`` documents."""
    _check_order(order)
    size, dim = group_size(group), dim % x.ndim
    if x.shape[dim] % size:
        raise ValueError(f"x: expected dim {dim} to divide by {size} ranks, got shape {tuple(x.shape)}")
    if bias is not None and dim == x.ndim - 1:
        raise ValueError(f"bias: expected None with dim {dim}, the last one: each rank would need its slice of it")
    if size == 1:
        return total(x[None], order, bias, dtype)
    if dim:
        parts = x.unflatten(dim, (size, -1)).movedim(dim, 0).contiguous()
        result = reduce_scatter(parts.flatten(0, 1), group, order=order, bias=bias, dtype=dtype)
        return result.view(parts.shape[1:])
    x = x.contiguous()
    if _is_symmetric(x, order):
        planned = reduction_of(group, x, x.shape, dtype or x.dtype, scatter_dim=0, bias=bias)
        if planned is not None:
            return planned.of_part(x, bias)
    return total(_parts_of_slice(x, size, group), order, bias, dtype)


def reduce_product(
    write: Write,
    shape: tuple[int, ...],
    like: torch.Tensor,
    group: ProcessGroup,
    *,
    scatter_dim: int | None = None,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the tree sum over the ranks of FP32 parts, which are written where the exchange reads them.

    Args:
        write: called with ``out[n, N]``, FP32 and contiguous, first and end: writes rows first to end of this rank's
            part to it.
        shape: shape of a part, ``[..., N]``; its rows are the rows of ``[M, N]``.
        like: a tensor on the device of the parts.
        group: as in ``all_reduce``.
        scatter_dim: None for the whole sum, or the dim along which this rank gets its slice, as in ``reduce_scatter``.
        bias: as in ``all_reduce``.
        dtype: as in ``all_reduce``.
    """
    if scatter_dim is None or math.prod(shape[:scatter_dim]) == 1:
        sum_dtype = dtype or torch.float32
        planned = reduction_of(group, like, shape, sum_dtype, scatter_dim=scatter_dim, bias=bias, is_product=True)
        if planned is not None:
            return planned.of_product(write, like, bias)
    rows = math.prod(shape[:-1])
    part = like.new_empty(shape, dtype=torch.float32)
    write(part.view(rows, shape[-1]), 0, rows)
    if scatter_dim is None:
        return all_reduce(part, group, bias=bias, dtype=dtype)
    return reduce_scatter(part, group, dim=scatter_dim, bias=bias, dtype=dtype)


def _is_symmetric(x: torch.Tensor, order: str) -> bool:
    return x.is_cuda and x.dtype == torch.float32 and order == "tree"


def _parts_of_slice(rows: torch.Tensor, size: int, group: ProcessGroup) -> torch.Tensor:
    """Return ``[ranks, rows / ranks, ...]``: the parts of all ranks of this rank's slice of dim 0."""
    received = torch.empty_like(rows)
    distributed.all_to_all_single(received, rows, group=group)
    return received.unflatten(0, (size, -1))


def _gathered(x: torch.Tensor, group: ProcessGroup, size: int) -> torch.Tensor:
    """Return ``[ranks, ...]``: the tensors of all ranks."""
    parts = x.new_empty((size, *x.shape))
    gather_into(parts.view(-1), x.view(-1), group)
    return parts


def _check_order(order: str) -> None:
    if order not in ORDERS:
        raise ValueError(f"order: expected one of 'tree', 'chain', got {order!r}")
