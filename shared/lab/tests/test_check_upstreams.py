"""Kinds of upstream gradients, other derivatives, and ``main_grad``: each bug shows in the check that it is for.

The toy is a linear layer whose masked outputs are 0.
"""

import re
from types import SimpleNamespace

import pytest
import torch
from torch.autograd.function import once_differentiable

from rl_kernels.core.testing import IGNORED, Case, Spec
from rl_kernels.core.testing.state import torch_threads
from rl_kernels.lab.check.candidate import Candidate
from rl_kernels.lab.check.cell import Cell, Setting
from rl_kernels.lab.check.relations import check_relation
from rl_kernels.lab.check.result import Check, Skip

RESULTS = ("output", "gradient:x", "gradient:weight")


def definition(x, weight, ids, *, ignore_index=None):
    """x times the transposed weight, 0 where an id is ``ignore_index``."""
    return torch.where(ids == ignore_index, 0.0, x @ weight.t())


def _inputs(case, draw):
    rows, width, outs = (case.sizes[name] for name in ("rows", "width", "outs"))
    ids = draw.ids(7, rows, outs)
    ids[0, 1] = ids[2, 0] = IGNORED
    return {"x": draw.normal(rows, width), "weight": draw.normal(outs, width), "ids": ids, "ignore_index": IGNORED}


def _magnitudes(case, inputs, upstream):
    x, weight = inputs["x"].abs(), inputs["weight"].abs()
    up = upstream.get("output", torch.zeros_like(x[:, :1] * weight[:, 0])).abs()
    return {"output": x @ weight.t(), "gradient:x": up @ weight, "gradient:weight": up.t() @ x}


SIZES = {"rows": 5, "width": 4, "outs": 3}
SPEC = Spec(
    cases=(Case("plain", SIZES), Case("other", SIZES), Case("made", SIZES, relations=("accuracy", "gradients"))),
    inputs=_inputs,
    references={"": definition},
    classes=dict.fromkeys(RESULTS, "reduction"),
    differentiable=("x", "weight"),
    magnitudes=_magnitudes,
    transforms={},
    illegal=(),
    ids=("ids",),
    main_grad=frozenset({"weight"}),
)


class Linear(torch.autograd.Function):
    """``edit(upstream)`` may spoil what comes in, ``adds(weight, gradient, whole)`` adds to ``main_grad``."""

    @staticmethod
    def forward(ctx, x, weight, masked, edit, adds):
        ctx.save_for_backward(x, weight, masked)
        ctx.edit, ctx.adds, ctx.weight = edit, adds, weight
        return (x @ weight.t()).masked_fill(masked, 0.0)

    @staticmethod
    def backward(ctx, up):
        x, weight, masked = ctx.saved_tensors
        up = ctx.edit(up).masked_fill(masked, 0.0)
        grad_x, grad_weight = up @ weight, up.t() @ x
        if (
            ctx.adds is not None
            and hasattr(ctx.weight, "main_grad")
            and (ctx.needs_input_grad[1] or ctx.adds is adds_always)
        ):
            grad_weight = ctx.adds(ctx.weight, grad_weight, ctx.needs_input_grad[0])
        return grad_x, grad_weight, None, None, None


def linear(edit=lambda up: up, adds=None, function=Linear):
    return lambda x, weight, ids, *, ignore_index=None: function.apply(x, weight, ids == ignore_index, edit, adds)


def records(function, name="plain", backend=None, spec=SPEC, dtype="fp32"):
    candidate = Candidate("toy", SimpleNamespace(name="toy"), lambda _, kwargs: function(**kwargs), backend=backend)
    cell = Cell(candidate, spec, spec.case(name), Setting(dtype, torch.device("cpu"), "cpu"))
    return list(check_relation(cell, "gradients"))


def failed(function, name="plain", backend=None, spec=SPEC):
    found = records(function, name, backend, spec)
    return {each.item: each.comparison.message for each in found if isinstance(each, Check) and not each.passed}


