"""The relations on a toy operator: the honest implementation holds, each planted bug is caught, with a message."""

import itertools
import re
import sys
import warnings
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

from rl_kernels.core.dispatch import BackendUnavailable
from rl_kernels.core.testing import Case, IllegalCall, Spec
from rl_kernels.lab.check.candidate import Candidate
from rl_kernels.lab.check.cell import Cell, Setting
from rl_kernels.lab.check.relations import RELATIONS, check_relation
from rl_kernels.lab.check.relations.integration import syncs_raise
from rl_kernels.lab.check.result import Check, Skip
from rl_kernels.lab.check.rows import RowLayout


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
    transforms=RowLayout({"x": 1}, frozenset({"output", "gradient:x"})).transforms(),
    illegal=(IllegalCall("text", lambda call: {**call, "x": "1"}, TypeError, "x: expected a tensor"),),
)


def tree(x):
    """A sum whose order is fixed: column by column."""
    total = torch.zeros_like(x[..., 0])
    for column in x.unbind(-1):
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
        return ctx.edit(x.sigmoid() * ctx.scale, upstream[..., None]), None, None


def cheating(edit):
    return lambda x, *, scale=1.0: Cheat.apply(x, scale, edit)


COUNTER = itertools.count()
OWN_GENERATOR = torch.Generator()
CACHE = {}
Named = namedtuple("Named", "output")
Other = namedtuple("Other", "result")


def stale(x, *, scale=1.0):
    return CACHE.setdefault(x.shape, honest(x, scale=scale))


def comes_and_goes(result):
    CACHE[len(CACHE)] = result
    return (Named if len(CACHE) < 3 else Other)(result)


def overwriting(x, *, scale=1.0):
    result = honest(x, scale=scale)
    x.data.zero_()
    return result


def wrong(edit):
    """Spoil the output of the honest implementation."""
    return lambda x, *, scale=1.0: edit(honest(x, scale=scale))


def refusing(error):
    """Answer a text with an error of one's own."""
    return lambda x, *, scale=1.0: _raise(error) if isinstance(x, str) else honest(x, scale=scale)


def _raise(error):
    raise error


FENCE = "outside the contract's fence|worse than|L2 error"
# Bugs that any operator can have are the negative controls of ``mutation``, with tests of their own.
BUGS = {
    "an option ignored": ("accuracy", lambda x, *, scale=1.0: honest(x), FENCE),
    "last column skipped": ("accuracy", lambda x, *, scale=1.0: honest(x[:, :-1], scale=scale), FENCE),
    "integers": ("accuracy", wrong(torch.Tensor.int), "expected dtype torch.float32, got torch.int32"),
    "half precision inside": ("accuracy", lambda x, *, scale=1.0: honest(x.half(), scale=scale).float(), FENCE),
    "None": ("accuracy", wrong(lambda y: None), "expected a tensor or a NamedTuple of tensors, got NoneType"),
    "a plain tuple": ("accuracy", wrong(lambda y: (y,)), "got tuple"),
    "a tuple with a number": ("accuracy", wrong(lambda y: Named(1.0)), "output: expected a tensor"),
    "a result of another name": ("accuracy", wrong(Other), "expected output, got result"),
    "wrong arity": ("accuracy", lambda: None, "raised TypeError: .* unexpected keyword argument 'x'"),
    "an exception": ("accuracy", lambda x, *, scale=1.0: 1 / 0, "forward raised ZeroDivisionError"),
    "an exit": ("accuracy", lambda x, *, scale=1.0: sys.exit(0), "forward raised SystemExit"),
    "tiny gradient of zeros": (
        "gradients",
        lambda x, *, scale=1.0: honest(x, scale=scale).detach() + 0 * x.sum(),
        FENCE,
    ),
    "gradient for ones only": ("gradients", cheating(lambda local, upstream: local.clone()), FENCE),
    "gradient rounded": ("gradients", cheating(lambda local, upstream: (local * upstream).half().float()), FENCE),
    "gradient shape": ("gradients", cheating(lambda local, upstream: local[:1]), "backward raised RuntimeError.*shape"),
    "gradient NaN": ("gradients", cheating(lambda local, upstream: local * torch.nan), "NaN or inf in one"),
    "detached": ("gradients", wrong(torch.Tensor.detach), "output: detached, expected an output that carries"),
    "no gradient": (
        "gradients",
        wrong(lambda y: y.detach() + torch.zeros((), requires_grad=True)),
        "no gradient for x",
    ),
    "exit in backward": ("gradients", cheating(lambda local, upstream: sys.exit(0)), "backward raised SystemExit"),
    "a mean over the batch": (
        "invariance",
        lambda x, *, scale=1.0: honest(x, scale=scale) + 1e-6 * x.mean(),
        "row . alone, .*: .* differ in bits",
    ),
    "batch-dependent order": (
        "invariance",
        lambda x, *, scale=1.0: scale * tree(torch.log1p(x.exp()).flip(-1) if len(x) > 4 else torch.log1p(x.exp())),
        "output: .* differ in bits",
    ),
    "gradient across rows": (
        "invariance",
        cheating(lambda local, upstream: local * upstream * (1 + 1e-6 * len(local))),
        "gradient:x: .* differ in bits",
    ),
    "other bits without gradient": (
        "invariance",
        lambda x, *, scale=1.0: honest(x, scale=scale) * (1 if x.requires_grad else 1 + 1e-6),
        "differ in bits",
    ),
    "noise": (
        "repeatability",
        wrong(lambda y: y * (1 + 1e-6 * torch.rand((), generator=OWN_GENERATOR))),
        "differ in bits",
    ),
    "noise of torch's generator": (
        "repeatability",
        wrong(lambda y: y * (1 + 1e-6 * torch.rand(()))),
        "changed global state: torch random generator",
    ),
    "drift": ("repeatability", wrong(lambda y: y + 1e-5 * next(COUNTER)), "differ in bits"),
    "a result that comes and goes": (
        "repeatability",
        lambda x, *, scale=1.0: comes_and_goes(honest(x, scale=scale)),
        "output: detached",
    ),
    "in-place change": ("hygiene", overwriting, "x was changed"),
    "vague error": ("robustness", refusing(TypeError("bad")), "expected a message matching 'x: expected a tensor'"),
    "wrong error": ("robustness", refusing(KeyError("x")), "expected TypeError, got KeyError"),
    "exit on bad input": ("robustness", refusing(SystemExit(0)), "expected TypeError, got SystemExit"),
}


