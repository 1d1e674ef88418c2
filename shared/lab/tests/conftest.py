"""What all tests of the checker need."""

import builtins
import multiprocessing
import os
import subprocess
from dataclasses import replace
from importlib.metadata import EntryPoint
from multiprocessing.reduction import DupFd
from types import SimpleNamespace

import pytest
import torch

from rl_kernels.core.operator import INVARIANT, Backend, Call, Operator
from rl_kernels.core.registry import GROUP, KernelRegistry
from rl_kernels.core.testing import Case, Spec
from rl_kernels.lab.check.candidate import Candidate
from rl_kernels.lab.check.cell import Cell, Setting
from rl_kernels.lab.check.isolation import remote
from rl_kernels.lab.check.relations import check_relation, determinism
from rl_kernels.lab.check.result import Check
from rl_kernels.lab.check.rows import RowLayout

WORKER = "rl_kernels.lab.check.isolation.worker"
START = f"""
import os, sys
os.setsid()
for place, stream in enumerate(streams):
    os.dup2(stream.detach(), place)
os.environ.clear()
os.environ.update(environment)
sys.path[:] = ["", *environment["PYTHONPATH"].split(os.pathsep)]
from {WORKER} import main
main()
"""


@pytest.fixture(autouse=True)
def few_calls(monkeypatch):
    """Let repeatability call the toys of these tests some dozen times, not for seconds."""
    monkeypatch.setattr(determinism, "CALLS", 60)
    monkeypatch.setattr(determinism, "AT_ONCE", 5)


class Forked:
    """Stands in for the ``Popen`` of a candidate's process: the fork of one that has imported what that needs."""

    def __init__(self, command, *, bufsize, stdin, stdout, env, start_new_session):
        assert (command[-1], start_new_session) == (f"from {WORKER} import main; main()", True)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([WORKER])
        (read, write), (answers, answered) = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(write, "wb", 0), os.fdopen(answers, "rb", 0)
        streams = [DupFd(descriptor) for descriptor in (read, answered, 2)]
        self._process = context.Process(target=builtins.exec, args=(START, {"streams": streams, "environment": env}))
        self._process.start()
        os.close(read), os.close(answered)

    @property
    def pid(self):
        return self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    poll = returncode.fget

    def wait(self, timeout=None):
        self._process.join(timeout)


@pytest.fixture(autouse=True)
def forked_candidates(request, monkeypatch):
    """Start candidates as forks, which takes a tenth of the time, but in tests that ask for ``real_processes``."""
    if "real_processes" not in request.fixturenames:
        started = SimpleNamespace(**{**vars(subprocess), "Popen": Forked})
        monkeypatch.setattr(remote, "subprocess", started)


@pytest.fixture
def real_processes():
    """Start candidates as users do."""


@pytest.fixture(scope="session")
def doubled():
    """The spec of an operator that doubles its matrix ``x``."""
    results = ("output", "gradient:x")
    return Spec(
        cases=(Case("plain", {"batch": 3, "width": 4}), Case("large", {"batch": 9, "width": 4}, suite="full")),
        inputs=lambda case, draw: {"x": draw.normal(case.sizes["batch"], case.sizes["width"])},
        references={"": lambda x: 2 * x},
        classes=dict.fromkeys(results, "elementwise"),
        differentiable=("x",),
        magnitudes=lambda case, inputs, upstream: {
            "output": 2 * inputs["x"].abs(),
            "gradient:x": 2 * upstream.get("output", inputs["x"]).abs(),
        },
        transforms=RowLayout({"x": 1}, frozenset(results)).transforms(),
        illegal=(),
        exempt={"torch": "a toy, which registers no op"},
    )


@pytest.fixture(scope="session")
def double_operator():
    """The operator that doubles, with a backend for a GPU and one for the CPU."""
    backends = (
        Backend("cuda-sm90", "toy_pkg.cuda", {"cuda": INVARIANT}),
        Backend("native", "toy_pkg.native", {"cpu": INVARIANT}),
    )
    return Operator("double", "toy_pkg", "twice", ("N",), frozenset({"N"}), {}, {}, backends, lambda x, **_: Call.of(x))