FIRST = [0.0]
"""The first number of the first upstream gradient, which tells by how much the others are scaled."""
KINDS = {
    "x-1": lambda up: bool(up[0, 0] == -FIRST[0]),
    "x3": lambda up: bool(up[0, 0] == 3 * FIRST[0]),
    "x1e-06": lambda up: 1e-9 < float(up.abs().max()) < 1e-3,
    "x1e-12": lambda up: 0 < float(up.abs().max()) < 1e-9,
    "x65536": lambda up: float(up.abs().max()) > 1e4,
    "expanded": lambda up: up.stride() == (0, 0),
    "expanded over dim 0": lambda up: up.stride(0) == 0 != up.stride(1),
    "expanded over dim 1": lambda up: up.stride(1) == 0 != up.stride(0),
    "zero in some rows": lambda up: bool((up == 0).any() and (up != 0).any()),
    "strided": lambda up: up.stride(1) == 2,
}


def test_an_honest_layer_holds_for_every_kind():
    found = records(linear())
    assert not failed(linear())
    labels = {each.item.partition(" upstream ")[2] for each in found if " upstream " in each.item}
    assert labels == {*KINDS, "x0", "NaN where ignored"}
    # A generated case has one kind.
    labels = {each.item.partition(" upstream ")[2] for each in records(linear(), "made") if "x0" not in each.item}
    assert len(labels - {""}) <= 1
    assert not failed(linear(), "made")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_wrong_for_one_kind_of_upstream_shows_there_alone(kind):
    FIRST[:] = []

    def doubled(up):
        if not FIRST:
            FIRST.append(float(up[0, 0]))
        return 2 * up if KINDS[kind](up) else up

    assert failed(linear(doubled)).keys() == {f"gradient:{name} upstream {kind}" for name in ("x", "weight")}


def test_zero_upstreams_and_nan_where_ignored_show():
    divided = failed(linear(lambda up: up / up.abs().max() * up.abs().max()))
    assert {item for item in divided if "x0" in item} == {f"gradient:{name} upstream x0" for name in ("x", "weight")}

    class Multiplies(Linear):
        @staticmethod
        def backward(ctx, up):
            x, weight, masked = ctx.saved_tensors
            up = up * ~masked
            return up @ weight, up.t() @ x, None, None, None

    assert failed(linear(function=Multiplies)).keys() == {
        f"gradient:{name} upstream NaN where ignored" for name in ("x", "weight")
    }


class Refuses(Linear):
    backward = staticmethod(once_differentiable(Linear.backward))


class SilentZeros(Linear):
    """Its gradients look differentiable, and their derivatives are zero."""

    @staticmethod
    def backward(ctx, up):
        grads = Linear.backward(ctx, up.detach())
        nothing = 0 * ctx.saved_tensors[0].sum()
        return grads[0].detach() + nothing, grads[1].detach() + nothing, None, None, None


class ForwardZeros(Linear):
    @staticmethod
    def jvp(ctx, *tangents):
        return torch.zeros(5, 3)


class ForwardRefuses(Linear):
    """Refuses, and leaves the number of threads changed."""

    @staticmethod
    def jvp(ctx, *tangents):
        torch.set_num_threads(torch.get_num_threads() + 1)
        raise RuntimeError("no forward mode")


class ForwardRight(Linear):
    @staticmethod
    def jvp(ctx, x_tangent, weight_tangent, *others):
        x, weight, masked = ctx.inputs
        return (x_tangent @ weight.t() + x @ weight_tangent.t()).masked_fill(masked, 0.0)

    @staticmethod
    def forward(ctx, x, weight, masked, edit, adds):
        ctx.inputs = x, weight, masked
        return Linear.forward(ctx, x, weight, masked, edit, adds)


@pytest.mark.parametrize(
    ("function", "double", "forward"),
    [
        (linear(), "0.01 of the norm", "refused"),
        (linear(function=Refuses), "refused", "refused"),
        (linear(function=ForwardRight), "0.01 of the norm", "0.01 of the norm"),
        (definition, "0.01 of the norm", "0.01 of the norm"),
    ],
)
def test_other_derivatives_are_refused_or_right(function, double, forward):
    checks = {each.item: each for each in records(function) if isinstance(each, Check)}
    assert all(each.passed for each in checks.values())
    assert (checks["double backward"].tolerance, checks["forward mode"].tolerance) == (double, forward)


@pytest.mark.parametrize(("function", "item"), [(SilentZeros, "double backward"), (ForwardZeros, "forward mode")])
def test_zeros_in_place_of_a_refusal_fail(function, item):
    found = failed(linear(function=function))
    assert found.keys() == {item}
    assert re.search(r"off by .*, where the definition's norm is", found[item])