def cell(function, case=None, **setting):
    candidate = Candidate("toy", SimpleNamespace(name="toy"), lambda name, kwargs: function(**kwargs))
    return Cell(candidate, SPEC, case or SPEC.case(), Setting("fp32", torch.device("cpu"), "cpu", **setting))


def records(function, relation, case=None, **setting):
    CACHE.clear()
    return list(check_relation(cell(function, case, **setting), relation))


def failures(found):
    return [record for record in found if isinstance(record, Check) and not record.passed]


@pytest.mark.parametrize("case", SPEC.cases, ids=lambda case: case.name)
@pytest.mark.parametrize("relation", RELATIONS)
def test_an_honest_implementation_holds(relation, case):
    found = records(honest, relation, case)
    assert not failures(found)
    if relation in ("parity", "torch"):
        assert [record.reason for record in found] == ["not a backend of the operator"]
    else:
        assert all(isinstance(record, Check) for record in found)
        # Illegal calls start from the plain case.
        assert found or (relation == "robustness" and case is not SPEC.case())


QUICK = {"None", "detached", "a mean over the batch", "noise", "in-place change", "vague error"}


@pytest.mark.parametrize("bug", [pytest.param(bug, marks=[pytest.mark.smoke] * (bug in QUICK)) for bug in BUGS])
def test_a_bug_is_caught_and_named_and_stops_nothing(bug):
    relation, function, message = BUGS[bug]
    failed = failures(record for case in SPEC.cases for record in records(function, relation, case))
    assert any(re.search(message, record.comparison.message) for record in failed), failed
    # A wrong number is like another to the other relations.
    others = () if message is FENCE or "differ in bits" in message else RELATIONS
    failed += [record for other in others for record in failures(records(function, other))]
    assert all(record.comparison.message for record in failed)


ODD = {
    "a scalar": wrong(torch.sum),
    "complex": wrong(torch.Tensor.cfloat),
    "a shape that changes": wrong(lambda y: y[: next(COUNTER) % 3]),
    "an error that cannot be printed": lambda x, *, scale=1.0: _raise(Unprintable()),
}


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_result_fails_and_stops_nothing(odd):
    failed = [record for relation in RELATIONS for record in failures(records(ODD[odd], relation))]
    assert failed
    assert all(record.comparison.message for record in failed)


def test_gradients_are_judged_also_if_a_candidate_turns_them_off():
    def turning_off(x, *, scale=1.0):
        torch.set_grad_enabled(False)
        return honest(x, scale=scale)

    assert [failures(records(turning_off, relation)) for relation in ("accuracy", "gradients")][1]
    assert torch.is_grad_enabled()


def test_a_stale_result_shows_on_other_values_and_an_empty_one_proves_nothing():
    assert {record.item for record in failures(records(stale, "accuracy"))} == {"output other values"}
    for relation in ("accuracy", "gradients"):
        failed = failures(records(honest, relation, Case("empty", {"rows": 0, "columns": 4})))
        assert {record.comparison.message for record in failed} >= {"an empty result proves nothing"}


def test_the_traceback_of_a_candidate_is_kept():
    for bug, has_one in (("an exception", True), ("exit in backward", True), ("None", False)):
        relation, function, _ = BUGS[bug]
        traceback = failures(records(function, relation))[0].comparison.traceback
        assert (__file__ in traceback) is has_one


def test_an_upstream_of_ones_hides_what_a_random_one_shows():
    function = BUGS["gradient for ones only"][1]
    assert records(function, "gradients", grad_mode="ones")[0].passed
    assert not records(function, "gradients", grad_mode="random")[0].passed


def test_inputs_of_a_candidate():
    # It gets copies.
    here = cell(overwriting)
    before = here.inputs["x"].clone()
    here.run(leaves=[])
    assert torch.equal(here.inputs["x"], before)
    assert (cell(honest, constant=(0.25, 0)).inputs["x"] == 0.25).all()
    first, again, other = (cell(honest, SPEC.cases[i]) for i in (0, 0, 1))
    assert first.seed == again.seed != other.seed
    assert torch.equal(first.inputs["x"], again.inputs["x"])


def test_the_global_generator_of_torch_is_left_as_found():
    before = torch.get_rng_state()
    records(BUGS["noise of torch's generator"][1], "repeatability")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_call_that_a_backend_refuses_beforehand_is_a_skip_and_no_pass():
    def refusing(x, *, scale=1.0):
        raise BackendUnavailable("backend: toy cannot run on 'triton': too small")

    for relation in ("accuracy", "gradients", "repeatability", "invariance", "hygiene"):
        (record,) = records(refusing, relation)
        assert isinstance(record, Skip)
        assert record.reason.endswith("too small")


def test_the_mode_that_raises_at_syncs_ends_with_its_block(monkeypatch):
    modes = [0]

    def set_mode(mode):
        modes.append(mode)
        warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=2)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1], raising=False)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ZeroDivisionError), syncs_raise():
            raise ZeroDivisionError
    assert modes == [0, "error", 0]
