"""What the backends of a GPU take for each row beside its logits."""

from __future__ import annotations

import torch


def per_row(
    token_ids: torch.Tensor,
    temperature: torch.Tensor,
    row_indices: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | float, torch.Tensor | None]:
    """Return ids, contiguous; temperature, a number or one a row; and marks of the rows that are computed, if not all.

    Marks, not indices: a row that is given twice is computed, and overwritten, once.
    """
    marks = None
    if row_indices is not None:
        marks = torch.zeros_like(token_ids, dtype=torch.int8).index_fill_(0, row_indices, 1)
    return token_ids.contiguous(), temperature.contiguous() if temperature.ndim else float(temperature), marks
