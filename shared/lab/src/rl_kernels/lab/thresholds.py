"""Thresholds of logits that no rounding moves across a logit, for cases of ``min_logit``."""

from __future__ import annotations

import torch

from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.core.testing import Draw

WIDE = 16
"""One gap in so many is wide."""
LEAST = 1e-4
"""A gap must be as wide as this part of the largest logit."""


def in_gaps(z: torch.Tensor, draw: Draw) -> torch.Tensor:
    """Return for each row of logits ``z[..., V]``, in FP64, the middle of a wide gap; -inf if it has none.

    In the compute dtype of ``draw``. One in eight rows keeps only its largest logit.
    """
    flat = z.reshape(-1, z.shape[-1]).double().sort(-1, descending=True).values
    gaps = flat[:, :-1] - flat[:, 1:]
    gaps = torch.where(gaps.isfinite(), gaps, 0.0)
    count, vocab = flat.shape
    least = torch.full((count,), -torch.inf, dtype=torch.float64, device=z.device)
    if vocab > 1:
        place = draw.uniform(0, max(vocab // WIDE, 1), count, dtype=torch.float64).long()
        place = gaps.argsort(-1, descending=True).gather(1, place[:, None])
        place.masked_fill_(draw.mask(1 / 8, count)[:, None], 0)
        size = torch.where(flat.isfinite(), flat.abs(), 0.0).amax(-1)
        middle = (flat.gather(1, place) + flat.gather(1, place + 1))[:, 0] / 2
        least = torch.where(gaps.gather(1, place)[:, 0] > LEAST * size, middle, least)
    return least.to(compute_dtype(draw.dtype)).view(z.shape[:-1])
