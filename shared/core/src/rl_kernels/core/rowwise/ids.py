"""Selection of one column in each row, by an id."""

from __future__ import annotations

import torch


def select(z: torch.Tensor, ids: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Return ``z[i, ids[i] - first]`` for each row, 0 where that column is not in this part of the row."""
    column, elsewhere = column_of(z, ids, first)
    return z.gather(1, column).masked_fill_(elsewhere, 0.0)[:, 0]


def column_of(z: torch.Tensor, ids: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the column ``[N, 1]`` of each row's id in this part of the row, and whether it is in another part."""
    index = (ids.long() - first if first else ids.long())[:, None]
    column = index.clamp(0, z.shape[1] - 1)
    return column, column != index


def outside(ids: torch.Tensor, size: int) -> torch.Tensor:
    """Say for each id whether it lies outside ``[0, size)``."""
    return (ids < 0) | (ids >= size)
