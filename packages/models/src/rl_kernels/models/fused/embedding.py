"""An embedding whose gradient sums rows in ascending order; PyTorch's order varies on a GPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rl_kernels.core.gpu import device_of
from rl_kernels.core.saved import savable, save
from rl_kernels.core.torchlib.observed import is_traced
from rl_kernels.core.triton_lib.launch import ceil_div, launch
from rl_kernels.models.fused.conditions import PLAIN, fits

COLUMNS = 512
"""Columns per program."""
INTEGERS = (torch.int32, torch.int64)


class OrderedEmbedding(nn.Embedding):
    """An ``nn.Embedding`` whose weight gets the same gradient, bit for bit, in every run."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``weight[input]``, ``[..., embedding_dim]``."""
        is_plain = self.max_norm is None and not self.scale_grad_by_freq and not self.sparse
        if not is_plain or not _takes(input, self.weight):
            return super().forward(savable(input) if torch.is_grad_enabled() else input)
        return embedding(input, self.weight, self.padding_idx)


def _takes(ids: Any, weight: torch.Tensor) -> bool:
    if not torch.is_grad_enabled() or not weight.requires_grad or not fits(weight):
        return False
    fitting = type(ids) in PLAIN and not ids.is_neg() and ids.dtype in INTEGERS and ids.device == weight.device
    return fitting and bool(weight.numel())


def embedding(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """Return ``weight[ids]``; the gradient of a row is the FP32 sum over its occurrences in ascending order.

    The sum is rounded once. Rows with zero gradient between them, such as padding, change no bit of it.

    Args:
        ids: any shape, int32 or int64.
        weight: ``[V, D]``, FP32, BF16 or FP16.
        padding_idx: the id whose row gets no gradient, if any.
    """
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    result: torch.Tensor = _Embedding.apply(ids, weight, padding)
    return result


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor, padding: int) -> torch.Tensor:
        save(ctx, ids)
        ctx.shape, ctx.padding = weight.shape, padding
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from rl_kernels.models.fused import kernels

        (ids,) = ctx.saved_tensors
        (rows, size), padding = ctx.shape, ctx.padding
        if torch.is_grad_enabled() or is_traced():
            # For double backward and batched gradients: PyTorch's gradient, in its own order.
            return None, torch.ops.aten.embedding_dense_backward(grad, ids, rows, padding, False), None
        dweight = grad.new_zeros(ctx.shape)
        if ids.numel():
            sorted_ids, order = torch.sort(ids.reshape(-1), stable=True)
            ends = torch.searchsorted(sorted_ids, sorted_ids, right=True)
            grid = sorted_ids.numel(), ceil_div(size, COLUMNS)
            with device_of(grad):
                flat = grad.resolve_neg().reshape(-1, size).contiguous()
                launch(
                    kernels.sum_rows, grid, flat, sorted_ids, order, ends, dweight, padding, size, COLUMNS, num_warps=4
                )
        return None, dweight, None
