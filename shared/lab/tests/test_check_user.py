"""A user's own implementation: how it is found, what it is held to, and what is said if it cannot be."""

import json
import re
import sys
from dataclasses import replace
from textwrap import dedent

import pytest

from rl_kernels.core.loading import load
from rl_kernels.core.operator import INVARIANT, Backend, Call, Operator
from rl_kernels.core.testing import Case, IllegalCall, Spec
from rl_kernels.lab.check import cli
from rl_kernels.lab.check.rows import RowLayout


def scaled(x, y, *, scale=1.0, backend=None):
    return scale * (x + y)


def halved(x, y, *, backend=None):
    return (x + y) / 2


def _inputs(case, draw):
    shape = case.sizes["rows"], case.sizes["width"]
    return {"x": draw.normal(*shape), "y": draw.normal(*shape), **case.options}


SIZES = {"rows": 3, "width": 4}
RESULTS = ("output", "gradient:x", "gradient:y")
SPEC = Spec(
    cases=(
        Case("plain", SIZES),
        Case("scaled", SIZES, {"scale": 3.0}),
        Case("halved", SIZES, function="halved"),
    ),
    inputs=_inputs,
    references={"": lambda x, y, scale=1.0: scale * (x + y), "halved": lambda x, y: (x + y) / 2},
    classes=dict.fromkeys(RESULTS, "elementwise"),
    differentiable=("x", "y"),
    magnitudes=lambda case, inputs, upstream: dict.fromkeys(RESULTS, 10 * (inputs["x"].abs() + inputs["y"].abs())),
    transforms=RowLayout({"x": 1, "y": 1}, frozenset(RESULTS)).transforms(),
    illegal=(IllegalCall("text", lambda call: {**call, "x": "1"}, TypeError, "x"),),
)
BACKENDS = (Backend("native", "toy_pkg.native", {"cpu": INVARIANT}),)
OPERATOR = Operator("scaled", "toy_pkg", "", ("N",), frozenset("N"), {}, {}, BACKENDS, lambda x, *_, **__: Call.of(x))


@pytest.fixture(autouse=True)
def operator(install):
    install(cli, OPERATOR, SPEC, scaled=scaled, halved=halved)


@pytest.fixture
def check(capsys):
    """Return ``check(candidate, *flags)``: the exit status and the JSON report."""

    def run(candidate, *flags):
        status = cli.main(["--op", "scaled", "--candidate", candidate, "--device", "cpu", "--json", *flags])
        return status, json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def file(tmp_path):
    """Return ``file(source)``: the path of a Python file."""

    def write(source, name="mine.py"):
        path = tmp_path / name
        path.write_text(dedent(source))
        return path

    return write


@pytest.fixture
def line(refused):
    """Return ``line(candidate, *flags)``: what is said of a candidate that cannot be checked."""
    op = ("--op", "scaled")
    return lambda candidate, *flags: refused(cli.main, [*(flags or op), "--candidate", candidate, "--device", "cpu"])


def entries(report):
    return report["candidates"][0]["outputs"] if report["candidates"] else []


def skipped(report, relation):
    return {skip["case"]: skip["reason"] for skip in report["skipped"] if skip["relation"] == relation}


HONEST = """
def mine(x, y, *, scale=1.0):
    return scale * (x + y)
"""


@pytest.mark.usefixtures("real_processes")
def test_an_honest_file_passes_and_what_says_nothing_of_results_is_skipped(check, file):
    candidate = f"{file(HONEST)}:mine"
    status, report = check(candidate, "--check-grad")
    assert status == 0
    assert report["candidates"][0]["name"] == candidate
    ran = {(entry["relation"], entry["case"]) for entry in entries(report)}
    judged = ("accuracy", "gradients", "repeatability", "invariance", "hygiene")
    assert ran == {(relation, case) for relation in judged for case in ("plain", "scaled")}
    for relation in ("robustness", "parity", "torch"):
        reasons = skipped(report, relation)
        assert reasons.keys() == {"plain", "scaled", "halved"}
        assert all("is judged on accuracy, gradients" in reason for reason in reasons.values())
    assert skipped(report, "accuracy") == {"halved": "it does not implement halved"}


