"""Planted bugs: each is planted in one place and taken out again, and is caught or escapes."""

import importlib
import sys
from dataclasses import replace

import pytest
import torch

from rl_kernels.core.operator import INVARIANT, Backend, Call, Operator
from rl_kernels.core.testing import Case, IllegalCall, Spec, edited
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.lab.check.candidate import backend_candidate
from rl_kernels.lab.check.cell import Cell, Setting
from rl_kernels.lab.check.mutation import Baseline
from rl_kernels.lab.check.mutation.controls import CONTROLS
from rl_kernels.lab.check.rows import RowLayout

SOURCES = {
    "__init__": """
import importlib


def picked(x, ids, mask, *, backend=None):
    return importlib.import_module("toy_bugs.native").picked(x, ids, mask)
""",
    "low": """
import torch


def square(x):
    return x * x


def shown(value, mask):
    return torch.where(mask, value, 0.0)
""",
    "native": """
from toy_bugs.low import shown, square


def picked(x, ids, mask):
    if ids.dtype.is_floating_point:
        raise TypeError("ids: expected integers")
    return shown(square(x.gather(-1, ids[..., None])[..., 0]), mask)
""",
}
MODULES = ("toy_bugs.low", "toy_bugs.native")
CUBE = Bug("cube", "return x * x", "return x * x * x")
UNMASKED = Bug("mask ignored", ")[..., 0]), mask)", ")[..., 0]), mask | True)")
EQUIVALENT = Bug("nothing changes", "x * x", "x * 1 * x")


def definition(x, ids, mask):
    """The square of one element of each row, 0 where the mask does not hold."""
    return torch.where(mask, x.gather(-1, ids[..., None])[..., 0].square(), 0.0)


def _inputs(case, draw):
    rows, columns = case.sizes["rows"], case.sizes["columns"]
    return {"x": draw.normal(rows, columns), "ids": draw.ids(columns, rows), "mask": draw.mask(0.6, rows)}


def _magnitudes(case, inputs, upstream):
    gradient = torch.zeros_like(inputs["x"]).scatter(1, inputs["ids"][:, None], 1.0)
    upper = upstream.get("output", inputs["x"][:, 0])[:, None].abs()
    return {"output": definition(**inputs), "gradient:x": gradient * 2 * inputs["x"].abs() * upper}


SPEC = Spec(
    cases=(Case("plain", {"rows": 9, "columns": 7}),),
    inputs=_inputs,
    references={"": definition},
    classes={"output": "elementwise", "gradient:x": "elementwise"},
    differentiable=("x",),
    magnitudes=_magnitudes,
    transforms=RowLayout({"x": 1, "ids": 0, "mask": 0}, frozenset({"output", "gradient:x"})).transforms(),
    illegal=(IllegalCall("ids of floats", edited("ids", torch.Tensor.double), TypeError, "ids: expected integers"),),
    ids=("ids",),
    masks=("mask",),
    exempt={"torch": "a toy, which registers no op"},
)
SETTING = Setting("fp32", torch.device("cpu"), "cpu")


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch, make_module):
    """The toy operator's source, importable until the test ends."""
    folder = tmp_path / "toy_bugs"
    folder.mkdir()
    for name, source in SOURCES.items():
        (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    make_module("toy_bugs.spec.cases", SPEC=SPEC)
    yield
    for name in ("toy_bugs", *MODULES):
        sys.modules.pop(name, None)


def picked(x=3.0):
    native = importlib.import_module("toy_bugs.native")
    return float(native.picked(torch.tensor([[x]]), torch.tensor([0]), torch.tensor([False])))


def squared(x=3.0):
    """What the bottom module and its importer answer."""
    low, native = (importlib.import_module(name) for name in MODULES)
    shown = native.picked(torch.tensor([[x]]), torch.tensor([0]), torch.tensor([True]))
    return low.square(x), float(shown)


def test_a_bug_is_planted_where_it_stands_and_its_importers_follow():
    assert (*squared(), picked()) == (9.0, 9.0, 0.0)
    with planted(MODULES, CUBE):
        assert squared() == (27.0, 27.0)
    # One in the upper module leaves the lower as it is.
    with planted(MODULES, UNMASKED):
        assert (*squared(), picked()) == (9.0, 9.0, 9.0)
    assert (*squared(), picked()) == (9.0, 9.0, 0.0)


@pytest.mark.parametrize(
    "bug", [CUBE, Bug("no Python", "return x * x", "return ("), Bug("fails", "x * x", "x * x\n1 / 0")]
)
def test_the_modules_come_back_after_an_exception(bug):
    before = [importlib.import_module(name) for name in MODULES]
    with pytest.raises((RuntimeError, SyntaxError, ZeroDivisionError)), planted(MODULES, bug):
        raise RuntimeError
    assert [sys.modules[name] for name in MODULES] == before
    assert [getattr(sys.modules["toy_bugs"], name.rpartition(".")[2]) for name in MODULES] == before


@pytest.mark.parametrize(("old", "count"), [("no such text", 0), ("square", 3), ("import", 2)])
def test_a_bug_that_does_not_stand_exactly_once_is_refused(old, count):
    before = importlib.import_module(MODULES[0])
    with (
        pytest.raises(
            LookupError, match=rf"bug 'vague': expected '{old}' once in {MODULES[0]}.*found it {count} times"
        ),
        planted(MODULES, Bug("vague", old, "")),
    ):
        pass
    assert sys.modules[MODULES[0]] is before


def operator():
    backends = (Backend("native", "toy_bugs.native", {"cpu": INVARIANT}),)
    return Operator("picked", "toy_bugs", "", ("V",), frozenset(), {}, {}, backends, lambda x, *_, **__: Call.of(x))


def honest(call=None):
    candidate = backend_candidate(operator(), "native", "native", "cpu")
    candidate = replace(candidate, call=call) if call else candidate
    return Baseline(candidate, [Cell(candidate, SPEC, case, SETTING) for case in SPEC.cases])


def spoilt(found, relation, name):
    return found.modified(CONTROLS[relation][name](found.candidate.call, SPEC), relation)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("relation", "name"), [(relation, name) for relation in CONTROLS for name in CONTROLS[relation]]
)
def test_a_negative_control_is_caught_by_its_relation(relation, name):
    found = spoilt(honest(), relation, name)
    assert found.relation == relation
    assert found.comparison.message


def test_what_is_no_bug_or_fails_without_it_is_not_caught():
    for name in ("shifted ids", "mask off by one"):
        assert CONTROLS["accuracy"][name](lambda *_: None, replace(SPEC, ids=(), masks=())) is None
    assert honest().modified(honest().candidate.call, "accuracy") is None
    assert spoilt(honest(lambda function, inputs: definition(**inputs) + 1), "accuracy", "all zeros") is None


def test_mutants_are_caught_unless_they_change_nothing():
    for bug in (CUBE, UNMASKED):
        assert honest().planted(MODULES, bug).relation == "accuracy"
    assert honest().planted(MODULES, EQUIVALENT) is None
