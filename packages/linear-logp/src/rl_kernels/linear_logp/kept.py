"""The logits that the forward pass keeps for the backward pass: those of the last columns, as many as fit.

They are kept in the compute dtype, capped and before the temperature, so backward computes with the numbers that it
would form again: how many are kept changes no bit.
"""

from __future__ import annotations

import torch

from rl_kernels.core.constants import UNIT
from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.linear_logp.vocabulary import BLOCK

FEW = 64
"""Rows of which all logits are kept by default: their products take as long as reading the weight does."""
OF_CPU = 64
"""MiB of logits that are kept by default on a CPU, where products take long."""


def empty(hidden: torch.Tensor, columns: int, saved_mib: int | None) -> torch.Tensor:
    """Return room for the kept logits of a weight with ``columns`` rows: ``[N, width]`` with at most ``saved_mib``.

    With None all logits of at most 64 rows are kept; of more rows none, on a CPU at most 64 MiB. The first kept column
    is a multiple of 1024; the width is a multiple of 256, and 0 if nothing is kept.
    """
    count, dtype = hidden.shape[0], compute_dtype(hidden.dtype)
    width, padded = 0, -(-columns // BLOCK) * BLOCK
    if saved_mib is None and hidden.is_cpu and count > FEW:
        saved_mib = OF_CPU
    if saved_mib is None:
        width = padded if count <= FEW else 0
    elif saved_mib:
        room = (saved_mib << 20) // (max(count, 1) * dtype.itemsize)
        first = max(-(-(padded - room) // UNIT) * UNIT, 0)
        width = max(padded - first, 0)
    return hidden.new_empty((count, width), dtype=dtype)


def first_kept(columns: int, width: int) -> int:
    """Return the first column that is kept, of ``columns``; ``columns`` if none is."""
    return -(-columns // BLOCK) * BLOCK - width if width else columns
