"""Where a Triton backend can run: reasons, not surprises."""

import sys
from types import SimpleNamespace

import pytest
import torch

from rl_kernels.core.operator import Call
from rl_kernels.core.triton_lib import launch

CPU = Call(torch.device("cpu"), torch.float32, "cpu")
CUDA = Call(torch.device("cuda"), torch.float32, "sm90")


@pytest.mark.parametrize(
    ("call", "installed", "interpreted", "reason"),
    [
        (CUDA, True, False, None),
        (CUDA, True, True, None),
        (CUDA, False, False, "pip install triton"),
        (CPU, True, True, None),
        (CPU, True, False, "TRITON_INTERPRET=1"),
        (CPU, False, True, "not installed"),
        (Call(CUDA.device, torch.float64, "sm90"), True, False, "FP64 is for the native backend"),
    ],
)
def test_reasons(call, installed, interpreted, reason, monkeypatch):
    monkeypatch.setattr(launch, "INSTALLED", installed)
    monkeypatch.setattr(launch, "INTERPRETED", interpreted)
    found = launch.triton_backend("toy").why_not(call)
    assert found is None if reason is None else reason in found


def test_powers_of_2():
    assert [launch.next_power_of_2(x) for x in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128]


class Kernel:
    """Launches as a jitted function does; compiled, as what that returns does."""

    def __init__(self, launched, compiled=None):
        self.launched = launched
        self.compiled = compiled

    def __getitem__(self, grid):
        def run(*args, **options):
            self.launched.append((self.compiled, grid, args, options))
            return self.compiled

        return run


@pytest.fixture
def launched(monkeypatch):
    monkeypatch.setattr(launch, "direct", False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 40 + index, raising=False)
    monkeypatch.setattr(launch, "_compiled", {})
    return []


def test_arguments_that_came_before_are_launched_by_what_was_compiled(launched, monkeypatch):
    kernel = Kernel(launched, Kernel(launched))
    x = torch.zeros(4)
    for _ in range(3):
        launch.launch(kernel, (5,), x, None, 7, 0.5, True, num_warps=4)
    first = (kernel.compiled, (5,), (x, None, 7, 0.5, True), {"num_warps": 4})
    assert launched == [first, *[(None, (5, 1, 1), (x, None, 7, 0.5, True), {"stream": 40})] * 2]
    # Another device has a compiled kernel of its own.
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    for _ in range(2):
        launch.launch(kernel, (5,), x, None, 7, 0.5, True, num_warps=4)
    assert launched[3] == first
    assert launched[4][3] == {"stream": 41}


BASE = torch.zeros(512, dtype=torch.uint8)
BASE = BASE[-BASE.data_ptr() % 256 :]
"""Starts at a multiple of 256 bytes."""


@pytest.mark.parametrize(("interpret", "hip", "direct"), [("0", None, False), ("1", None, True), ("0", "6.4", True)])
def test_the_interpreter_and_rocm_launch_as_triton_does(interpret, hip, direct, run_code):
    ours = "from rl_kernels.core.triton_lib import launch; print(launch.direct, 'triton' in sys.modules)"
    done = run_code(f"import sys, torch; torch.version.hip = {hip!r}; {ours}", TRITON_INTERPRET=interpret)
    assert (done.stdout.split(), done.stderr) == ([str(direct), "False"], "")


def test_a_launch_of_a_plan_finds_what_was_compiled_by_addresses(launched):
    kernel = Kernel(launched, Kernel(launched))
    planned = launch.Launch(kernel, (5, 2), (7, True), num_warps=4, num_stages=2)
    tensors = [(BASE[place : place + 16], None, BASE[64:80]) for place in (0, 256, 16, 16)]
    for args in tensors:
        planned(*args)
    first = (kernel.compiled, (5, 2), (*tensors[0], 7, True), {"num_warps": 4, "num_stages": 2})
    aligned = (None, (5, 2, 1, 1), (*tensors[1], 7, True), {"stream": 40})
    other = (kernel.compiled, (5, 2), (*tensors[2], 7, True), {"num_warps": 4, "num_stages": 2})
    assert launched == [first, aligned, other, (None, (5, 2, 1, 1), (*tensors[3], 7, True), {"stream": 40})]


def test_a_number_may_vary_between_launches_of_a_plan(launched):
    planned = launch.Launch(Kernel(launched, Kernel(launched)), (5,), (7,), num_warps=4)
    for number in (0.5, 1.0, -0.25):
        planned(BASE[:16], number, None)
    assert [args[1:] for _, _, args, _ in launched] == [(0.5, None, 7), (1.0, None, 7), (-0.25, None, 7)]
    assert [options for *_, options in launched] == [{"num_warps": 4}, *[{"stream": 40}] * 2]


def test_what_is_remembered_is_bounded(launched, monkeypatch):
    monkeypatch.setattr(launch, "CACHE_SIZE", 3)
    planned = launch.Launch(Kernel(launched, Kernel(launched)), (5,), (), num_warps=4)
    for place in range(10):
        launch.launch(Kernel(launched, Kernel(launched)), (5,), place, num_warps=4)
        assert len(launch._compiled) <= 3
        planned(BASE[place : place + 16])
        assert len(planned._runs) <= 3


class Chain:
    """A chain of hooks as Triton has it: always there, mostly empty."""

    def __init__(self, *calls: object) -> None:
        self.calls = list(calls)


@pytest.mark.parametrize("hook", [None, Chain(), Chain(print), print])
def test_hooks_of_triton_are_called_where_a_profiler_has_set_one(hook, launched, monkeypatch):
    hooks = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=hook)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=SimpleNamespace(runtime=hooks)))
    compiled, runs = Kernel(launched), []
    compiled.run = lambda *args: runs.append(args)
    compiled.function, compiled.packed_metadata = "function", "metadata"
    planned = launch.Launch(Kernel([], compiled), (5, 2), (7,), num_warps=4)
    for _ in range(2):
        planned(BASE[:16])
    if hook is None or getattr(hook, "calls", [hook]) == []:
        assert [(*run[:9], run[10]) for run in runs] == [(5, 2, 1, 40, "function", "metadata", None, None, None, 7)]
        assert launched == []
    else:
        assert runs == []
        assert [options for *_, options in launched] == [{"stream": 40}]


@pytest.mark.parametrize("how", ["direct", "a hook that keeps it from compiling"])
def test_where_nothing_is_kept_a_launch_is_as_triton_does(how, launched, monkeypatch):
    monkeypatch.setattr(launch, "direct", how == "direct")
    kernel = Kernel(launched, Kernel(launched) if how == "direct" else None)
    planned = launch.Launch(kernel, (5,), (7,), num_warps=4)
    for _ in range(2):
        launch.launch(kernel, (5,), 7, num_warps=4)
        planned(BASE[:16])
    assert all(compiled is kernel.compiled for compiled, *_ in launched)
    assert [(grid, options) for _, grid, _, options in launched] == [((5,), {"num_warps": 4})] * 4
