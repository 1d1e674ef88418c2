"""linear_logp in PyTorch: pieces of the vocabulary for blocks of rows, every sum in a fixed order.

Order of the sums, which is the contract of this backend on the CPU: the vocabulary is cut into pieces of 1024 columns.
Logits are products in FP64, rounded once to FP32; each piece gives a softmax state, and the states are merged in
ascending order. dH adds one product a piece, FP64 rounded to FP32, in ascending order; dW adds 16 tokens a step.
On a GPU the products are the library's, so there bits may follow the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl_kernels.core import rowwise
from rl_kernels.linear_logp.backward import Products, gradients
from rl_kernels.linear_logp.logits import Inputs, slices

PIECE = 1024
"""Columns of the vocabulary worked on at once: part of the contract, so fixed. Their FP64 copy is 8 D KiB."""
BLOCK_ELEMENTS = 1 << 20
"""Logits that the forward works on at once; rows are independent, so it changes no bit."""


def forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: torch.Tensor,
    ignore_index: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (logp, logsumexp), each ``[N]``."""
    inputs = Inputs(hidden, weight, target_ids, bias, temperature, ignore_index)
    logp, lse = _statistics(inputs, entropy=False)
    return logp, lse


def forward_stats(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: torch.Tensor,
    ignore_index: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (logp, logsumexp, entropy), each ``[N]``."""
    inputs = Inputs(hidden, weight, target_ids, bias, temperature, ignore_index)
    logp, lse, entropy = _statistics(inputs, entropy=True)
    return logp, lse, entropy


def backward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_ids: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: torch.Tensor,
    ignore_index: int | None,
    logsumexp: torch.Tensor,
    entropy: torch.Tensor | None,
    grad_logp: torch.Tensor | None,
    grad_logsumexp: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    workspace_mib: int,
    needed: Sequence[bool],
    main_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dhidden, dweight, dbias), empty where not needed; with ``main_grad`` dweight is added to that."""
    inputs = Inputs(hidden, weight, target_ids, bias, temperature, ignore_index)
    grads = (grad_logp, grad_logsumexp, grad_entropy)
    upstream = rowwise.LogpUpstream(target_ids, logsumexp, entropy, *grads)
    return gradients(PRODUCTS, inputs, upstream, workspace_mib, needed, main_grad)


def backward_main_grad(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Add dweight to ``main_grad``, the last argument, and return (dhidden, dbias), empty where not needed."""
    dhidden, _, dbias = backward(*args)  # type: ignore[arg-type]
    return dhidden, dbias


def _statistics(inputs: Inputs, *, entropy: bool) -> list[torch.Tensor]:
    count, size = inputs.hidden.shape
    dtype = rowwise.compute_dtype(inputs.hidden.dtype)
    totals = [inputs.hidden.new_empty(count, dtype=dtype) for _ in range(3 if entropy else 2)]
    for rows in slices(count, max(BLOCK_ELEMENTS // max(PIECE, size), rowwise.BLOCK)):
        block = inputs.block(rows)
        state, chosen = _walk(block, entropy)
        lse, row_entropy = rowwise.finish(state)
        bad = rowwise.outside(block.target_ids, inputs.weight.shape[0])
        values = [torch.where(bad, torch.nan, chosen - lse), lse]
        if row_entropy is not None:
            values.append(row_entropy)
        for total, value in zip(totals, values, strict=True):
            total[rows] = block.keep(value)
    return totals


def _walk(block: Inputs, entropy: bool) -> tuple[rowwise.SoftmaxState, torch.Tensor]:
    """Return the softmax state of whole rows, and the logit of each row's target."""
    first, *others = slices(block.weight.shape[0], PIECE)
    z = block.logits(PRODUCTS.logits, first)
    state, chosen = rowwise.softmax_state(z, entropy=entropy), rowwise.select(z, block.target_ids)
    for columns in others:
        z = block.logits(PRODUCTS.logits, columns)
        state = rowwise.merge(state, rowwise.softmax_state(z, entropy=entropy))
        chosen = chosen + rowwise.select(z, block.target_ids, columns.start)
    return state, chosen


def _add_dhidden(dz: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    out += rowwise.matmul(dz, weight)
    return out


PRODUCTS = Products(PIECE, rowwise.linear, _add_dhidden, rowwise.chain_dw)
