"""The clocks, on a CPU for real and on a GPU that is played: what runs how often, and what is divided by what."""

import itertools
import warnings
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from rl_kernels.core.testing import Case, Spec
from rl_kernels.lab.bench import measure
from rl_kernels.lab.bench.arena import Arena
from rl_kernels.lab.bench.measure import EVENTS, GRAPH, WALL, Effort

GPU = SimpleNamespace(type="cuda", index=None)
CALL_S = 1e-5


class Played:
    """A GPU whose clock goes on by ``CALL_S`` for each call, on which graphs can be captured or cannot."""

    def __init__(self, capturable):
        self.capturable, self.seconds, self.inside, self.graph, self.calls = capturable, 0.0, False, [], 0
        # How many times as long a replay takes at some time.
        self.slowness = lambda seconds: 1.0

    def call(self, result):
        def run():
            self.calls += 1
            if self.inside:
                if not self.capturable:
                    raise RuntimeError("operation not permitted when stream is capturing")
                self.graph.append(CALL_S)
            else:
                self.seconds += CALL_S
            return result

        return run

    @contextmanager
    def capture(self, graph):
        self.inside, self.graph = True, []
        try:
            yield
        finally:
            self.inside = False

    def replay(self):
        self.take(sum(self.graph))

    def take(self, seconds):
        self.seconds += seconds * self.slowness(self.seconds)


@pytest.fixture
def played(monkeypatch, request):
    gpu = Played(getattr(request, "param", True))

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = gpu.seconds

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            return (other.at - self.at) * 1e3

    nothing = SimpleNamespace(wait_stream=lambda other: None)

    @contextmanager
    def stream(_):
        yield

    memory = itertools.count(2**20, 2**20)
    for name, value in {
        "CUDAGraph": lambda: SimpleNamespace(replay=gpu.replay),
        "Event": Event,
        "Stream": lambda: nothing,
        "current_stream": lambda: nothing,
        "graph": gpu.capture,
        "max_memory_allocated": lambda: next(memory),
        "memory_allocated": lambda: next(memory),
        "reset_peak_memory_stats": lambda: None,
        "stream": stream,
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return gpu


@pytest.mark.parametrize(("played", "how"), [(True, GRAPH), (False, EVENTS)], indirect=["played"])
@pytest.mark.parametrize("copies", [1, 3])
def test_device_time_is_that_of_one_call(played, how, copies):
    timing, result, runs, clock = measure.measure([played.call(i) for i in range(copies)], GPU, Effort())
    assert timing.ms == pytest.approx(CALL_S * 1e3)
    assert (timing.how, timing.copies, timing.extra_mib, timing.beside_ms) == (how, copies, 1.0, None)
    assert result == 0
    assert timing.call_us > 0
    assert (len(runs), clock.calls, clock.how) == (copies, copies, how)


def test_clocks_that_are_low_from_what_ran_before_are_not_timed(played):
    played.slowness = lambda seconds: 2 if seconds < 0.09 else 1
    timing = measure.measure([played.call(0)], GPU, Effort(iters=1, warmup=1)).timing
    assert timing.ms == pytest.approx(CALL_S * 1e3)


def test_what_is_timed_beside_something_takes_turns_with_it(played):
    played.slowness = lambda seconds: 1 + 10 * seconds
    ours = measure.measure([played.call(0)], GPU, Effort())
    beside = measure.Clock(lambda: played.take(2 * CALL_S), 2, lambda: None, GRAPH)
    timing = measure.measure([played.call(0)], GPU, Effort(), beside=beside).timing
    assert timing.ms == pytest.approx(timing.beside_ms, rel=0.05)
    assert timing.ms > 1.5 * ours.timing.ms


def test_iterations_as_asked_for(played, monkeypatch):
    samples = []
    median = measure.statistics.median
    monkeypatch.setattr(
        measure.statistics, "median", lambda values: median(samples.append(list(values)) or samples[-1])
    )
    measure.measure([played.call(0)], GPU, Effort(iters=7))
    assert [len(each) for each in samples] == [7, 7]


def test_launches_and_waits_are_counted_where_they_are_asked_for(played, monkeypatch):
    devices, profiled = torch.autograd.DeviceType, []
    events = [SimpleNamespace(device_type=kind) for kind in (devices.CUDA, devices.CPU, devices.CUDA)]

    @contextmanager
    def profile(activities):
        profiled.append(activities)
        yield SimpleNamespace(events=lambda: events)

    modes = ["default"]
    monkeypatch.setattr(torch.profiler, "profile", profile)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1], raising=False)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append, raising=False)

    def run():
        if modes[-1] == "warn":
            for text in ("called a synchronizing CUDA operation", "another", "called a synchronizing CUDA operation"):
                warnings.warn(text, stacklevel=1)

    timing = measure.measure([run], GPU, Effort(launches=True)).timing
    assert (timing.launches, timing.waits) == (2, 2)
    assert modes == ["default", "warn", "default"]
    timing = measure.measure([run], GPU, Effort()).timing
    assert (timing.launches, timing.waits, len(profiled)) == (None, None, 1)
    timing = measure.measure([run], torch.device("cpu"), Effort(iters=1, launches=True)).timing
    assert (timing.launches, timing.waits) == (None, None)


