"""The gradient of an embedding: the rows of each id in ascending order, where PyTorch's order varies on a GPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rl_kernels.core.gpu import device_of
from rl_kernels.core.triton_lib.launch import ceil_div, launch
from rl_kernels.models.fused.conditions import PLAIN, fits

COLUMNS = 512
"""Of a program."""
INTEGERS = (torch.int32, torch.int64)


class OrderedEmbedding(nn.Embedding):
    """An ``nn.Embedding`` whose weight gets the same gradient, bit for bit, in every run."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows of the ids."""
        return embedding(input, self.weight, self.padding_idx) if self._takes(input) else super().forward(input)

    def _takes(self, ids: object) -> bool:
        if not torch.is_grad_enabled() or not self.weight.requires_grad or not fits(self.weight):
            return False
        is_plain = self.max_norm is None and not self.scale_grad_by_freq and not self.sparse
        fitting = type(ids) in PLAIN and ids.dtype in INTEGERS and ids.device == self.weight.device  # type: ignore[attr-defined]
        return is_plain and fitting and bool(self.weight.numel())


def embedding(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """Return ``weight[ids]``; the gradient of a row is the FP32 sum, in ascending order, of those of its places.

    Rows with zero gradient anywhere between, such as those of padding, change no bit of it; it is rounded once.

    Args:
        ids: of any shape, int32 or int64.
        weight: ``[V, D]``, FP32, BF16 or FP16.
        padding_idx: the id whose row gets no gradient, if any.
    """
    found: torch.Tensor = _Embedding.apply(ids, weight, padding_idx)
    return found


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.padding_idx = weight.shape, padding_idx
        return F.embedding(ids, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from rl_kernels.models.fused import kernels

        (ids,) = ctx.saved_tensors
        size = ctx.shape[1]
        dweight = grad.new_zeros(ctx.shape)
        if ids.numel():
            known, order = torch.sort(ids.reshape(-1), stable=True)
            ends = torch.searchsorted(known, known, right=True)
            padding = -1 if ctx.padding_idx is None else ctx.padding_idx
            grid = known.numel(), ceil_div(size, COLUMNS)
            with device_of(grad):
                rows = grad.reshape(-1, size).contiguous()
                launch(kernels.sum_rows, grid, rows, known, order, ends, dweight, padding, size, COLUMNS, num_warps=4)
        return None, dweight, None
