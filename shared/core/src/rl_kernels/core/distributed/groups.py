"""The process group of a call."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

SIZES = (1, 2, 4, 8)
"""Sizes of a group: the tree over eight segments has a subtree for each rank."""

# PyTorch 2.13 has a new name for it, and warns of the old one.
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


def gather_into(target: torch.Tensor, x: torch.Tensor, group: ProcessGroup, *, async_op: bool = False) -> Any:
    """Write the flat tensors ``x[n]`` of all ranks to ``target[ranks n]``; with ``async_op`` return its work."""
    return _all_gather(target, x, group=group, async_op=async_op)


def group_of(value: object, name: str = "process_group", sizes: tuple[int, ...] | None = SIZES) -> ProcessGroup:
    """Return the process group that an argument names: the group itself, or the group of a mesh with one dim.

    Args:
        value: the argument.
        name: name of the argument, for messages.
        sizes: allowed numbers of ranks; None: any.

    Raises:
        TypeError: it is neither.
        ValueError: the mesh has several dims, this process is not in the group, or its size is none of ``sizes``.
    """
    if isinstance(value, DeviceMesh):
        if value.ndim != 1:
            raise ValueError(f"{name}: expected one dim of the mesh, as mesh['tp'], got {value.ndim} dims")
        value = value.get_group()
    if value is distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{name}: expected a group that this process belongs to")
    if not isinstance(value, ProcessGroup):
        raise TypeError(f"{name}: expected a ProcessGroup or a DeviceMesh with one dim, got {type(value).__name__}")
    if sizes is not None and group_size(value) not in sizes:
        allowed = ", ".join(map(str, sizes[:-1]))
        raise ValueError(f"{name}: expected {allowed} or {sizes[-1]} ranks, got {value.size()}")
    return value


def group_size(group: ProcessGroup) -> int:
    """Return the number of ranks of a group."""
    return _rank_and_size(group)[1]


def group_rank(group: ProcessGroup) -> int:
    """Return the rank of this process in a group."""
    return _rank_and_size(group)[0]


def _rank_and_size(group: ProcessGroup) -> tuple[int, int]:
    """Return (rank, size); cached, because a group's own methods wait for other threads of the process."""
    place = _ranks_and_sizes.get(group)
    if place is None:
        place = _ranks_and_sizes[group] = group.rank(), group.size()
    return place


_ranks_and_sizes: WeakKeyDictionary[ProcessGroup, tuple[int, int]] = WeakKeyDictionary()
