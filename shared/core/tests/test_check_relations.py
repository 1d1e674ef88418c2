"""The relations on a toy operator: the honest implementation holds, each planted bug is caught, with a message."""

import itertools

import pytest
import torch

from rl_kernels.core.check.candidate import Candidate
from rl_kernels.core.check.cell import Cell, Setting
from rl_kernels.core.check.relations import RELATIONS
from rl_kernels.core.check.result import Check, Skip
from rl_kernels.core.testing import Case, IllegalCall, RowLayout, Spec, strides


def softplus_sum(x, *, scale=1.0):
    """The definition: scale times the row sums of log(1 + e^x)."""
    return scale * torch.log1p(x.exp()).sum(-1)


def _inputs(case, draw):
    return {"x": draw.normal(case.sizes["rows"], case.sizes["columns"]), **case.options}


def _magnitudes(case, inputs, upstream):
    x, scale = inputs["x"], abs(inputs.get("scale", 1.0))
    gradient = x.sigmoid() * scale * upstream.get("output", x[:, 0])[:, None].abs()
    return {"output": torch.log1p(x.exp()).sum(-1) * scale, "gradient:x": gradient}


SPEC = Spec(
    cases=(Case("plain", {"rows": 6, "columns": 9}), Case("scaled", {"rows": 3, "columns": 5}, {"scale": 2.5})),
    inputs=_inputs,
    references={"": softplus_sum},
    classes={"output": "reduction", "gradient:x": "reduction"},
    differentiable=("x",),
    magnitudes=_magnitudes,
    transforms={**RowLayout({"x": 1}, frozenset({"output", "gradient:x"})).transforms(), "strides": strides},
    illegal=(IllegalCall("text", lambda call: {**call, "x": "1"}, TypeError, "x: expected a tensor"),),
)


def tree(x):
    """A sum whose order is fixed: column by column."""
    total = torch.zeros_like(x[:, 0])
    for column in x.unbind(1):
        total = total + column
    return total


def honest(x, *, scale=1.0):
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x: expected a tensor, got {type(x).__name__}")
    return scale * tree(torch.log1p(x.exp()))


class Cheat(torch.autograd.Function):
    """The right output with a gradient that ``edit`` spoils."""

    @staticmethod
    def forward(ctx, x, scale, edit):
        ctx.save_for_backward(x)
        ctx.scale, ctx.edit = scale, edit
        return honest(x, scale=scale)

    @staticmethod
    def backward(ctx, upstream):
        (x,) = ctx.saved_tensors
        return ctx.edit(x.sigmoid() * ctx.scale, upstream[:, None]), None, None


def cheating(edit):
    return lambda x, *, scale=1.0: Cheat.apply(x, scale, edit)


COUNTER = itertools.count()

BUGS = {
    "zeros": ("accuracy", lambda x, *, scale=1.0: honest(x, scale=scale) * 0),
    "sign": ("accuracy", lambda x, *, scale=1.0: -honest(x, scale=scale)),
    "an option ignored": ("accuracy", lambda x, *, scale=1.0: honest(x)),
    "last column skipped": ("accuracy", lambda x, *, scale=1.0: honest(x[:, :-1], scale=scale)),
    "half output": ("accuracy", lambda x, *, scale=1.0: honest(x, scale=scale).half()),
    "half precision inside": ("accuracy", lambda x, *, scale=1.0: honest(x.half(), scale=scale).float()),
    "wrong shape": ("accuracy", lambda x, *, scale=1.0: honest(x, scale=scale)[:, None]),
    "None": ("accuracy", lambda x, *, scale=1.0: None),
    "a dict": ("accuracy", lambda x, *, scale=1.0: {"output": honest(x, scale=scale)}),
    "wrong arity": ("accuracy", lambda: None),
    "an exception": ("accuracy", lambda x, *, scale=1.0: 1 / 0),
    "NaN": ("accuracy", lambda x, *, scale=1.0: honest(x, scale=scale) + torch.nan),
    "one element off": (
        "accuracy",
        lambda x, *, scale=1.0: honest(x, scale=scale) + 1e-3 * (torch.arange(len(x)) == 1),
    ),
    "gradient of zeros": ("gradients", cheating(lambda local, upstream: torch.zeros_like(local))),
    "tiny gradient of zeros": ("gradients", lambda x, *, scale=1.0: honest(x, scale=scale).detach() + 0 * x.sum()),
    "gradient for ones only": ("gradients", cheating(lambda local, upstream: local.clone())),
    "gradient sign": ("gradients", cheating(lambda local, upstream: -local * upstream)),
    "gradient dtype": ("gradients", cheating(lambda local, upstream: (local * upstream).half().float())),
    "detached": ("gradients", lambda x, *, scale=1.0: honest(x.detach(), scale=scale)),
    "exception in backward": ("gradients", cheating(lambda local, upstream: 1 / 0)),
    "a mean over the batch": ("invariance", lambda x, *, scale=1.0: honest(x, scale=scale) + 1e-6 * x.mean()),
    "batch-dependent order": (
        "invariance",
        lambda x, *, scale=1.0: scale * tree(torch.log1p(x.exp()).flip(1) if len(x) > 4 else torch.log1p(x.exp())),
    ),
    "gradient across rows": (
        "invariance",
        cheating(lambda local, upstream: local * upstream * (1 + 1e-6 * len(local))),
    ),
    "noise": ("repeatability", lambda x, *, scale=1.0: honest(x, scale=scale) * (1 + 1e-6 * torch.rand(()))),
    "drift": ("repeatability", lambda x, *, scale=1.0: honest(x, scale=scale) + 1e-5 * next(COUNTER)),
    "no validation": (
        "robustness",
        lambda x, *, scale=1.0: (
            softplus_sum(torch.as_tensor(1.0) if x == "1" else x) if isinstance(x, str) else honest(x, scale=scale)
        ),
    ),
    "vague error": (
        "robustness",
        lambda x, *, scale=1.0: _refuse(TypeError("bad")) if isinstance(x, str) else honest(x),
    ),
    "wrong error": ("robustness", lambda x, *, scale=1.0: _refuse(KeyError("x")) if isinstance(x, str) else honest(x)),
}


