"""The schedule of a matrix product on a GPU, chosen by its sizes from frozen tables; nothing is timed at run time.

On sm_90 every schedule gives the same bits, so the choice may depend on all three sizes. On other architectures this
has not been shown, so there is one schedule for each dtype.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch

from rl_kernels.core.operator import tiles_change_no_bit
from rl_kernels.core.triton_lib.launch import INTERPRETED
from rl_kernels.core.tuned import entry

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Schedule:
    """The tiling of a product ``[M, K] x [K, N]``.

    Attributes:
        rows: rows of a tile.
        columns: columns of a tile.
        inner: terms of K that are loaded at a time: 16 in FP32, else a multiple of it.
        warps: warps of a program.
        stages: loads in flight.
        group: rows of tiles per panel, so that their common operand stays in the L2 cache.
        persistent: one program per multiprocessor, each of which takes tile after tile.
        parts: pieces, 1 or 2, in which a tile is stored.
        swapped: operands are swapped, so a tile's rows are columns of the right operand; for a product of few rows.
    """

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    group: int = 8
    persistent: bool = False
    parts: int = 1
    swapped: bool = False

    def tiles(self, m: int, n: int) -> int:
        """Return the number of tiles of a product ``[m, n]``."""
        if self.swapped:
            m, n = n, m
        return -(-m // self.rows) * -(-n // self.columns)


ANYWHERE = {
    torch.bfloat16: Schedule(64, 128, 32, 4, 3),
    torch.float16: Schedule(64, 128, 32, 4, 3),
    torch.float32: Schedule(64, 64, 16, 8, 3),
}
"""Schedules for architectures without tuning: small enough for every GPU."""
FEW = 64
"""Rows up to which a product is bound by reading the right operand; in 16 bits its schedule is then swapped."""
FP32 = (
    (16, Schedule(16, 32, 16, 2, 4)),
    (FEW, Schedule(32, 64, 16, 4, 3)),
)
"""FP32 on sm_90: (largest number of rows, schedule)."""
FP32_SMALL, FP32_LARGE = Schedule(64, 64, 16, 4, 3), Schedule(128, 128, 16, 8, 4)
"""FP32 on sm_90 for more rows: small where large tiles would leave multiprocessors idle."""
SUMS, SUMS_OF_FP32 = 192, 64
"""Registers of a thread for sums; FP32 products need more registers for their operands."""
IN_INTERPRETER = Schedule(64, 64, 64, 4, 1)


@dataclass(frozen=True)
class Candidate:
    """A schedule and its speed on the device that it was tuned on.

    Attributes:
        schedule: the schedule.
        start: microseconds that a wave of tiles takes in addition to its steps.
        alone: microseconds that a step of ``schedule.inner`` takes with few programs on the device: the latency that
            its stages do not hide.
        steps: microseconds of such a step with one program on every multiprocessor, with two, and so on, up to as many
            as fit.
    """

    schedule: Schedule
    start: float
    alone: float
    steps: tuple[float, ...]

    def time(self, m: int, n: int, k: int, units: int) -> float:
        """Return the microseconds that a product is expected to take on ``units`` multiprocessors."""
        count = -(-k // self.schedule.inner)
        full, remaining = divmod(self.schedule.tiles(m, n), units * len(self.steps))
        time = full * (self.start + count * self.steps[-1])
        if remaining:
            per_unit = -(-remaining // units)
            # Where reading the right operand bounds the time, fewer programs have more bandwidth each.
            share = remaining / (per_unit * units) if self.schedule.swapped else 1.0
            time += self.start + count * max(self.alone, self.steps[per_unit - 1] * share)
        return time


def schedule_for(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, *, spans: bool = False) -> Schedule:
    """Return the schedule for a product ``[m, k] x [k, n]``.

    On architectures other than sm_90, and in FP32 with ``spans``, it depends on the dtype alone: the bits of schedules
    have not been compared there.
    """
    if INTERPRETED:
        return IN_INTERPRETER
    if not tiles_change_no_bit(device) or (spans and dtype == torch.float32):
        return ANYWHERE[dtype]
    if dtype == torch.float32:
        return _fp32_schedule(m, n, processors(device))
    return _fastest(m, n, k, processors(device))


def schedules(dtype: torch.dtype, device: torch.device) -> tuple[Schedule, ...]:
    """Return all schedules that ``schedule_for`` chooses among."""
    if not tiles_change_no_bit(device):
        return (ANYWHERE[dtype],)
    if dtype == torch.float32:
        return (*(cut for _, cut in FP32), FP32_SMALL, FP32_LARGE, ANYWHERE[dtype])
    return tuple(candidate.schedule for candidate in _candidates())


def in_segments(cut: Schedule, segments: int, length: int, dtype: torch.dtype) -> Schedule:
    """Return a schedule for a product whose K is cut into segments: ``cut``, or a schedule with smaller tiles.

    The sums of a segment and the sums that wait for it must fit into a thread's registers, and no block of K may reach
    into the next segment.
    """
    levels = segments.bit_length() - 1
    sums = cut.rows * cut.columns // (32 * cut.warps)
    if dtype == torch.float32 and sums * (levels + 1) > SUMS_OF_FP32:
        cut = replace(cut, rows=64, columns=64, warps=8, stages=3)
    elif sums * (levels + 1) > SUMS:
        rows = min(cut.rows, 128)
        cut = replace(cut, rows=rows, columns=64, warps=rows // 16, stages=min(cut.stages, 4))
    return replace(cut, inner=math.gcd(cut.inner, length), persistent=False, parts=1)


def _fp32_schedule(m: int, n: int, units: int) -> Schedule:
    few = [schedule for rows, schedule in FP32 if m <= rows]
    return few[0] if few else FP32_LARGE if FP32_LARGE.tiles(m, n) >= units else FP32_SMALL


@functools.lru_cache(maxsize=4096)
def _fastest(m: int, n: int, k: int, units: int) -> Schedule:
    fitting = [candidate for candidate in _candidates() if candidate.schedule.swapped == (m <= FEW)]
    if m <= FEW:
        # All rows in one tile, or the right operand would be read more than once.
        fitting = [candidate for candidate in fitting if candidate.schedule.columns >= m]
    return min(fitting, key=lambda candidate: candidate.time(m, n, k, units)).schedule


@functools.cache
def _candidates() -> tuple[Candidate, ...]:
    return entry("rl_kernels.core.triton_lib", "matmul", kind=tuple[Candidate, ...])


processors_of_devices = {"cpu": 2}
"""Multiprocessors of devices that are no GPU, by type: where Triton is interpreted, or compiles ahead (ahead.py)."""


def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device; 2 where Triton is interpreted."""
    return _gpu_processors(device) if device.type == "cuda" else processors_of_devices[device.type]


@functools.cache
def _gpu_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
