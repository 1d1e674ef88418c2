"""The backward loop of linear_logp, shared by the backends.

It takes pieces of the vocabulary in ascending order, and for each piece all blocks of rows in ascending order::

    for piece in vocabulary:            dW[piece] is complete after this iteration
        for block in rows:              z of (block, piece), with the bits of the forward pass
            dz -> dH[block] += dz @ W[piece];  dW[piece] += dz^T @ H[block];  dbias[piece] += dz^T @ 1

This order is the contract. dH accumulates over pieces, so its rows do not depend on the batch. dW and dbias are chains
over tokens that start at the first row. The height of a block depends on the workspace; each backend rounds it so that
it changes no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from rl_kernels.core import rowwise
from rl_kernels.linear_logp.inputs import Inputs, slices


class Steps(Protocol):
    """The steps of a backend for one piece of the vocabulary and one block of rows."""

    def cut(self, inputs: Inputs, workspace: int, needed: Sequence[bool]) -> tuple[int, int]:
        """Return the columns of a piece and the rows of a block, so that both fit into ``workspace`` bytes."""

    def dlogits(
        self, block: Inputs, upstream: rowwise.LogpUpstream, columns: slice, dbias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return dz ``[rows, piece]`` in the dtype of the inputs; add the row sum of the unrounded dz to dbias."""

    def add_dhidden(self, dz: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, continues: bool) -> None:
        """Write ``dz @ weight`` to ``out[rows, D]``, or add it if ``continues``."""

    def add_dweight(self, dz: torch.Tensor, hidden: torch.Tensor, out: torch.Tensor, *, continues: bool) -> None:
        """Write ``dz^T @ hidden`` to ``out[piece, D]`` in its dtype, or add it if ``continues``; 16 rows per step."""


def gradients(
    steps: Steps,
    inputs: Inputs,
    upstream: rowwise.LogpUpstream,
    workspace_mib: int,
    needed: Sequence[bool],
    main_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of hidden, weight and bias in the dtype of the inputs, empty if not needed.

    With ``main_grad`` the gradient of the weight is added to it, and comes back empty.
    """
    count, dtype = inputs.hidden.shape[0], rowwise.compute_dtype(inputs.hidden.dtype)
    workspace = workspace_mib << 20
    if needed[1]:
        inputs, workspace = _cleaned(inputs, workspace)
    hidden, weight = inputs.hidden, inputs.weight
    dhidden = hidden.new_empty(hidden.shape if needed[0] else 0, dtype=dtype)
    dweight = weight.new_empty(weight.shape if needed[1] and main_grad is None else 0)
    dbias = hidden.new_zeros(weight.shape[0] if needed[2] else 0, dtype=dtype)
    if not count:
        return dhidden.to(hidden.dtype), dweight.zero_(), dbias.to(hidden.dtype)

    piece, height = steps.cut(inputs, workspace - dhidden.nbytes, needed)
    for columns in slices(weight.shape[0], piece):
        total = _weight_total(dweight, main_grad, columns, in_blocks=height < count) if needed[1] else None
        for rows in slices(count, height):
            dz = steps.dlogits(inputs.block(rows), upstream.rows(rows), columns, dbias[columns] if needed[2] else None)
            if needed[0]:
                steps.add_dhidden(dz, weight[columns], dhidden[rows], continues=columns.start > 0)
            if total is not None:
                steps.add_dweight(dz, hidden[rows], total, continues=rows.start > 0 or main_grad is not None)
            # Free dz before the next one is allocated.
            del dz
        if total is not None and main_grad is None and total.dtype != dweight.dtype:
            dweight[columns] = total

    if needed[0] and inputs.ignore_index is not None:
        # dz of ignored rows is 0, but 0 times a weight of NaN or inf is NaN.
        dhidden.masked_fill_((inputs.target_ids == inputs.ignore_index)[:, None], 0.0)
    return dhidden.to(hidden.dtype), dweight, dbias.to(hidden.dtype)


def _cleaned(inputs: Inputs, workspace: int) -> tuple[Inputs, int]:
    """Return the inputs with ignored rows of hidden zeroed, and the workspace bytes that remain."""
    if inputs.ignore_index is None:
        return inputs, workspace
    hidden = inputs.keep(inputs.hidden)
    return inputs._replace(hidden=hidden), workspace - hidden.nbytes


def _weight_total(
    dweight: torch.Tensor, main_grad: torch.Tensor | None, columns: slice, *, in_blocks: bool
) -> torch.Tensor:
    """Return the buffer that sums a piece of dW: main_grad, dW itself if one block completes it, or a wider one."""
    if main_grad is not None:
        return main_grad[columns]
    total, dtype = dweight[columns], rowwise.compute_dtype(dweight.dtype)
    return torch.empty_like(total, dtype=dtype) if in_blocks and dtype != total.dtype else total
