"""The definition of the advantages in plain PyTorch, in FP64 throughout."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch


def group_advantages(
    rewards: torch.Tensor,
    *,
    samples_per_prompt: int | None = None,
    group_boundaries: Sequence[int] | torch.Tensor | None = None,
    eps: float = 1e-6,
    advantage_estimator: str = "population",
    eps_placement: str = "max",
    skip_nan: bool = False,
) -> torch.Tensor:
    """Return the advantage ``[B]`` of each reward in its group; 0 if all rewards of the group are equal."""
    # FP64: with rewards around 10,000, the error of an FP32 mean is larger than the tolerance of advantages.
    r = rewards.double()
    if samples_per_prompt is not None:
        group_boundaries = range(0, len(r) + 1, samples_per_prompt)
    assert group_boundaries is not None
    present = ~r.isnan() if skip_nan else torch.ones_like(r, dtype=torch.bool)
    whole = r[present].std(correction=1) if advantage_estimator == "batch" and int(present.sum()) > 1 else None
    out = torch.zeros_like(r)
    for start, end in pairwise(int(offset) for offset in group_boundaries):
        here = present[start:end]
        if here.any():
            part = _group(r[start:end][here], advantage_estimator, eps_placement, eps, whole)
            out[start:end] = out[start:end].masked_scatter(here, part)
    return out.to(wide(rewards))


def _group(r: torch.Tensor, estimator: str, placement: str, eps: float, whole: torch.Tensor | None) -> torch.Tensor:
    # The mean of seven times 0.1 is not 0.1, so equal rewards are detected by comparison.
    if bool((r == r[0]).all()):
        return torch.zeros_like(r)
    centered = r - r.mean()
    if estimator == "none":
        return centered
    if estimator == "leave_one_out":
        return centered * len(r) / (len(r) - 1)
    std = whole if whole is not None else r.std(correction=0 if estimator == "population" else 1)
    return centered / (std.clamp(min=eps) if placement == "max" else std + eps)


def wide(value: torch.Tensor) -> torch.dtype:
    """Return FP64 for FP64, otherwise FP32."""
    return torch.float64 if value.dtype == torch.float64 else torch.float32
