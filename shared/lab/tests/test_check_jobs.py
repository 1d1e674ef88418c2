"""A run that processes share shows what a run in one process shows, and survives the end of one of them."""

import importlib
import multiprocessing
from contextlib import contextmanager
from functools import partial
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

from rl_kernels.core.registry import GROUP, KernelRegistry
from rl_kernels.lab.check import cli, jobs
from rl_kernels.lab.check.suite import in_turn, run

TOY = '''
"""A toy operator that doubles, and on one case is off, or ends its process."""

import os
import signal

import torch

from rl_kernels.lab.check.candidate import Candidate
from rl_kernels.lab.check.cell import Setting
from rl_kernels.lab.check.plan import Part, Plan
from rl_kernels.core.operator import INVARIANT, Backend, Call, Operator
from rl_kernels.core.testing import Case, Spec

BACKENDS = (Backend("native", "toy_jobs.native", {"cpu": INVARIANT}),)
OPERATOR = Operator("double", "toy_jobs", "2 x", ("N",), frozenset({"N"}), {}, {}, BACKENDS, lambda x, **_: Call.of(x))
SPEC = Spec(
    cases=[Case(f"rows-{rows}", {"batch": rows, "width": 4}) for rows in range(1, 12)],
    inputs=lambda case, draw: {"x": draw.normal(case.sizes["batch"], case.sizes["width"])},
    references={"": lambda x: 2 * x},
    classes={"output": "elementwise", "gradient:x": "elementwise"},
    differentiable=("x",),
    magnitudes=lambda case, inputs, upstream: {
        "output": 2 * inputs["x"].abs(),
        "gradient:x": 2 * upstream.get("output", inputs["x"]).abs(),
    },
    transforms={},
    illegal=(),
)


def plan_of(rows=0, act="", fails_fast=False):
    def call(function, inputs):
        x = inputs["x"]
        if len(x) != rows:
            return 2 * x
        if act == "end":
            os.kill(os.getpid(), signal.SIGKILL)
        return 2.001 * x

    setting = Setting("fp32", torch.device("cpu"), "cpu")
    toy = Candidate("toy", OPERATOR, call)
    return Plan([Part(setting, [toy])], ["accuracy", "gradients"], fails_fast=fails_fast)
'''


@pytest.fixture
def plan_of(tmp_path, monkeypatch):
    """Return what makes the toy's plan, in a module that every process finds."""
    package = tmp_path / "toy_jobs"
    package.mkdir()
    (package / "__init__.py").write_text(TOY)
    (package / "spec").mkdir()
    (package / "spec" / "__init__.py").write_text("")
    (package / "spec" / "cases.py").write_text("from toy_jobs import SPEC\n")
    (package / "op.py").write_text("from toy_jobs import OPERATOR\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module("toy_jobs").plan_of


@pytest.fixture(autouse=True)
def forked(request, monkeypatch):
    """Start processes as forks, but in one test."""
    if "real_processes" not in request.fixturenames:
        context = multiprocessing.get_context("forkserver")
        monkeypatch.setattr(jobs, "multiprocessing", SimpleNamespace(get_context=lambda _: context))


def shared_run(plan_of, count=2):
    with jobs.shared(plan_of, count) as results:
        return run(plan_of(), results=results)


@pytest.mark.usefixtures("real_processes")
def test_processes_show_what_one_shows_in_the_same_order(plan_of):
    off = partial(plan_of, 4, "off")
    alone, together = run(off()), shared_run(off)
    assert not alone.passed
    assert repr(together.records) == repr(alone.records)


def test_the_first_failure_in_order_may_end_the_run(plan_of):
    found = shared_run(partial(plan_of, 4, "off", fails_fast=True)).records
    assert [record.case for record in found if not record.passed] == ["rows-4"]
    assert found[-1].case == "rows-4"


def test_a_process_that_ends_is_named_with_what_was_known(plan_of):
    report = shared_run(partial(plan_of, 4, "end"))
    assert not report.passed
    assert report.interrupted == "a process was ended by SIGKILL at double toy fp32 rows-4"
    assert {record.case for record in report.records} == {"rows-1", "rows-2", "rows-3"}


@pytest.mark.parametrize(("flags", "counts"), [([], []), (["--jobs", "1"], []), (["--jobs", "3"], [3])])
def test_the_command_line_asks_for_processes(flags, counts, plan_of, monkeypatch):
    toy = importlib.import_module("toy_jobs")
    point = EntryPoint("double", "toy_jobs:OPERATOR", GROUP)
    asked = []

    @contextmanager
    def one_process(plan_again, count):
        asked.append((list(plan_again().names()), count))
        yield in_turn

    monkeypatch.setattr(cli, "shared", one_process)
    monkeypatch.setattr(cli, "kernel_registry", KernelRegistry({"double": point}))
    assert cli.main(["--candidate", "pytorch", "--device", "cpu", *flags]) == 0
    assert [count for _, count in asked] == counts
    for names, _ in asked:
        assert names == [f"double/pytorch/fp32/accuracy/{case.name}" for case in toy.SPEC.cases]