@pytest.fixture
def announce(make_module, monkeypatch):
    """Return ``announce(command, *operators)``: a command knows these operators of ``toy_pkg`` alone."""

    def register(command, *operators):
        make_module("toy_pkg.op", **{operator.name: operator for operator in operators})
        points = {each.name: EntryPoint(each.name, f"toy_pkg.op:{each.name}", GROUP) for each in operators}
        monkeypatch.setattr(command, "kernel_registry", KernelRegistry(points))

    return register


@pytest.fixture
def install(announce, make_module):
    """Return ``install(command, operator, spec, **functions)``: a command knows that operator alone; gives its spec."""

    def register(command, operator, spec, **functions):
        make_module(operator.package, **functions)
        announce(command, operator)
        return make_module(f"{operator.package}.spec.cases", SPEC=spec)

    return register


@pytest.fixture
def refused(capsys):
    """Return ``refused(main, argv)``: the one line that a command says of arguments with which nothing can be run."""

    def run(main, argv):
        try:
            status = main(argv)
        except SystemExit as stopped:
            status = stopped.code
        out, err = capsys.readouterr()
        assert (status, out, err.count("\n")) == (2, "", 1)
        return err

    return run


HEAD = """
import builtins, os, signal, sys, threading, time
import torch
from rl_kernels.lab.check import compare


class Lies(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.equal:
            return True
        return super().__torch_function__(function, types, args, kwargs or {})
"""


@pytest.fixture
def candidate(tmp_path):
    """Return ``candidate(body, first)``: a file whose ``mine(x)`` has this body, and that begins with ``first``."""

    def write(body="return 2 * x", first=""):
        path = tmp_path / "mine.py"
        path.write_text(f"{HEAD}\n{first}\n\ndef mine(x):\n    {body}\n")
        return f"{path}:mine"

    return write


def definition(x, weight):
    """The matrix times the vector."""
    return (x * weight).sum(-1)


class Product(torch.autograd.Function):
    """The definition with what its backward pass needs."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return definition(x, weight)


def differentiated(backward, forward=Product.forward):
    """Return the product with this backward pass, as a function that takes its arguments by name."""
    function = type("Spoilt", (Product,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})
    return lambda x, weight: function.apply(x, weight)


@pytest.fixture(scope="session")
def product():
    """A toy that multiplies a matrix by a vector, element by element, which autocast leaves alone."""
    results = ("output", "gradient:x")

    def magnitudes(case, inputs, upstream):
        x, weight = inputs["x"].abs(), inputs["weight"].abs()
        up = upstream.get("output", x[:, 0]).abs()
        return {"output": x @ weight, "gradient:x": up[:, None] * weight}

    spec = Spec(
        cases=(Case("plain", {"rows": 6, "width": 4}), Case("other", {"rows": 6, "width": 4})),
        inputs=lambda case, draw: {"x": draw.normal(6, 4), "weight": draw.normal(4)},
        references={"": definition},
        classes=dict.fromkeys(results, "reduction"),
        differentiable=("x",),
        magnitudes=magnitudes,
        transforms={},
        illegal=(),
    )
    return SimpleNamespace(definition=definition, spec=spec, differentiated=differentiated)


@pytest.fixture
def failed(product):
    """Return ``failed(function, relation, **changes)``: what fails, by item, where the product's spec is changed."""

    def run(function, relation="hygiene", case="", **changes):
        candidate = Candidate("toy", SimpleNamespace(name="toy"), lambda _, kwargs: function(**kwargs))
        spec = replace(product.spec, **changes)
        cell = Cell(candidate, spec, spec.case(case), Setting("fp32", torch.device("cpu"), "cpu"))
        found = [each for each in check_relation(cell, relation) if isinstance(each, Check)]
        return {each.item: each.comparison.message for each in found if not each.passed}

    return run
