"""Clocks: device time of calls in a CUDA graph, wall time of real calls, peak extra memory, and what the device can do.

Device time is that of a graph that calls through every copy of the inputs, where the call can be captured; else of
events around plain calls. On a CPU there is the wall time alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rl_kernels.core.bench.arena import DeviceDraw
from rl_kernels.core.bench.counts import counts
from rl_kernels.core.contract import DTYPES

Run = Callable[[], Any]

GRAPH, EVENTS, WALL = "CUDA graph", "events", "wall clock"
BATCHES = 5
"""Of real calls, of which the median is taken; the device is waited for at the end of each."""
BATCH_S, BUDGET_S = 0.01, 0.1
"""How long a batch of calls takes, and all timed replays together, where no number of iterations is given."""
REPLAYS_S = 0.002
"""How long the replays between two events take at least: the launch of the first is then no share of the time."""

SETTLED_S = 0.1
"""How long something is repeated before it is timed: its clocks are then its own, and not those that a GPU near its limit
of power was left with by what ran before, such as a definition in FP64."""


@dataclass(frozen=True)
class Effort:
    """How often things run: ``iters`` timed samples (None: by time), after ``warmup`` rounds; and what is counted."""

    iters: int | None = None
    warmup: int = 3
    launches: bool = False

    def samples(self, seconds: float) -> int:
        """Return how many samples to take of something that takes so long."""
        return self.iters or max(5, min(100, int(BUDGET_S / max(seconds, 1e-9))))


@dataclass(frozen=True)
class Timing:
    """What one pass of one implementation takes.

    Attributes:
        ms: of device time; on a CPU of wall time.
        how: by which clock.
        call_us: wall time of a real call, with what the host does.
        extra_mib: peak memory beyond what was there before, results included; None on a CPU.
        copies: of the inputs that were gone through.
        launches: of kernels, copies and fills by one call; None if they were not counted.
        waits: of the host for the device in one call; None likewise.
    """

    ms: float
    how: str
    call_us: float
    extra_mib: float | None
    copies: int
    launches: int | None = None
    waits: int | None = None


@dataclass(frozen=True)
class Ceilings:
    """What the device was measured to do in this run.

    Attributes:
        bytes_per_s: read and written by a large copy.
        flops_per_s: of a large product.
        copy: what was copied.
        product: what was multiplied.
    """

    bytes_per_s: float
    flops_per_s: float
    copy: str
    product: str


def measure(runs: Sequence[Run], device: torch.device, effort: Effort, *, captured: bool = True) -> tuple[Timing, Any]:
    """Time calls that differ in their copy of the inputs; return also what the last timed call on the first gave.

    A capture that breaks keeps its memory: with ``captured`` False none is tried.
    """
    for _ in range(max(effort.warmup, 1)):
        result = runs[0]()
    del result
    extra = extra_memory(runs[0], device)
    call = call_seconds(runs, device, effort)
    if device.type != "cuda":
        return Timing(call * 1e3, WALL, call * 1e6, extra, len(runs)), runs[0]()
    (seconds, kept), how = _device_seconds(runs, effort, captured=captured)
    counted = counts(runs[0]) if effort.launches else (None, None)
    return Timing(seconds * 1e3, how, call * 1e6, extra, len(runs), *counted), kept


def _device_seconds(runs: Sequence[Run], effort: Effort, *, captured: bool) -> tuple[tuple[float, Any], str]:
    if captured:
        try:
            # A capture that fails leaves its own stream behind as the current one.
            with torch.cuda.stream(torch.cuda.current_stream()):
                return graph_seconds(runs, effort), GRAPH
        except RuntimeError:
            torch.cuda.synchronize()
    return event_seconds(runs, effort), EVENTS


def extra_memory(run: Run, device: torch.device) -> float | None:
    """Return the peak memory of a call in MiB, beyond what was allocated before; None where it is not counted."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = run()
    torch.cuda.synchronize()
    del result
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def call_seconds(runs: Sequence[Run], device: torch.device, effort: Effort) -> float:
    """Return the median wall time of a real call, over batches at whose end the device is waited for."""

    def batch(count: int) -> float:
        start = time.perf_counter()
        for i in range(count):
            runs[i % len(runs)]()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    count = max(1, min(200, int(BATCH_S / max(batch(1), 1e-9))))
    return statistics.median(batch(count) for _ in range(effort.iters or BATCHES))


def graph_seconds(runs: Sequence[Run], effort: Effort) -> tuple[float, Any]:
    """Return the median device time of a call, replayed from a CUDA graph, and the first call's last result.

    Raises:
        RuntimeError: the calls cannot be captured.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for run in runs:
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = runs[0]()
        for run in runs[1:]:
            run()
    seconds = _between_events(graph.replay, effort) / len(runs)
    return seconds, kept


def event_seconds(runs: Sequence[Run], effort: Effort) -> tuple[float, Any]:
    """Return the median device time of plain calls between events, and the first call's last result."""

    def round_() -> None:
        for run in runs:
            run()

    seconds = _between_events(round_, effort) / len(runs)
    return seconds, runs[0]()


def _between_events(run: Run, effort: Effort) -> float:
    def sample(count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / count

    for _ in range(max(effort.warmup, 1)):
        estimate = sample(1)
    sample(max(1, int(SETTLED_S / max(estimate, 1e-9))))
    count = max(1, int(REPLAYS_S / max(estimate, 1e-9)))
    return statistics.median(sample(count) for _ in range(effort.samples(estimate * count)))


def ceilings(device: torch.device, dtype: str) -> Ceilings:
    """Measure a large copy and a large product of random values."""
    on_gpu = device.type == "cuda"
    size, side = (2**30, 8192) if on_gpu else (2**26, 1024)
    effort = Effort(iters=None if on_gpu else 3)
    draw = DeviceDraw(DTYPES[dtype], device)
    pair = draw.normal(2, size // DTYPES[dtype].itemsize)
    # By a kernel: in a graph a plain copy is left to a copy engine, which is slower.
    copied, _ = measure([lambda: torch.neg(pair[1], out=pair[0])], device, effort)
    a, b = (draw.normal(side, side) for _ in range(2))
    product, _ = measure([lambda: torch.matmul(a, b)], device, effort)
    return Ceilings(
        2 * size / (copied.ms * 1e-3),
        2 * side**3 / (product.ms * 1e-3),
        f"{size >> 20} MiB, read and written",
        f"{side}^3, {dtype}, torch.matmul",
    )
