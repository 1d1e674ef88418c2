"""Per-row inputs of the GPU backends besides the logits."""

from __future__ import annotations

import torch


def per_row(
    target_ids: torch.Tensor,
    temperature: torch.Tensor,
    row_indices: torch.Tensor | None,
    min_logit: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | float, torch.Tensor | None, torch.Tensor | None]:
    """Return contiguous ids, the temperature (a number, or a tensor ``[N]``), marks of the rows to compute, thresholds.

    Marks are int8 ``[N]``, or None if all rows are computed. With marks a row that ``row_indices`` names twice is
    computed and overwritten once.
    """
    marks = None
    if row_indices is not None:
        marks = torch.zeros_like(target_ids, dtype=torch.int8).index_fill_(0, row_indices, 1)
    scale = temperature.contiguous() if temperature.ndim else float(temperature)
    return target_ids.contiguous(), scale, marks, None if min_logit is None else min_logit.contiguous()
