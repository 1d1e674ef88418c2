"""Advantages in PyTorch, in FP64: the rewards of a group are summed by a tree that starts at the group's start."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rl_kernels.core.rowwise.operands import compute_dtype
from rl_kernels.core.rowwise.sums import row_sum
from rl_kernels.grpo_loss.call import Estimator


def advantages(
    rewards: torch.Tensor, boundaries: torch.Tensor | None, samples: int, eps: torch.Tensor, estimator: str
) -> torch.Tensor:
    """Return the advantage ``[B]`` of each reward in its group; 0 if all rewards of the group are equal."""
    formula = Estimator.parse(estimator)
    count = rewards.shape[0]
    if not count:
        return rewards.new_empty(0, dtype=compute_dtype(rewards.dtype))
    r, present = rewards.double(), None
    # The mean of seven times 0.1 is not 0.1, so equal rewards are detected by comparison.
    if boundaries is None and formula.nan == "keep":
        r = r.reshape(-1, samples)
        size, all_equal, sums = r.new_full((), samples), (r == r[:, :1]).all(1, keepdim=True), _row_sums
        total = sums(r)
    else:
        if boundaries is None:
            boundaries = torch.arange(0, count + 1, samples, device=rewards.device)
        place = torch.arange(count, device=rewards.device)
        group = torch.bucketize(place, boundaries[1:-1].contiguous(), right=True)
        # Unchecked boundaries (validate=False) must not read out of bounds.
        start = boundaries[group].clamp(0, count - 1)
        end = boundaries[group + 1].clamp(1, count)

        def sums(x: torch.Tensor) -> torch.Tensor:
            return _group_sums(x, start, end)

        example, size = start, (end - start).double()
        if formula.nan == "skip":
            present = ~r.isnan()
            r = torch.where(present, r, 0.0)
            example = _first_present(present, group, start)
            size = sums(present.double())
        differs = (r != r[example]) if present is None else (r != r[example]) & present
        total, differs = sums(torch.stack((r, differs.double())))
        all_equal = differs == 0
    centered = r - total / size
    if present is not None:
        centered = torch.where(present, centered, 0.0)
    scaled = _scaled(centered, size, r, present, formula, eps, sums)
    return scaled.masked_fill(all_equal, 0.0).flatten().to(compute_dtype(rewards.dtype))


def _scaled(
    centered: torch.Tensor,
    size: torch.Tensor,
    r: torch.Tensor,
    present: torch.Tensor | None,
    formula: Estimator,
    eps: torch.Tensor,
    sums: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Scale the deviations from the group mean as the estimator says; arbitrary for groups of equal rewards."""
    if formula.kind == "none":
        return centered
    if formula.kind == "leave_one_out":
        return centered * size / (size - 1)
    if formula.kind == "batch":
        std = _std_of_all(r.flatten(), present)
    else:
        std = (sums(centered.square()) / (size if formula.kind == "population" else size - 1)).sqrt()
    return centered / (torch.maximum(std, eps) if formula.placement == "max" else std + eps)


def _std_of_all(r: torch.Tensor, present: torch.Tensor | None) -> torch.Tensor:
    """Return the sample standard deviation of all rewards that are present, summed in order."""
    is_present = torch.ones_like(r) if present is None else present.double()
    size = row_sum(is_present)
    centered = torch.where(is_present != 0, r - row_sum(r) / size, 0.0)
    return (row_sum(centered.square()) / (size - 1)).sqrt()


def _first_present(present: torch.Tensor, group: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Return, for each position, the position of the first reward of its group that is not missing."""
    count = len(group)
    place = torch.arange(count, device=group.device)
    first = torch.full_like(place, count).scatter_reduce(0, group, torch.where(present, place, count), "amin")[group]
    return torch.where(first < count, first, start)


def _row_sums(x: torch.Tensor) -> torch.Tensor:
    """Return the sums ``[G, 1]`` of groups of one size, ``x[G, n]``, by the tree of ``_group_sums``."""
    while (width := x.shape[1]) > 1:
        pairs = x[:, : width - 1 : 2] + x[:, 1::2]
        x = torch.cat((pairs, x[:, -1:]), 1) if width % 2 else pairs
    return x


def _group_sums(x: torch.Tensor, start: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    """Return, for each position of ``x[..., B]``, the sum over its group: a tree that starts at the group's start.

    The order depends only on positions within the group, not on the size or position of groups. No size has to be known
    on the host.
    """
    count = x.shape[-1]
    place = torch.arange(count, device=x.device)
    width = 1
    while width < count:
        other = place + width
        takes = ((place - start) % (2 * width) == 0) & (other < end)
        x = torch.where(takes, x + x[..., other.clamp(max=count - 1)], x)
        width *= 2
    return x[..., start]
