"""Where a backend's plan of a linear layer is used, and where the general path must be taken."""

from __future__ import annotations

import importlib
from contextlib import contextmanager

import pytest
import torch

from rl_kernels.core import record_dispatch, use_backend
from rl_kernels.core.testing import Draw
from rl_kernels.det_gemm import api, column_parallel_linear, det_linear, parallel, row_parallel_linear
from rl_kernels.lab.check.relations.integration import RawCalls

ADDED = 100
"""What ``Plan`` adds to each result."""


class Plan:
    """Multiplies with PyTorch, adds ADDED, and lists the calls; refuses those that are not in ``answers``."""

    def __init__(self, *answers):
        self.asked, self._answers = [], answers

    def _answered(self, name, make):
        self.asked.append(name)
        return make() if (name if isinstance(name, str) else name[0]) in self._answers else None

    def forward(self, x, weight, bias):
        return self._answered("forward", lambda: torch.nn.functional.linear(x, weight, bias) + ADDED)

    def segmented_into(self, a, b, out, bias, segments, length):
        def make():
            out.copy_(a @ b + (0 if bias is None else bias) + ADDED)
            return True

        return bool(self._answered("segmented_into", make))

    def gradients(self, dc, x, weight, into, needed):
        def make():
            dx, dw = dc @ weight + ADDED, dc.flatten(0, -2).t() @ x.flatten(0, -2) + ADDED
            # As a kernel writes: PyTorch does not see it.
            if into is not None:
                into.detach().numpy()[...] += dw.detach().numpy()
            return dx if needed[0] else None, (dw if into is None else into) if needed[1] else None

        return self._answered(("gradients", *needed), make)


@contextmanager
def planned_by(monkeypatch, *answers):
    plan = Plan(*answers)
    with monkeypatch.context() as patch:
        for module in (api, parallel):
            patch.setattr(module, "_choose_for_linear", lambda *_: ("native", plan))
        yield plan


def leaves():
    draw = Draw(torch.float32)
    return [value.requires_grad_() for value in (draw.normal(2, 3, 8), draw.normal(5, 8), draw.normal(5))]


def layer_results(given, upstream):
    """Return the output of a layer and its gradients."""
    for leaf in given:
        leaf.grad = None
    out = det_linear(*given)
    out.backward(upstream)
    return [out.detach(), *(leaf.grad for leaf in given)]


def parallel_results(given, upstream):
    """Return outputs and gradients of both parallel layers, with segments and without ranks."""
    found = []
    for layer, segments in ((row_parallel_linear, "k_segments"), (column_parallel_linear, "dx_segments")):
        mine = [value.detach().requires_grad_() for value in given]
        out = layer(*mine, **{segments: 2})
        out.backward(upstream)
        found += [out.detach(), *(leaf.grad for leaf in mine)]
    return found


BOTH, OF_WEIGHT = ("gradients", True, True), ("gradients", False, True)
USES = [
    (layer_results, ["forward", BOTH], ("forward", "gradients", "gradients", None)),
    (
        parallel_results,
        ["segmented_into", BOTH, "forward", "segmented_into", OF_WEIGHT],
        ("segmented_into", "gradients", "gradients", None, None, "segmented_into", "gradients", None),
    ),
]
"""A function, what it asks of a plan, and the answer that each of its results comes from."""


@pytest.mark.parametrize(("function", "asked", "names"), USES, ids=["one process", "parallel"])
def test_a_plan_is_used_where_it_answers(monkeypatch, function, asked, names):
    given, upstream = leaves(), torch.randn(2, 3, 5)
    expected = function(given, upstream)
    for answers in ((), (asked[0],), ("gradients",), (asked[0], "gradients")):
        with planned_by(monkeypatch, *answers) as plan:
            found = function(given, upstream)
        assert plan.asked == asked
        for name, value, old in zip(names, found, expected, strict=True):
            torch.testing.assert_close(value, old + ADDED * (name in answers))


def test_a_plan_is_used_without_gradients(monkeypatch):
    given = leaves()
    with torch.no_grad(), planned_by(monkeypatch, "forward") as plan:
        found = det_linear(*given)
    assert plan.asked == ["forward"]
    torch.testing.assert_close(found, det_linear(*given) + ADDED)


def test_main_grad_is_continued_and_its_version_raised(monkeypatch):
    given = leaves()
    given[1].main_grad = torch.zeros(5, 8)
    with planned_by(monkeypatch, "gradients"):
        version = given[1].main_grad._version
        det_linear(*given).sum().backward()
    assert given[1].grad is None
    assert (given[1].main_grad > ADDED / 2).all()
    assert given[1].main_grad._version > version