@pytest.mark.parametrize(
    ("name", "source", "case", "reason"),
    [
        ("halved", "def halved(x, y): return (x + y) / 2", "halved", "it does not implement scaled"),
        ("mine", "def mine(x, y): return x + y", "plain", "its signature has no scale"),
        ("mine", "def mine(x, y, **kwargs): return x + y", "plain", "its signature has no scale"),
    ],
)
def test_its_name_and_options_say_which_cases_it_is_for(name, source, case, reason, check, file):
    status, report = check(f"{file(source)}:{name}", "--relation", "accuracy")
    assert status == 0
    assert {entry["case"] for entry in entries(report)} == {case}
    assert skipped(report, "accuracy")["scaled"] == reason


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("x, *, scale=1.0", "scale, x: y is missing"),
        ("x, other", "other, x: y is missing; other is required, but scaled has no such argument"),
        ("x, y, other", "other, x, y: other is required, but scaled has no such argument"),
        ("x, y, scale", "scale, x, y: scale is required, but calls may leave it out"),
        ("x, y, /", "no keywords: x is positional-only; y is positional-only"),
        ("x, /, y, **kwargs", "y: x is positional-only"),
        ("*args", "no keywords: x is missing; y is missing"),
    ],
)
def test_a_signature_that_no_call_fits_ends_in_two(parameters, message, file, line):
    target = f"{file(f'def mine({parameters}): return 0')}:mine"
    said = line(target)
    assert f"--candidate {target}: scaled is called with x, y by name, and options; it takes {message}" in said


@pytest.mark.parametrize("base", ["torch.nn.Module", "object"])
def test_a_class_is_not_called_in_place_of_an_instance(base, file, line):
    written = file(f"import torch\nclass Mine({base}):\n    def forward(self, x, y): return x + y")
    assert line(f"{written}:Mine").endswith("Mine is a class; name an instance of it, or a function\n")


@pytest.mark.parametrize("parameters", ["**kwargs", "x, **kwargs", "y, x, unknown=3"])
def test_a_signature_that_calls_fit_is_called(parameters, check, file):
    status, report = check(f"{file(f'def mine({parameters}): return 0')}:mine", "--relation", "accuracy")
    assert status == 1
    assert all("expected a tensor" in entry["message"] for entry in entries(report))


def test_the_traceback_stands_in_the_report_alone(check, file, capsys):
    status, report = check(f"{file('def mine(x, y): return x.lost')}:mine", "--relation", "accuracy")
    assert status == 1
    assert "mine.py" in entries(report)[0]["traceback"]
    assert not capsys.readouterr().err


def test_a_file_may_define_a_dataclass_and_be_called_like_a_module(file):
    source = """
    from __future__ import annotations
    from dataclasses import dataclass

    @dataclass
    class Settings:
        scale: float = 2.0

    def mine(x): return Settings().scale * x
    """
    assert load(f"{file(source, 'my_settings.py')}:mine").function(2) == 4
    assert load(f"{file('def mine(x): return x', 'json.py')}:mine").function(2) == 2
    assert sys.modules["json"] is json


UNUSABLE = [
    ("no_such_module:f", "cannot import no_such_module: ModuleNotFoundError"),
    ("{folder}/none.py:f", "none.py: FileNotFoundError: no such file"),
    ("{folder}:f", "cannot import"),
    (":f", "cannot import"),
    ("{file}:missing", "has no callable 'missing'"),
    ("{file}:", "has no callable ''"),
    ("{file}:mine.inner", "has no callable 'mine.inner'"),
    ("{file}:NUMBER", "has no callable 'NUMBER'"),
    ("{raises}:mine", "raises.py: RuntimeError: at import"),
    ("{exits}:mine", "exits.py: SystemExit: 0"),
    ("{wrong}:mine", "wrong.py: SyntaxError"),
]


@pytest.mark.parametrize(("pattern", "message"), UNUSABLE)
def test_what_cannot_be_found_is_said(pattern, message, file, tmp_path, line):
    files = {
        "file": "NUMBER = 1\ndef mine(x): return x",
        "raises": "raise RuntimeError('at import')",
        "exits": "import sys\nsys.exit(0)",
        "wrong": "def mine(:",
    }
    target = pattern.format(folder=tmp_path, **{name: file(source, f"{name}.py") for name, source in files.items()})
    with pytest.raises(ValueError, match=re.escape(message)):
        load(target)
    assert message in line(target)


def test_several_operators_are_one_too_many(file, announce, line):
    announce(cli, OPERATOR, replace(OPERATOR, name="other"))
    both = ("--op", "scaled", "--op", "other")
    assert "say which operator it implements, with --op" in line(f"{file(HONEST)}:mine", *both)
    assert "say which operator it implements, with --op" in line(f"{file(HONEST)}:mine", "--suite", "quick")


def test_a_wrong_implementation_fails(check, file):
    status, report = check(f"{file('def mine(x, y): return x + 1.001 * y')}:mine")
    assert status == 1
    assert not [entry for entry in entries(report) if entry["relation"] == "accuracy" and entry["passed"]]
