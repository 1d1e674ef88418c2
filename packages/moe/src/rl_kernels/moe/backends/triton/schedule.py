"""Schedules of the products of experts, chosen by dtype, architecture and, on sm_90, routes of an expert."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch

from rl_kernels.core.operator import tiles_change_no_bit
from rl_kernels.core.triton_lib.launch import INTERPRETED
from rl_kernels.core.triton_lib.schedule import ANYWHERE, IN_INTERPRETER, Schedule


class Schedules(NamedTuple):
    """The schedules of the products of a call; those of a pass have tiles of equal height.

    Attributes:
        gate_up: the first product; its columns are those of the activation.
        product: every other product of routes.
        gradient: the gradient of a weight.
    """

    gate_up: Schedule
    product: Schedule
    gradient: Schedule


FEW, MANY = Schedule(128, 128, 32, 4, 4), Schedule(128, 128, 64, 8, 3)
"""Schedules of a weight's gradient for experts with few and with many routes."""
TUNED = (
    (8, Schedules(Schedule(16, 32, 256, 4, 3), Schedule(16, 64, 128, 2, 4), FEW)),
    (24, Schedules(Schedule(32, 64, 128, 4, 3), Schedule(32, 64, 128, 4, 4), FEW)),
    (48, Schedules(Schedule(64, 128, 64, 8, 4), Schedule(64, 128, 64, 4, 3), FEW)),
    (None, Schedules(Schedule(128, 128, 64, 8, 3), Schedule(128, 128, 64, 8, 3), MANY)),
)
"""Largest mean number of an expert's routes, and schedules of 16 bits on sm_90, where tiles change no bit."""
LEAST_INNER, MOST_STAGES = 64, 8


def schedules_for(routes: int, experts: int, dtype: torch.dtype, device: torch.device) -> Schedules:
    """Return the schedules of a call; on architectures other than sm_90 they depend on the dtype alone."""
    if INTERPRETED:
        return Schedules(*[IN_INTERPRETER] * 3)
    if dtype == torch.float32 or not tiles_change_no_bit(device):
        cut = ANYWHERE[dtype]
        return Schedules(replace(cut, columns=cut.columns // 2), cut, cut)
    return next(cuts for most, cuts in TUNED if most is None or routes <= most * experts)


def dividing(cut: Schedule, k: int) -> Schedule:
    """Return a schedule whose blocks of K divide it, if blocks of 64 do; no fewer bytes are loaded ahead."""
    if cut.inner <= LEAST_INNER or k % LEAST_INNER:
        return cut
    inner = math.gcd(cut.inner, k)
    return replace(cut, inner=inner, stages=min(MOST_STAGES, cut.stages * cut.inner // inner))