def test_a_cpu_has_wall_time_alone():
    timing, result, runs, clock = measure.measure([lambda: 5], torch.device("cpu"), Effort(iters=2, warmup=0))
    assert timing.ms * 1e3 == pytest.approx(timing.call_us)
    assert (timing.how, timing.extra_mib, result, len(runs), clock) == (WALL, None, 5, 1, None)


def test_a_call_s_time_is_its_share_of_a_batch(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock.now)

    def run():
        clock.now += 1e-3

    assert measure.call_seconds([measure.Calls([run])], torch.device("cpu"), Effort()) == [pytest.approx(1e-3)]


def test_real_calls_take_turns_each_in_its_own_surroundings(monkeypatch):
    """The host gets slower all the time, and to enter and to leave takes longer than any call."""
    clock, inside = SimpleNamespace(now=0.0), []

    @contextmanager
    def around():
        clock.now += 10.0
        inside.append("peer")
        yield
        inside.pop()
        clock.now += 10.0

    def run(name, slower):
        def call():
            assert inside == name
            clock.now += slower * 1e-3 * (1 + clock.now / 100)

        return call

    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock.now)
    sides = [measure.Calls([run(["peer"], 2)], around), measure.Calls([run([], 1)])]
    theirs, ours = measure.call_seconds(sides, torch.device("cpu"), Effort())
    assert theirs / ours == pytest.approx(2, rel=0.1)


def test_samples_follow_the_time_of_one_and_ceilings_the_device():
    assert [Effort().samples(1e-6), Effort().samples(10.0), Effort(iters=3).samples(10.0)] == [100, 5, 3]
    found = measure.ceilings(torch.device("cpu"), "fp32")
    assert found.bytes_per_s > 1e8
    assert found.flops_per_s > 1e8


def test_copies_go_beyond_the_cache(monkeypatch):
    spec = Spec((), lambda case, draw: {"x": draw.normal(case.sizes["n"])}, {}, {}, (), lambda *_: {}, {}, ())
    properties = SimpleNamespace(L2_cache_size=4000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(Arena, "inputs", {"x": torch.randn(100)})

    def copies():
        arena = Arena(spec, Case("toy", {"n": 100}), "fp32", GPU)
        assert arena.copies is arena.copies
        return arena.copies

    assert len({copy["x"].data_ptr() for copy in copies()}) == len(copies()) == 20
    properties.L2_cache_size = 100
    assert len(copies()) == 1
    properties.L2_cache_size = 2**30
    assert len(copies()) == 64
