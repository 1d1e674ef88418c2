"""Clocks: device time in a CUDA graph, wall time of real calls, peak extra memory, and ceilings of the device.

Device time is measured on a CUDA graph that calls on every copy of the inputs in turn; if the call cannot be captured,
with events around plain calls. Two implementations that are compared take turns, because a GPU near its power limit
changes its clock rate with what runs and what ran before, and the host has other work. On a CPU only wall time is
measured.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rl_kernels.core.contract import DTYPES
from rl_kernels.lab.bench.arena import DeviceDraw
from rl_kernels.lab.bench.counts import counts

Run = Callable[[], Any]

GRAPH, EVENTS, WALL = "CUDA graph", "events", "wall clock"
BATCHES = 5
"""Number of batches of real calls, of which the median is taken; each ends with a wait for the device."""
BATCH_S, BUDGET_S, MOST_CALLS = 0.01, 0.1, 200
"""Seconds of a batch, seconds of all timed replays if ``iters`` is None, and largest number of calls of a batch."""
REPLAYS_S = 0.002
"""Shortest time of the replays between two events, in seconds, so that the first launch does not count."""

SETTLED_S = 0.1
"""Seconds that something runs before it is timed, so that earlier work, such as a definition in FP64, does not affect
the clock rate."""
LEAST_S = 1e-6
"""Shortest time of a play, in seconds, that is assumed: events may report 0."""


@dataclass(frozen=True)
class Effort:
    """Numbers of timed and warm-up calls, and whether launches are counted.

    Attributes:
        iters: timed samples; None chooses them by time.
        warmup: warm-up rounds, to which a GPU adds ``SETTLED_S``.
        launches: whether launches and waits are counted.
    """

    iters: int | None = None
    warmup: int = 3
    launches: bool = False

    def samples(self, seconds: float) -> int:
        """Return the number of samples of a call that takes ``seconds``."""
        return self.iters or max(5, min(100, int(BUDGET_S / max(seconds, 1e-9))))


@dataclass(frozen=True)
class Timing:
    """Time and memory of one pass of one implementation.

    Attributes:
        ms: device time; on a CPU, wall time.
        how: the clock that measured it.
        call_us: wall time of a real call, host work included.
        extra_mib: peak memory beyond what was allocated before, results included; None on a CPU.
        copies: copies of the inputs that were cycled through.
        launches: kernels, copies and fills launched by one call; None if they were not counted.
        waits: waits of the host for the device in one call; None if they were not counted.
        beside_ms: device time of the call that it took turns with; None if it was timed alone.
    """

    ms: float
    how: str
    call_us: float
    extra_mib: float | None
    copies: int
    launches: int | None = None
    waits: int | None = None
    beside_ms: float | None = None


class Clock(NamedTuple):
    """Calls that are timed together on the device.

    Attributes:
        play: makes all calls.
        calls: number of calls.
        last: returns the result of the first call; of a graph, the result of its last replay.
        how: the clock that times them.
    """

    play: Run
    calls: int
    last: Run
    how: str


class Calls(NamedTuple):
    """Calls that take turns with other calls: one for each copy of the inputs, and the context manager of a batch."""

    runs: Sequence[Run]
    around: Callable[[], AbstractContextManager[object]] = nullcontext


class Measurement(NamedTuple):
    """The times, the result of the call on the first copy afterwards, the calls, and on a GPU their clock."""

    timing: Timing
    result: Any
    runs: Sequence[Run]
    clock: Clock | None


@dataclass(frozen=True)
class Ceilings:
    """Measured ceilings of the device in this run.

    Attributes:
        bytes_per_s: bytes read and written per second by a large copy.
        flops_per_s: floating-point operations per second of a large matrix product.
        copy: description of the copy.
        product: description of the product.
    """

    bytes_per_s: float
    flops_per_s: float
    copy: str
    product: str


def measure(
    runs: Sequence[Run],
    device: torch.device,
    effort: Effort,
    *,
    captured: bool = True,
    beside: Clock | None = None,
) -> Measurement:
    """Time calls on different copies of the inputs, in turn with the calls of ``beside``.

    ``captured=False`` does not try to capture a CUDA graph: a failed capture keeps its memory.
    """
    for _ in range(max(effort.warmup, 1)):
        result = runs[0]()
    del result
    extra = extra_memory(runs[0], device)
    (call,) = call_seconds([Calls(runs)], device, effort)
    if device.type != "cuda":
        return Measurement(Timing(call * 1e3, WALL, call * 1e6, extra, len(runs)), runs[0](), runs, None)
    clock = clock_of(runs, captured=captured)
    ms = [seconds * 1e3 for seconds in device_seconds([clock] if beside is None else [clock, beside], effort)]
    result = clock.last()
    launches, waits = counts(runs[0]) if effort.launches else (None, None)
    timing = Timing(ms[0], clock.how, call * 1e6, extra, len(runs), launches, waits, ms[1] if beside else None)
    return Measurement(timing, result, runs, clock)


def clock_of(runs: Sequence[Run], *, captured: bool = True) -> Clock:
    """Return a clock for calls: a CUDA graph of them, or the calls themselves if they cannot be captured."""
    if captured:
        try:
            # A failed capture would leave its own stream as the current one.
            with torch.cuda.stream(torch.cuda.current_stream()):
                return capture(runs)
        except RuntimeError:
            torch.cuda.synchronize()

    def play() -> None:
        for run in runs:
            run()

    return Clock(play, len(runs), runs[0], EVENTS)


def extra_memory(run: Run, device: torch.device) -> float | None:
    """Return the peak memory of a call in MiB, beyond what was allocated before; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = run()
    torch.cuda.synchronize()
    del result
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def call_seconds(sides: Sequence[Calls], device: torch.device, effort: Effort) -> list[float]:
    """Return the median wall time of a real call of each side, over batches that take turns.

    Each batch ends with a wait for the device.
    """

    def batch(calls: Calls, count: int) -> float:
        runs = calls.runs
        with calls.around():
            start = time.perf_counter()
            for i in range(count):
                runs[i % len(runs)]()
            if device.type == "cuda":
                torch.cuda.synchronize()
            return (time.perf_counter() - start) / count

    def fitting(calls: Calls, count: int) -> int:
        """Return the number of calls that fit into a batch, from the time of ``count`` calls."""
        return max(1, min(MOST_CALLS, int(BATCH_S / max(batch(calls, count), 1e-9))))

    # The first call is slower than others, so measure again with the number of calls that seemed to fit.
    counts = [fitting(calls, fitting(calls, 1)) for calls in sides]
    rounds = [[batch(*side) for side in zip(sides, counts, strict=True)] for _ in range(effort.iters or BATCHES)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def capture(runs: Sequence[Run]) -> Clock:
    """Capture the calls in a CUDA graph; ``RuntimeError`` if they cannot be."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for run in runs:
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first_result = runs[0]()
        for run in runs[1:]:
            run()
    return Clock(graph.replay, len(runs), lambda: first_result, GRAPH)


def device_seconds(clocks: Sequence[Clock], effort: Effort) -> list[float]:
    """Return the median device time of a call of each clock; the clocks take turns."""

    def sample(clock: Clock, plays: int) -> float:
        """Return the seconds of one play."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(plays):
            clock.play()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / plays

    plays, seconds = [], 0.0
    for clock in clocks:
        for _ in range(max(effort.warmup, 1)):
            estimate = max(sample(clock, 1), LEAST_S)
        plays.append(max(1, int(REPLAYS_S / estimate)))
        seconds += plays[-1] * estimate
    settling, samples = math.ceil(SETTLED_S / seconds), effort.samples(seconds)
    rounds = [[sample(*turn) for turn in zip(clocks, plays, strict=True)] for _ in range(settling + samples)]
    times = zip(*rounds[settling:], strict=True)
    return [statistics.median(clock_times) / clock.calls for clock_times, clock in zip(times, clocks, strict=True)]


def ceilings(device: torch.device, dtype: str) -> Ceilings:
    """Measure a large copy and a large product of random values."""
    on_gpu = device.type == "cuda"
    size, side = (2**30, 8192) if on_gpu else (2**26, 1024)
    effort = Effort(iters=None if on_gpu else 3)
    draw = DeviceDraw(DTYPES[dtype], device)
    pair = draw.normal(2, size // DTYPES[dtype].itemsize)
    # Copy with a kernel: in a graph a plain copy uses a copy engine, which is slower.
    copied = measure([lambda: torch.neg(pair[1], out=pair[0])], device, effort).timing
    a, b = (draw.normal(side, side) for _ in range(2))
    product = measure([lambda: torch.matmul(a, b)], device, effort).timing
    return Ceilings(
        2 * size / (copied.ms * 1e-3),
        2 * side**3 / (product.ms * 1e-3),
        f"{size >> 20} MiB, read and written",
        f"{side}^3, {dtype}, torch.matmul",
    )
