"""Checks of the two layouts that both operators take: a batch, maybe padded on the left, and packed sequences."""

from __future__ import annotations

from itertools import pairwise

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.torchlib.observed import values_hidden
from rl_kernels.core.torchlib.ops import define_check


def check_layout(name: str, x: torch.Tensor, cu_seqlens: torch.Tensor | None, start: torch.Tensor | None) -> None:
    """Require integers that fit ``x[B, T, ...]``, as far as shapes and dtypes say."""
    for integers, value in (("cu_seqlens", cu_seqlens), ("start", start)):
        if value is not None:
            check.tensor(integers, value, check.INTEGERS, ndim=1)
    if cu_seqlens is not None:
        if x.shape[0] != 1:
            raise ValueError(f"{name}: expected a batch of 1 with cu_seqlens, got shape {tuple(x.shape)}")
        if not len(cu_seqlens):
            raise ValueError("cu_seqlens: expected at least 1 number, got none")
        if start is not None:
            raise ValueError("start: expected None with cu_seqlens, which says where sequences start")
    if start is not None:
        check.shape("start", start, x.shape[:1], "one number for each sequence")


def check_bounds(name: str, x: torch.Tensor, cu_seqlens: torch.Tensor | None, start: torch.Tensor | None) -> None:
    """Require integers within the tokens of x. Syncs with a GPU; skipped if values cannot be read now."""
    if values_hidden(x):
        return
    if cu_seqlens is not None:
        _check_bounds(cu_seqlens, x.shape[1], name)
    if start is not None:
        check.ids_in_range("start", start, x.shape[1] + 1, ignorable=False)


def _bounds(cu_seqlens: torch.Tensor, total: int, name: str) -> None:
    values = cu_seqlens.tolist()
    if values[0] != 0 or values[-1] != total or any(b < a for a, b in pairwise(values)):
        shown = str(values) if len(values) <= 8 else f"{values[:7]} and more, the last {values[-1]}"
        raise ValueError(
            f"cu_seqlens: expected numbers that ascend from 0 to {total}, the tokens of {name}, got {shown}"
        )


_check_bounds = define_check("gated_delta_check_bounds", "(Tensor cu_seqlens, SymInt total, str name)", _bounds)
