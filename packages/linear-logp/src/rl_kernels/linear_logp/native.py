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
    logp, lse = _statistics(Inputs(hidden, weight, target_ids, bias, temperature, ignore_index), 2)
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
    logp, lse, entropy = _statistics(Inputs(hidden, weight, target_ids, bias, temperature, ignore_index), 3)
    return logp, lse, entropy


def _statistics(inputs: Inputs, count: int) -> list[torch.Tensor]:
    hidden, vocab = inputs.hidden, inputs.weight.shape[0]
    dtype = rowwise.compute_dtype(hidden.dtype)
    totals = [hidden.new_empty(hidden.shape[0], dtype=dtype) for _ in range(count)]
    height = max(BLOCK_ELEMENTS // max(PIECE, hidden.shape[1]), rowwise.BLOCK)
    for rows in slices(hidden.shape[0], height):
        block = inputs.block(rows)
        state, chosen = _walk(block, entropy=count == 3)
        lse, entropy = rowwise.finish(state)
        logp = torch.where(rowwise.outside(block.target_ids, vocab), torch.nan, chosen - lse)
        for total, value in zip(totals, (logp, lse, entropy), strict=False):
            total[rows] = block.keep(value)
    return totals


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


def _walk(block: Inputs, *, entropy: bool) -> tuple[rowwise.SoftmaxState, torch.Tensor]:
    """Return the softmax state of whole rows, and the logit of each row's target."""
    first, *others = slices(block.weight.shape[0], PIECE)
    z = block.logits(_logits, first)
    state, chosen = rowwise.softmax_state(z, entropy=entropy), rowwise.select(z, block.target_ids)
    for columns in others:
        z = block.logits(_logits, columns)
        state = rowwise.merge(state, rowwise.softmax_state(z, entropy=entropy))
        chosen = chosen + rowwise.select(z, block.target_ids, columns.start)
    return state, chosen


def _logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rowwise.matmul(hidden, weight.t())


def _add_dhidden(dz: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    out += rowwise.matmul(dz, weight)
    return out


PRODUCTS = Products(PIECE, _logits, _add_dhidden, rowwise.chain_dw)
