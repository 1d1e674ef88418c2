"""The gradients of linear_logp, for every backend that does not bring its own.

Pieces of the vocabulary in ascending order, and for each all blocks of rows in ascending order::

    for piece in vocabulary:            dW[piece] is complete after its turn
        for block in rows:              z of (block, piece) by the very code of the forward
            dz -> dH[block] += dz @ W[piece];  dW[piece] += dz^T @ H[block];  dbias[piece] += dz^T @ 1

That order is the contract. dH continues over pieces whose width the backend fixes, so its rows do not depend on the
batch. dW and dbias are chains over 16 tokens a step, counted from the first row; blocks are multiples of 16, so their
height, which follows the workspace, changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rl_kernels.core import rowwise
from rl_kernels.linear_logp.logits import Inputs, Product, slices

Accumulate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Products:
    """How a backend multiplies.

    Attributes:
        piece: columns of the vocabulary worked on at once.
        logits: of the forward.
        add_dhidden: ``(dz[n, p], weight[p, D], out[n, D])``, adds ``dz @ weight`` to ``out``.
        add_dweight: ``(dz[n, p], hidden[n, D], out[p, D])``, adds ``dz^T @ hidden`` to ``out``, 16 rows a step.
    """

    piece: int
    logits: Product
    add_dhidden: Accumulate
    add_dweight: Accumulate


class Sums(NamedTuple):
    """What one block adds to, in place; None for a gradient that is not needed."""

    dhidden: torch.Tensor | None
    dweight: torch.Tensor | None
    dbias: torch.Tensor | None


def gradients(
    products: Products,
    inputs: Inputs,
    upstream: rowwise.LogpUpstream,
    workspace_mib: int,
    needed: Sequence[bool],
    main_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of hidden, weight and bias in the dtype of the inputs, empty where not needed.

    With ``main_grad`` that of the weight is added to it, and comes back empty.
    """
    hidden, weight = inputs.hidden, inputs.weight
    dtype = rowwise.compute_dtype(hidden.dtype)
    dhidden = hidden.new_zeros(hidden.shape if needed[0] else 0, dtype=dtype)
    dweight = weight.new_empty(weight.shape if needed[1] and main_grad is None else 0)
    dbias = hidden.new_zeros(weight.shape[0] if needed[2] else 0, dtype=dtype)

    height = block_height(hidden, products.piece, workspace_mib, needed[0])
    for columns in slices(weight.shape[0], products.piece):
        total = _weight_total(weight[columns], main_grad, columns) if needed[1] else None
        for rows in slices(hidden.shape[0], height):
            sums = Sums(dhidden[rows] if needed[0] else None, total, dbias[columns, None] if needed[2] else None)
            _add(products, inputs.block(rows), upstream.rows(rows), columns, sums)
        if total is not None and main_grad is None:
            dweight[columns] = total

    if needed[0] and inputs.ignore_index is not None:
        # Their dz is 0, but 0 times a weight of NaN or inf is not.
        dhidden.masked_fill_((inputs.target_ids == inputs.ignore_index)[:, None], 0.0)
    return dhidden.to(hidden.dtype), dweight, dbias.to(hidden.dtype)


def block_height(hidden: torch.Tensor, piece: int, workspace_mib: int, need_hidden: bool) -> int:
    """Return how many rows to work on at once, a multiple of 64: what fits beside dH and one piece of the weight.

    Of a piece there are an FP64 copy in two layouts and a total; of each row some temporaries like its logits.
    """
    count, size = hidden.shape
    item = rowwise.compute_dtype(hidden.dtype).itemsize
    fixed = (count * size * item if need_hidden else 0) + piece * size * (16 + item)
    height = ((workspace_mib << 20) - fixed) // (item * (8 * piece + 2 * size))
    return max(height // rowwise.BLOCK, 1) * rowwise.BLOCK


def _weight_total(weight: torch.Tensor, main_grad: torch.Tensor | None, columns: slice) -> torch.Tensor:
    if main_grad is not None:
        return main_grad[columns]
    return weight.new_zeros(weight.shape, dtype=rowwise.compute_dtype(weight.dtype))


def _add(products: Products, block: Inputs, upstream: rowwise.LogpUpstream, columns: slice, sums: Sums) -> None:
    dz = _dlogits(products, block, upstream, columns)
    if sums.dbias is not None:
        rowwise.chain_dw(dz, torch.ones_like(dz[:, :1]), sums.dbias)
    dz = dz.to(block.hidden.dtype)
    if sums.dhidden is not None:
        products.add_dhidden(dz, block.weight[columns], sums.dhidden)
    if sums.dweight is not None:
        products.add_dweight(dz, block.hidden, sums.dweight)


def _dlogits(products: Products, block: Inputs, upstream: rowwise.LogpUpstream, columns: slice) -> torch.Tensor:
    z = block.logits(products.logits, columns)
    dz = rowwise.dlogits(z, upstream, columns.start).div_(rowwise.per_row(block.temperature, z))
    bad = rowwise.outside(block.target_ids, block.weight.shape[0])
    return block.keep(torch.where(bad[:, None], torch.nan, dz))