def test_state_left_changed_is_no_refusal():
    with torch_threads(1):
        assert failed(linear(function=ForwardRefuses)) == {
            "forward mode": "forward mode changed global state: number of threads"
        }
    # Other derivatives are asked of the plainest case alone.
    assert not {"double backward", "forward mode"} & {each.item for each in records(definition, "other")}


def adds(weight, gradient, whole):
    weight.main_grad.add_(gradient)


def adds_always(weight, gradient, whole):
    adds(weight, gradient, whole)


def assigns(weight, gradient, whole):
    weight.main_grad.copy_(gradient)


def only_beside_others(weight, gradient, whole):
    if whole:
        weight.main_grad.add_(gradient)


def as_if_rows(weight, gradient, whole):
    buffer = weight.main_grad
    buffer.as_strided(buffer.shape, (buffer.shape[1], 1)).add_(gradient)


def returns_too(weight, gradient, whole):
    weight.main_grad.add_(gradient)
    return gradient


def test_gradients_that_are_added_to_a_buffer_hold():
    # A user's implementation may leave the buffer alone.
    found = records(linear())
    assert not [each for each in found if isinstance(each, Check) and "main_grad" in each.item]
    assert not [each for each in found if isinstance(each, Skip)]
    found = records(linear(adds=adds), backend="toy")
    assert not failed(linear(adds=adds), backend="toy")
    assert [each.item for each in found if "main_grad" in each.item] == [
        "gradient:weight in main_grad",
        "gradient:weight in main_grad alone",
        "gradient:weight in main_grad of columns",
        "gradient:weight in main_grad, frozen",
        "gradient:weight in another main_grad",
    ]


MAIN = "gradient:weight in main_grad"


@pytest.mark.parametrize(
    ("how", "items"),
    [
        (assigns, {MAIN, f"{MAIN} alone", f"{MAIN} of columns"}),
        (only_beside_others, {f"{MAIN} alone"}),
        (as_if_rows, {f"{MAIN} of columns"}),
        (None, {MAIN, f"{MAIN} alone", f"{MAIN} of columns"}),
        (adds_always, {f"{MAIN}, frozen"}),
        (returns_too, {MAIN, f"{MAIN} alone", f"{MAIN} of columns"}),
    ],
)
def test_what_is_wrong_with_a_buffer_shows(how, items):
    assert failed(linear(adds=how), backend="toy").keys() == items


def test_a_buffer_that_is_looked_up_once_shows():
    first = {}

    def adds_to_the_first(weight, gradient, whole):
        first.setdefault(id(weight), (weight, weight.main_grad))[1].add_(gradient)

    assert failed(linear(adds=adds_to_the_first), backend="toy").keys() == {"gradient:weight in another main_grad"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_rounded_before_it_is_added_shows(dtype):
    def adds_rounded(weight, gradient, whole):
        weight.main_grad.add_(gradient.to(dtype))

    def call(x, weight, ids, *, ignore_index=None):
        wide = weight.float()
        if hasattr(weight, "main_grad"):
            wide.main_grad = weight.main_grad
        return linear(adds=adds_rounded)(x.float(), wide, ids, ignore_index=ignore_index).to(x.dtype)

    spec = Spec(**{**vars(SPEC), "cases": (Case("plain", {"rows": 5, "width": 8, "outs": 9}),)})
    found = records(call, backend="toy", spec=spec, dtype="bf16")
    digits = {each.item: each.comparison.message for each in found if each.item == f"{MAIN}, digits"}
    rounded = "the gradient was rounded to bf16 before it was added"
    assert digits == {f"{MAIN}, digits": rounded if dtype == torch.bfloat16 else ""}


def test_a_buffer_that_autocast_hides_shows():
    spec = Spec(**{**vars(SPEC), "autocast": {"": ("x", "weight")}})

    def adds_without_autocast(weight, gradient, whole):
        if weight.dtype == torch.float32 and not casts[-1]:
            weight.main_grad.add_(gradient)

    casts = [False]

    def call(**inputs):
        casts.append(torch.is_autocast_enabled("cpu"))
        with torch.autocast("cpu", enabled=False):
            return linear(adds=adds_without_autocast)(**inputs)

    found = failed(call, backend="toy", spec=spec)
    assert found == {"gradient:weight in main_grad, autocast": "nothing was added to the buffer"}
