"""Checks of the argument ``kept_ids``; ``kept_columns.py`` computes with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.torchlib.observed import values_hidden
from rl_kernels.core.torchlib.ops import define_check
from rl_kernels.linear_logp.kept_columns import place_of


def validate(value: object, leading: Sequence[int], device: torch.device) -> None:
    """Require None, or integer ids ``[*leading, K]`` on ``device`` with K >= 1; their range is checked elsewhere."""
    if value is None:
        return
    check.tensor("kept_ids", value, check.INTEGERS, least=1)
    assert isinstance(value, torch.Tensor)
    check.shape("kept_ids", value, (*leading, value.shape[-1]), "the shape of target_ids, and any last dim")
    if value.shape[-1] == 0:
        raise ValueError("kept_ids: expected a last dim of at least 1, got 0; -1 fills rows that keep fewer ids")
    if value.device != device:
        raise ValueError(f"kept_ids: expected device {device}, got {value.device}")


def check_targets(columns: torch.Tensor, target_ids: torch.Tensor, ignore_index: int | None) -> None:
    """Require that the target of each row that is not ignored is among its columns. Costs a sync on a GPU.

    Raises:
        ValueError: it is not.
    """
    if values_hidden(columns):
        return
    is_missing = place_of(columns, target_ids) < 0
    if ignore_index is not None:
        is_missing &= target_ids != ignore_index
    _check_kept(is_missing)


def _require_kept(is_missing: torch.Tensor) -> None:
    count = int(is_missing.sum())
    if count:
        raise ValueError(
            f"target_ids: expected tokens that are in kept_ids, {count} of {len(is_missing)} are not; with "
            "validate=False they get a log-probability of -inf"
        )


_check_kept = define_check("check_kept_ids", "(Tensor is_missing)", _require_kept)
