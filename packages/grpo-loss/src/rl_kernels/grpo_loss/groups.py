"""The groups of the rewards: checks ``samples_per_prompt`` or ``group_boundaries`` and returns one form of both."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from rl_kernels.core import validate as check
from rl_kernels.core.torchlib.observed import values_hidden
from rl_kernels.core.torchlib.ops import define_check

SHOWN = 8
"""Largest number of offsets in an error message."""


class Groups(NamedTuple):
    """The groups of the rewards, as the raw ops take them.

    Attributes:
        boundaries: offsets ``[G + 1]``, int64 on the device of the rewards, or None.
        samples: size of every group if there are no boundaries, otherwise 0.
    """

    boundaries: torch.Tensor | None
    samples: int


def groups_of(
    rewards: torch.Tensor,
    samples_per_prompt: int | None,
    group_boundaries: Sequence[int] | torch.Tensor | None,
    *,
    values: bool,
) -> Groups:
    """Return the groups given by the arguments of a public function.

    ``values=False`` skips the check of offsets that are not on the CPU. Under torch.compile and graph capture the
    offsets of no tensor are checked.

    Raises:
        TypeError, ValueError: none or both of the arguments are given, or the one does not cut ``rewards[B]``.
    """
    check_groups(rewards.shape[0], samples_per_prompt, group_boundaries)
    if samples_per_prompt is not None:
        return Groups(None, samples_per_prompt)
    assert group_boundaries is not None
    return Groups(boundaries_of(rewards, group_boundaries, values), 0)


def check_groups(count: int, samples_per_prompt: int | None, group_boundaries: object) -> None:
    """Check that ``count`` rewards are grouped in exactly one way, and the size of the groups."""
    if (samples_per_prompt is None) == (group_boundaries is None):
        passed = "neither" if samples_per_prompt is None else "both"
        raise ValueError(f"samples_per_prompt, group_boundaries: expected exactly one of them, got {passed}")
    if samples_per_prompt is not None:
        check.integer("samples_per_prompt", samples_per_prompt, least=2)
        if count % samples_per_prompt:
            raise ValueError(f"samples_per_prompt: expected a divisor of the {count} rewards, got {samples_per_prompt}")


def boundaries_of(rewards: torch.Tensor, group_boundaries: Sequence[int] | torch.Tensor, values: bool) -> torch.Tensor:
    """Return checked offsets of groups as ``Groups`` has them."""
    if isinstance(group_boundaries, torch.Tensor):
        offsets = _checked(group_boundaries, rewards, values)
    else:
        offsets = torch.tensor(_listed(group_boundaries, rewards.shape[0]), dtype=torch.int64, device="cpu")
    # Non-blocking: the copy to a GPU must not wait for running kernels.
    return offsets.to(rewards.device, torch.int64, non_blocking=True).contiguous()


def _checked(boundaries: torch.Tensor, rewards: torch.Tensor, values: bool) -> torch.Tensor:
    check.tensor("group_boundaries", boundaries, check.INTEGERS, ndim=1)
    if boundaries.device.type != "cpu" and boundaries.device != rewards.device:
        raise ValueError(f"group_boundaries: expected device cpu or {rewards.device}, got {boundaries.device}")
    least = 2 if rewards.shape[0] else 1
    if boundaries.shape[0] < least:
        raise ValueError(f"group_boundaries: expected at least {least} offsets, got {boundaries.shape[0]}")
    if (values or boundaries.device.type == "cpu") and not values_hidden(boundaries):
        _check_offsets(boundaries, rewards.shape[0])
    return boundaries


def _listed(boundaries: object, count: int) -> list[int]:
    if not isinstance(boundaries, Sequence) or isinstance(boundaries, (str, bytes)):
        raise TypeError(
            f"group_boundaries: expected a sequence of integers or a tensor, got {type(boundaries).__name__}"
        )
    offsets = list(boundaries)
    for offset in offsets:
        check.integer("group_boundaries", offset)
    _increasing(offsets, count)
    return offsets


def _increasing(offsets: list[int], count: int) -> None:
    if not offsets or offsets[0] != 0 or offsets[-1] != count or any(low >= high for low, high in pairwise(offsets)):
        shown = ", ".join(map(str, offsets[:SHOWN])) + (", ..." if len(offsets) > SHOWN else "")
        raise ValueError(
            f"group_boundaries: expected offsets that start at 0, increase strictly and end at {count} "
            f"(the number of rewards), got [{shown}]"
        )


def _offsets(boundaries: torch.Tensor, count: int) -> None:
    _increasing(boundaries.tolist(), count)


_check_offsets = define_check("check_group_boundaries", "(Tensor boundaries, SymInt count)", _offsets)