def _refuse(error):
    raise error


class Toy:
    name = "toy"


def records(function, relation, case=None, **setting):
    candidate = Candidate("toy", Toy, lambda name, kwargs: function(**kwargs))
    shared = Setting("fp32", torch.device("cpu"), "cpu", **setting)
    return list(RELATIONS[relation](Cell(candidate, SPEC, case or SPEC.case(), shared)))


@pytest.mark.parametrize("relation", RELATIONS)
def test_an_honest_implementation_holds(relation):
    for case in SPEC.cases:
        found = records(honest, relation, case)
        assert found or case is not SPEC.case()
        assert not [record for record in found if isinstance(record, Skip) or not record.passed]


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_caught(bug):
    relation, function = BUGS[bug]
    found = [record for case in SPEC.cases for record in records(function, relation, case)]
    failed = [record for record in found if isinstance(record, Check) and not record.passed]
    assert failed
    assert all(record.comparison.message for record in failed)


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("bug", BUGS)
def test_no_bug_stops_the_suite(bug, relation):
    for record in records(BUGS[bug][1], relation):
        assert isinstance(record, Skip) or record.passed or record.comparison.message


def test_an_upstream_of_ones_hides_what_a_random_one_shows():
    function = BUGS["gradient for ones only"][1]
    first = records(function, "gradients", grad_mode="ones")[0]
    assert first.passed
    assert not records(function, "gradients", grad_mode="random")[0].passed


def test_inputs_of_a_candidate_are_its_own():
    def overwriting(x, *, scale=1.0):
        result = honest(x, scale=scale)
        with torch.no_grad():
            x.zero_()
        return result

    case = SPEC.case()
    cell = Cell(
        Candidate("toy", Toy, lambda name, kwargs: overwriting(**kwargs)),
        SPEC,
        case,
        Setting("fp32", torch.device("cpu"), "cpu"),
    )
    before = cell.inputs["x"].clone()
    cell.run(grad=False)
    assert torch.equal(cell.inputs["x"], before)


def test_constant_inputs_fill_the_differentiable_arguments():
    cell = Cell(
        Candidate("toy", Toy, lambda name, kwargs: honest(**kwargs)),
        SPEC,
        SPEC.case(),
        Setting("fp32", torch.device("cpu"), "cpu", constant=(0.25, 0)),
    )
    assert (cell.inputs["x"] == 0.25).all()


def test_seeds_differ_by_case_and_repeat():
    first, again, other = (
        Cell(Candidate("toy", Toy, honest), SPEC, case, Setting("fp32", torch.device("cpu"), "cpu"))
        for case in (SPEC.cases[0], SPEC.cases[0], SPEC.cases[1])
    )
    assert first.seed == again.seed != other.seed
    assert torch.equal(first.inputs["x"], again.inputs["x"])
