"""Sums over ranks or segments in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

ORDERS = ("tree", "chain")


def tree_sum(parts: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of ``parts``, a tensor ``[n, ...]`` or n tensors, by a balanced binary tree in index order.

    Of 8 parts: ``((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))``. A part without a sibling is passed up unchanged.
    """
    level = list(parts)
    while len(level) > 1:
        pairs = [left + right for left, right in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


def chain_sum(parts: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of ``parts`` in ascending order, each addition rounded to their dtype.

    It has the bits of gradients that are accumulated in ``.grad`` one after the other.
    """
    total, *later = list(parts)
    for part in later:
        total = total + part
    return total


def total(
    parts: torch.Tensor, order: str, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the sum of ``parts[n, ..., N]``, plus ``bias[N]``, rounded once to ``dtype``."""
    dtype = dtype or parts.dtype
    if order == "tree" and parts.is_cuda and (fused := _fused(parts, bias, dtype)) is not None:
        return fused
    sums: Callable[..., torch.Tensor] = tree_sum if order == "tree" else chain_sum
    result = sums(parts)
    if bias is not None:
        result = result + bias.to(result.dtype)
    return result.to(dtype)


def _fused(parts: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the sum by one kernel, or None if the kernel does not fit or Triton is missing."""
    from rl_kernels.core.triton_lib.launch import INSTALLED

    if not INSTALLED or torch.compiler.is_compiling():
        return None
    from rl_kernels.core.triton_lib import sums

    return sums.tree_total(parts, bias, dtype)
