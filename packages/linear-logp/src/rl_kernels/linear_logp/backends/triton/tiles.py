"""How rows are cut into tiles, and numbers that several kernels take."""

from __future__ import annotations

import functools

import torch

from rl_kernels.core.operator import arch_of, tiles_change_no_bit
from rl_kernels.core.triton_lib.launch import INTERPRETED
from rl_kernels.core.triton_lib.schedule import HALF, Schedule
from rl_kernels.core.triton_lib.targets import LEAST, shared_memory_of
from rl_kernels.core.tuned import entry
from rl_kernels.linear_logp.backends.triton import kernels
from rl_kernels.linear_logp.inputs import Cap

NO_CAP = Cap(0.5, 0.5)
"""Stands in for a missing cap and is not read; not 1, for which Triton would compile another kernel."""


def schedule_of(name: str, hidden: torch.Tensor) -> Schedule:
    """Return the schedule of the logit tiles; where it could change bits, dtype and architecture alone decide."""
    if INTERPRETED:
        return Schedule(64, kernels.BLOCK.value, 64, 4, 1)
    is_small = shared_memory_of(arch_of(hidden.device.type, hidden.device.index)) == LEAST
    if hidden.dtype not in HALF:
        return Schedule(32, kernels.BLOCK.value, 16, 8, 1 if is_small else 3)
    if not tiles_change_no_bit(hidden.device):
        return Schedule(32, kernels.BLOCK.value, 32, 8, 2) if is_small else Schedule(64, kernels.BLOCK.value, 32, 8, 3)
    return _tuned(name)


@functools.cache
def _tuned(name: str) -> Schedule:
    return entry("rl_kernels.linear_logp.backends.triton", name, kind=Schedule)
