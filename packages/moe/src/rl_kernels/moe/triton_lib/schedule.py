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
    """The schedules of the products of a call; both of the forward pass have tiles of equal height.

    Attributes:
        gate_up: the first product; its columns are those of the activation.
        down: the second product.
        backward: the products of routes of the backward pass.
        gradient: the gradient of a weight.
    """

    gate_up: Schedule
    down: Schedule
    backward: Schedule
    gradient: Schedule


LOW, WIDE, HIGH = Schedule(16, 64, 128, 2, 4), Schedule(128, 256, 64, 8, 4), Schedule(128, 128, 64, 8, 3)
FEW, MANY = Schedule(128, 128, 32, 4, 4), HIGH
"""Schedules of a weight's gradient for experts with few and with many routes."""
TUNED = (
    (8, Schedules(Schedule(16, 32, 256, 4, 3), LOW, LOW, FEW)),
    (24, Schedules(Schedule(32, 64, 128, 4, 3), Schedule(32, 64, 128, 4, 4), WIDE, FEW)),
    (40, Schedules(Schedule(64, 128, 64, 8, 4), Schedule(64, 128, 64, 4, 3), WIDE, FEW)),
    (160, Schedules(Schedule(128, 128, 64, 8, 4), HIGH, WIDE, FEW)),
    (None, Schedules(Schedule(128, 128, 64, 8, 4), HIGH, WIDE, MANY)),
)
"""Largest mean number of an expert's routes, and schedules of 16 bits on sm_90, where tiles change no bit.

Measured on an H200 with the widths of Qwen3-30B-A3B and means of 0.06, 1, 4, 16 and 64.
"""
LEAST_INNER, MOST_STAGES = 64, 8


def schedules_for(routes: int, experts: int, dtype: torch.dtype, device: torch.device) -> Schedules:
    """Return the schedules of a call; on architectures other than sm_90 they depend on the dtype alone."""
    if INTERPRETED:
        return Schedules(*[IN_INTERPRETER] * 4)
    if dtype == torch.float32 or not tiles_change_no_bit(device):
        cut = ANYWHERE[dtype]
        return Schedules(replace(cut, columns=cut.columns // 2), cut, cut, cut)
    return next(cuts for most, cuts in TUNED if most is None or routes <= most * experts)


def dividing(cut: Schedule, k: int) -> Schedule:
    """Return a schedule whose blocks of K divide it, if blocks of 64 do; no fewer bytes are loaded ahead."""
    if cut.inner <= LEAST_INNER or k % LEAST_INNER:
        return cut
    inner = math.gcd(cut.inner, k)
    return replace(cut, inner=inner, stages=min(MOST_STAGES, cut.stages * cut.inner // inner))