def test_only_the_needed_gradients_are_asked_for(monkeypatch):
    given = [value * 1 for value in leaves()]
    with planned_by(monkeypatch, "forward", "gradients") as plan:
        torch.autograd.grad(det_linear(*given), given[0], torch.ones(2, 3, 5))
    assert plan.asked == ["forward", ("gradients", True, False)]


def test_a_dispatch_mode_sees_the_ops_of_the_general_path(monkeypatch):
    given = leaves()
    with planned_by(monkeypatch, "forward", "segmented_into", "gradients") as plan, RawCalls() as raw:
        det_linear(*given).sum().backward()
        parallel_results(given, torch.randn(2, 3, 5))
    assert not plan.asked
    names = ("forward", "weight_gradient", "segmented")
    assert list(raw.calls) == [f"rl_kernels.det_gemm_{name}.default" for name in names]


def test_batched_gradients_take_the_general_path(monkeypatch):
    given, upstream = leaves(), torch.randn(2, 2, 3, 5)
    with planned_by(monkeypatch, "gradients") as plan:
        batched = torch.autograd.grad(det_linear(*given), given, upstream, is_grads_batched=True)
    assert plan.asked == ["forward"]
    for place, one in enumerate(upstream):
        found = torch.autograd.grad(det_linear(*given), given, one)
        assert all(torch.equal(whole[place], part) for whole, part in zip(batched, found, strict=True))


@pytest.mark.parametrize("main_grad", [False, True])
def test_further_derivatives_are_refused(monkeypatch, main_grad):
    given, ones = leaves(), torch.ones(2, 3, 5)
    if main_grad:
        given[1].main_grad = torch.zeros(5, 8)
    with planned_by(monkeypatch, "forward", "gradients") as plan:
        (grad,) = torch.autograd.grad((det_linear(*given) ** 2).sum(), given[0], create_graph=True)
        with pytest.raises(RuntimeError, match="double backward is not supported"):
            grad.square().sum().backward()
        out = det_linear(*given)
        with torch.autograd.forward_ad.dual_level():
            upstream = torch.autograd.forward_ad.make_dual(ones, ones)
            with pytest.raises(RuntimeError, match="forward-mode AD is not supported"):
                out.backward(upstream)
    assert plan.asked == ["forward", "forward"]


def test_results_may_change_in_place(monkeypatch):
    for answers in ((), ("forward",)):
        given = leaves()
        with planned_by(monkeypatch, *answers):
            out = det_linear(*given)
        out.mul_(2).sum().backward()
        assert torch.equal(given[2].grad, torch.full((5,), 12.0))


def test_each_kind_of_operands_is_planned_once(monkeypatch):
    made, module = [], api.OPERATOR.backend("native").load()
    monkeypatch.setattr(module, "plan_linear", lambda *given: made.append(given), raising=False)
    x, weight, bias = (value.detach() for value in leaves())
    for rows in 2 * [x, x[:1]]:
        det_linear(rows, weight)
    # What autocast has cast is planned as what came in its dtype.
    with torch.autocast("cpu", torch.bfloat16):
        det_linear(x, weight)
        det_linear(x.bfloat16(), weight.bfloat16())
    assert [(given[0].shape, given[1].dtype) for given in made] == [
        ((2, 3, 8), torch.float32),
        ((1, 3, 8), torch.float32),
        ((2, 3, 8), torch.bfloat16),
    ]
    made.clear()
    det_linear(x.as_subclass(type("Special", (torch.Tensor,), {})), weight)
    assert torch.equal(det_linear(torch._neg_view(x), weight), det_linear(-x, weight))
    assert torch.equal(det_linear(x, torch._neg_view(weight)), det_linear(x, -weight))
    det_linear(x[:1, :2], weight, torch._neg_view(bias))
    with use_backend(det_gemm="native"):
        det_linear(x[:, :2], weight)
    with record_dispatch():
        det_linear(x[:, :2], weight)
    torch.compile(det_linear, backend="eager")(x[:, :2], weight)
    assert not made
    assert torch.equal(det_linear(x, weight, torch._neg_view(bias)), det_linear(x, weight, -bias))


def test_vmap_of_a_planned_layer(monkeypatch):
    plan_linear = importlib.import_module("rl_kernels.det_gemm.backends.cuda_sm90.planned").plan_linear
    monkeypatch.setattr(api.OPERATOR.backend("native").load(), "plan_linear", plan_linear, raising=False)
    x, weight, _ = (value.detach() for value in leaves())
    found = torch.func.vmap(det_linear, in_dims=(0, None))(x[:, :1].expand(2, 7, 8), weight)
    torch.testing.assert_close(found[0, 0], x[0, 0] @ weight.t())
