"""How a matrix product is laid out on a GPU, and which layout a product of some size takes: frozen, nothing is timed.

Any schedule gives the same bits on sm_90, so the choice there may follow all three sizes. On another architecture,
where nobody has shown that, there is one schedule for each dtype.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from rl_kernels.core.operator import arch_of
from rl_kernels.core.triton_lib.launch import INTERPRETED
from rl_kernels.core.tuned import entry

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Schedule:
    """How a product ``[M, K] x [K, N]`` is cut.

    Attributes:
        rows: of a tile.
        columns: of a tile.
        inner: terms of K that are loaded at a time: 16 in FP32, else a multiple of it.
        warps: of a program.
        stages: loads in flight.
        group: rows of tiles that are worked on together, so that what they share stays in the cache.
        persistent: one program a multiprocessor, each taking tile after tile.
        parts: pieces, 1 or 2, in which a tile is stored.
        swapped: a tile's rows are columns of the right operand: for a product of few rows.
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
"""Where nothing is tuned: small enough for every GPU."""
FEW = 64
"""Rows up to which a product is bound by reading the right operand, which swapped schedules were timed at."""
FP32 = (
    (16, Schedule(16, 32, 16, 2, 4)),
    (FEW, Schedule(32, 64, 16, 4, 3)),
)
"""On sm_90: up to so many rows, the schedule."""
FP32_SMALL, FP32_LARGE = Schedule(64, 64, 16, 4, 3), Schedule(128, 128, 16, 8, 4)
"""For more rows, where the tiles of the large one leave multiprocessors idle, and where they do not."""
IN_INTERPRETER = Schedule(64, 64, 64, 4, 1)


@dataclass(frozen=True)
class Candidate:
    """A schedule and its speed on the device that it was tuned on.

    Attributes:
        schedule: what it is the speed of.
        start: microseconds that a wave of tiles takes beside its steps.
        alone: microseconds that a step of ``schedule.inner`` takes with few programs on the device: the latency that
            its stages do not hide.
        steps: the same with one program on every multiprocessor, with two, and so on, as many as it holds at once.
    """

    schedule: Schedule
    start: float
    alone: float
    steps: tuple[float, ...]

    def time(self, m: int, n: int, k: int, units: int) -> float:
        """Return the microseconds that a product is expected to take on so many multiprocessors."""
        count = -(-k // self.schedule.inner)
        full, rest = divmod(self.schedule.tiles(m, n), units * len(self.steps))
        time = full * (self.start + count * self.steps[-1])
        if rest:
            each = -(-rest // units)
            # Where reading the right operand is what takes the time, the fewer there are, the more of it is for each.
            share = rest / (each * units) if self.schedule.swapped else 1.0
            time += self.start + count * max(self.alone, self.steps[each - 1] * share)
        return time


def schedule_for(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, *, spans: bool = False) -> Schedule:
    """Return the schedule for a product ``[m, k] x [k, n]``; on architectures other than sm_90 by dtype alone.

    So it is in FP32 where spans of the chain are summed for themselves, which nobody has compared.
    """
    if INTERPRETED:
        return IN_INTERPRETER
    if arch_of(device.type, device.index) != "sm90" or (spans and dtype == torch.float32):
        return ANYWHERE[dtype]
    if dtype == torch.float32:
        return _of_fp32(m, n, processors(device))
    return _fastest(m, n, k, processors(device))


def _of_fp32(m: int, n: int, units: int) -> Schedule:
    few = [schedule for rows, schedule in FP32 if m <= rows]
    return few[0] if few else FP32_LARGE if FP32_LARGE.tiles(m, n) >= units else FP32_SMALL


@functools.lru_cache(maxsize=4096)
def _fastest(m: int, n: int, k: int, units: int) -> Schedule:
    fitting = [candidate for candidate in _candidates() if candidate.schedule.swapped == (m <= FEW)]
    if m <= FEW:
        # Every row at once, or the right operand would be read again.
        fitting = [candidate for candidate in fitting if candidate.schedule.columns >= m]
    return min(fitting, key=lambda candidate: candidate.time(m, n, k, units)).schedule


@functools.cache
def _candidates() -> tuple[Candidate, ...]:
    return entry("rl_kernels.core.triton_lib", "matmul", kind=tuple[Candidate, ...])


@functools.cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device; 2 where Triton is interpreted."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count
