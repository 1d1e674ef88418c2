"""Clocks: device time of calls in a CUDA graph, wall time of real calls, peak extra memory, and what the device can do.

Device time is that of a graph that calls through every copy of the inputs, where the call can be captured; else of
events around plain calls. What is timed beside something else takes turns with it: near its limit of power a GPU moves
its clocks by what runs, and by what ran before, and a host has other work. On a CPU there is the wall time alone.
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
"""Of real calls, of which the median is taken; the device is waited for at the end of each."""
BATCH_S, BUDGET_S, MOST_CALLS = 0.01, 0.1, 200
"""How long a batch of calls takes, and all timed replays together, where no number of iterations is given."""
REPLAYS_S = 0.002
"""How long the replays between two events take at least: the launch of the first is then no share of the time."""

SETTLED_S = 0.1
"""How long something runs before it is timed: the clocks are then not those that something else has left, such as a
definition in FP64."""
LEAST_S = 1e-6
"""What a play is taken to last at least, whatever the events say."""


@dataclass(frozen=True)
class Effort:
    """How often things run, and what is counted.

    Attributes:
        iters: timed samples; None: by time.
        warmup: rounds before that, to which a GPU adds ``SETTLED_S``.
        launches: whether launches and waits are counted.
    """

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
        beside_ms: of device time of a call of what it took turns with; None if it was timed alone.
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
    """Calls that the device can be timed on, and what they are.

    Attributes:
        play: makes all of them.
        calls: how many there are.
        last: returns what the first of them gives; from a graph what it gave when it was last played.
        how: by which clock they are timed.
    """

    play: Run
    calls: int
    last: Run
    how: str


class Calls(NamedTuple):
    """Calls that take turns with others: one for each copy of the inputs, and what surrounds a batch of them."""

    runs: Sequence[Run]
    around: Callable[[], AbstractContextManager[object]] = nullcontext


class Measurement(NamedTuple):
    """What was measured, what the call on the first copy gave after that, the calls, and a GPU's clock of them."""

    timing: Timing
    result: Any
    runs: Sequence[Run]
    clock: Clock | None


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


def measure(
    runs: Sequence[Run],
    device: torch.device,
    effort: Effort,
    *,
    captured: bool = True,
    beside: Clock | None = None,
) -> Measurement:
    """Time calls that differ in their copy of the inputs, in turn with those of ``beside``.

    A capture that breaks keeps its memory: with ``captured`` False none is tried.
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
    """Return what calls are timed on: a CUDA graph of them, or the calls themselves where they cannot be captured."""
    if captured:
        try:
            # A capture that fails leaves its own stream behind as the current one.
            with torch.cuda.stream(torch.cuda.current_stream()):
                return _captured(runs)
        except RuntimeError:
            torch.cuda.synchronize()

    def play() -> None:
        for run in runs:
            run()

    return Clock(play, len(runs), runs[0], EVENTS)


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


def call_seconds(sides: Sequence[Calls], device: torch.device, effort: Effort) -> list[float]:
    """Return the median wall time of a real call of each side, over batches that take turns.

    The device is waited for at the end of a batch.
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
        """Return how many calls a batch has, by the time of so many."""
        return max(1, min(MOST_CALLS, int(BATCH_S / max(batch(calls, count), 1e-9))))

    # The first call takes longer than others: a batch of what seemed to fit tells what does.
    counts = [fitting(calls, fitting(calls, 1)) for calls in sides]
    rounds = [[batch(*side) for side in zip(sides, counts, strict=True)] for _ in range(effort.iters or BATCHES)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def _captured(runs: Sequence[Run]) -> Clock:
    """Capture the calls in a CUDA graph; ``RuntimeError`` if they cannot be."""
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
    return Clock(graph.replay, len(runs), lambda: kept, GRAPH)


def device_seconds(clocks: Sequence[Clock], effort: Effort) -> list[float]:
    """Return the median device time of a call by each clock; their samples are taken in turn."""

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
    rounds = [[sample(*each) for each in zip(clocks, plays, strict=True)] for _ in range(settling + samples)]
    times = zip(*rounds[settling:], strict=True)
    return [statistics.median(each) / clock.calls for each, clock in zip(times, clocks, strict=True)]


def ceilings(device: torch.device, dtype: str) -> Ceilings:
    """Measure a large copy and a large product of random values."""
    on_gpu = device.type == "cuda"
    size, side = (2**30, 8192) if on_gpu else (2**26, 1024)
    effort = Effort(iters=None if on_gpu else 3)
    draw = DeviceDraw(DTYPES[dtype], device)
    pair = draw.normal(2, size // DTYPES[dtype].itemsize)
    # By a kernel: in a graph a plain copy is left to a copy engine, which is slower.
    copied = measure([lambda: torch.neg(pair[1], out=pair[0])], device, effort).timing
    a, b = (draw.normal(side, side) for _ in range(2))
    product = measure([lambda: torch.matmul(a, b)], device, effort).timing
    return Ceilings(
        2 * size / (copied.ms * 1e-3),
        2 * side**3 / (product.ms * 1e-3),
        f"{size >> 20} MiB, read and written",
        f"{side}^3, {dtype}, torch.matmul",
    )
