"""The gradients of linear_logp, for every backend that does not bring its own.

Pieces of the vocabulary in ascending order, and for each all blocks of rows in ascending order::

    for piece in vocabulary:            dW[piece] is complete after its turn
        for block in rows:              z of (block, piece) with the bits of the forward
            dz -> dH[block] += dz @ W[piece];  dW[piece] += dz^T @ H[block];  dbias[piece] += dz^T @ 1

That order is the contract. dH continues over pieces, so its rows do not depend on the batch. dW and dbias are chains
over tokens, counted from the first row; a backend cuts blocks so that their height, which follows the workspace,
changes no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from rl_kernels.core import rowwise
from rl_kernels.linear_logp.inputs import Inputs, slices


class Steps(Protocol):
    """What a backend does with one piece of the vocabulary and one block of rows."""

    def cut(self, inputs: Inputs, workspace: int, needed: Sequence[bool]) -> tuple[int, int]:
        """Return the columns of a piece and the rows of a block, so that both fit into ``workspace`` bytes."""

    def dlogits(
        self, block: Inputs, upstream: rowwise.LogpUpstream, columns: slice, dbias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return dz ``[rows, piece]`` in the dtype of the inputs; add its sum over rows, before rounding, to dbias."""

    def add_dhidden(self, dz: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, continues: bool) -> None:
        """Write ``dz @ weight`` to ``out[rows, D]``, or add it."""

    def add_dweight(self, dz: torch.Tensor, hidden: torch.Tensor, out: torch.Tensor, *, continues: bool) -> None:
        """Write ``dz^T @ hidden`` to ``out[piece, D]``, rounded to its dtype, or add it, 16 rows a step."""


def gradients(
    steps: Steps,
    inputs: Inputs,
    upstream: rowwise.LogpUpstream,
    workspace_mib: int,
    needed: Sequence[bool],
    main_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of hidden, weight and bias in the dtype of the inputs, empty where not needed.

    With ``main_grad`` that of the weight is added to it, and comes back empty.
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
            # Before the next one is made.
            del dz
        if total is not None and main_grad is None and total.dtype != dweight.dtype:
            dweight[columns] = total

    if needed[0] and inputs.ignore_index is not None:
        # Their dz is 0, but 0 times a weight of NaN or inf is not.
        dhidden.masked_fill_((inputs.target_ids == inputs.ignore_index)[:, None], 0.0)
    return dhidden.to(hidden.dtype), dweight, dbias.to(hidden.dtype)


def _cleaned(inputs: Inputs, workspace: int) -> tuple[Inputs, int]:
    """Return inputs with zeros where ignored rows of hidden may hold anything, and the bytes of workspace left."""
    if inputs.ignore_index is None:
        return inputs, workspace
    hidden = inputs.keep(inputs.hidden)
    return inputs._replace(hidden=hidden), workspace - hidden.nbytes


def _weight_total(
    dweight: torch.Tensor, main_grad: torch.Tensor | None, columns: slice, *, in_blocks: bool
) -> torch.Tensor:
    """Return what the gradient of a piece of the weight is summed in; rounded at once if there is one block of rows."""
    if main_grad is not None:
        return main_grad[columns]
    total, dtype = dweight[columns], rowwise.compute_dtype(dweight.dtype)
    return torch.empty_like(total, dtype=dtype) if in_blocks and dtype != total.dtype else total
