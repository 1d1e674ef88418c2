"""linear_logp in PyTorch: pieces of the vocabulary for blocks of rows, every sum in a fixed order.

Reduction order, which is the contract of this backend on the CPU: the vocabulary is cut into pieces of 1024 columns.
Logits are products in FP64, rounded once to FP32. Each piece gives a softmax state; the states are merged in ascending
order. dH adds one product per piece, FP64 rounded to FP32, in ascending order; dW adds 16 tokens per step. On a GPU the
products come from the vendor library, so bits may depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl_kernels.core import rowwise
from rl_kernels.linear_logp.backward import gradients
from rl_kernels.linear_logp.inputs import Inputs, slices

PIECE = 1024
"""Columns of a vocabulary piece: part of the contract, so fixed. Its weights in FP64 take 8 D KiB."""
BLOCK_ELEMENTS = 1 << 20
"""Logits that the forward pass processes at once. Rows are independent, so this changes no bit."""


def forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: torch.Tensor,
    ignore_index: int | None,
    cap: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (logp, norm), ``[N]`` and ``[N, 2]``."""
    inputs = Inputs(hidden, weight, target_ids, bias, temperature, ignore_index, cap)
    logp, norm = _statistics(inputs, entropy=False)
    return logp, norm


def forward_stats(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: torch.Tensor,
    ignore_index: int | None,
    cap: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (logp, logsumexp, entropy, norm), the first three ``[N]``, the last ``[N, 2]``."""
    inputs = Inputs(hidden, weight, target_ids, bias, temperature, ignore_index, cap)
    logp, norm, lse, entropy = _statistics(inputs, entropy=True)
    return logp, lse, entropy, norm


def backward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: torch.Tensor,
    ignore_index: int | None,
    cap: torch.Tensor | None,
    norm: torch.Tensor,
    entropy: torch.Tensor | None,
    grad_logp: torch.Tensor | None,
    grad_logsumexp: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    workspace_mib: int,
    needed: Sequence[bool],
    main_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dhidden, dweight, dbias), empty if not needed; with ``main_grad``, dweight is added to it instead."""
    inputs = Inputs(hidden, weight, target_ids, bias, temperature, ignore_index, cap)
    grads = (grad_logp, grad_logsumexp, grad_entropy)
    upstream = rowwise.LogpUpstream(target_ids, norm, entropy, *grads)
    return gradients(Steps(), inputs, upstream, workspace_mib, needed, main_grad)


def backward_main_grad(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Add dweight to ``main_grad``, the last argument, and return (dhidden, dbias), each empty if not needed."""
    dhidden, _, dbias = backward(*args)  # type: ignore[arg-type]
    return dhidden, dbias


def _statistics(inputs: Inputs, *, entropy: bool) -> list[torch.Tensor]:
    count, size = inputs.hidden.shape
    dtype = rowwise.compute_dtype(inputs.hidden.dtype)
    shapes = ((count,), (count, 2), *([(count,)] * 2 if entropy else ()))
    totals = [inputs.hidden.new_empty(shape, dtype=dtype) for shape in shapes]
    for rows in slices(count, max(BLOCK_ELEMENTS // max(PIECE, size), rowwise.BLOCK)):
        block = inputs.block(rows)
        state, chosen, scale = _walk(block, entropy)
        found = rowwise.finish(state, scale)
        bad = rowwise.outside(block.target_ids, inputs.weight.shape[0]) | found.norm.isnan().any(1)
        values = [torch.where(bad, torch.nan, found.logp(chosen, scale)), found.norm]
        if found.entropy is not None:
            values += [found.logsumexp, found.entropy]
        for total, value in zip(totals, values, strict=True):
            total[rows] = block.keep(value)
    return totals


def _walk(block: Inputs, entropy: bool) -> tuple[rowwise.SoftmaxState, torch.Tensor, torch.Tensor]:
    """Return the softmax state of the rows, the logit of each target, and the temperature as ``[N, 1]``."""
    first, *others = slices(block.weight.shape[0], PIECE)
    x = _logits(block, first)
    scale = rowwise.per_row(block.temperature, x)
    state, chosen = rowwise.softmax_state(x, scale, entropy=entropy), rowwise.select(x, block.target_ids)
    for columns in others:
        x = _logits(block, columns)
        state = rowwise.merge(state, rowwise.softmax_state(x, scale, entropy=entropy), scale)
        chosen = chosen + rowwise.select(x, block.target_ids, columns.start)
    return state, chosen, scale


def _logits(block: Inputs, columns: slice) -> torch.Tensor:
    """Return columns of ``hidden @ weight^T + bias``, capped, before the temperature; both passes call this."""
    x = rowwise.linear(block.hidden, block.weight[columns])
    if block.bias is not None:
        x += block.bias[columns].to(x.dtype)
    return x if block.cap is None else block.cap(x)


class Steps:
    """One piece of the vocabulary for one block of rows of the backward pass."""

    def cut(self, inputs: Inputs, workspace: int, needed: Sequence[bool]) -> tuple[int, int]:
        """Return (piece, height); the height is a multiple of 64, at least 64.

        The workspace holds two FP64 copies of a piece of the weight and its dW total, and per row a few temporaries the
        size of its logits.
        """
        size = inputs.hidden.shape[1]
        item = rowwise.compute_dtype(inputs.hidden.dtype).itemsize
        height = (workspace - PIECE * size * (16 + item)) // (item * (8 * PIECE + 2 * size))
        return PIECE, max(height // rowwise.BLOCK, 1) * rowwise.BLOCK

    def dlogits(
        self, block: Inputs, upstream: rowwise.LogpUpstream, columns: slice, dbias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return dz, rounded, and add its row sum to dbias."""
        x = _logits(block, columns)
        dz = rowwise.dlogits(x, rowwise.per_row(block.temperature, x), upstream, columns.start)
        if block.cap is not None:
            dz *= block.cap.slope(x)
        bad = rowwise.outside(block.target_ids, block.weight.shape[0])
        dz = block.keep(torch.where(bad[:, None], torch.nan, dz))
        if dbias is not None:
            rowwise.chain_dw(dz, torch.ones_like(dz[:, :1]), dbias[:, None])
        return dz.to(block.hidden.dtype)

    def add_dhidden(self, dz: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, continues: bool) -> None:
        """Write ``dz @ weight`` to ``out``, or add it if ``continues``."""
        product = rowwise.matmul(dz, weight)
        out.copy_(out + product if continues else product)

    def add_dweight(self, dz: torch.Tensor, hidden: torch.Tensor, out: torch.Tensor, *, continues: bool) -> None:
        """Write ``dz^T @ hidden`` to ``out``, or add it if ``continues``."""
        total = out if continues else out.new_zeros(out.shape, dtype=rowwise.compute_dtype(dz.dtype))
        rowwise.chain_dw(dz, hidden, total)
        if not continues:
            out.copy_(total)
