"""Linear layers whose launches are worked out once: the launches of ``matmul``, and where they are taken."""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_kernels.core import record_dispatch, use_backend
from rl_kernels.core.testing import Draw
from rl_kernels.core.testing.launches import Box, Recorder
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.det_gemm import api, column_parallel_linear, det_linear, parallel, row_parallel_linear
from rl_kernels.det_gemm.segments import segment_length

BUGS = (
    Bug("maps of all operands in one", "box, x.shape, x.stride(), x", "x"),
    Bug("unaligned addresses launched", "(of_left | of_right | of_out) % ALIGNED", "False"),
)
MATMUL = "rl_kernels.core.cuda.gemm.matmul"
PLAN = "rl_kernels.det_gemm.backends.cuda_sm90.planned"
BACKEND = "rl_kernels.det_gemm.backends.cuda_sm90.backend"
FAILURES = (AssertionError, RuntimeError, TypeError, KeyError)
SHAPES = (((1,), 64, 40), ((5,), 200, 64), ((300,), 72, 264), ((2, 3), 136, 24), ((3, 1, 30), 64, 128), ((40,), 64, 64))
"""Leading dims, K and N: few rows, and many."""


def described(launch):
    """Return all that a launch is; how the tensor behind a pointer lies is said by the numbers beside it."""

    def told(value):
        if isinstance(value, Box):
            seen = value.tensor
            return seen.data_ptr(), seen.shape, seen.stride(), seen.dtype, value.box, value.swizzle, value.promotion
        return value.data_ptr() if isinstance(value, torch.Tensor) else value

    form = launch.program, launch.entry, launch.grid, launch.block, launch.shared, launch.pdl
    return form, {name: told(value) for name, value in launch.arguments.items()}


def same(recorder, out, matmul, *given, **options):
    """Hold the launch before to that of ``matmul`` with the same tensors; return what it wrote."""
    assert out is not None
    matmul(*given, out.view(-1, out.shape[-1]), **options)
    planned, expected = recorder.launches
    assert described(planned) == described(expected)
    recorder.launches.clear()
    return out


def drawn(draw, lead, inner, outer, bias):
    x, weight = draw.normal(*lead, inner), draw.normal(outer, inner)
    return x, weight, draw.normal(outer) if bias else None, draw.normal(*lead, outer)


def cut(size, segments):
    """Return the options of ``matmul`` for a sum of this size."""
    return {"segments": segments, "length": segment_length(size, segments)} if segments > 1 else {}


def hold_layer(layer, recorder, x, weight, bias, dc, segments):
    """Hold every product of a layer to ``matmul``; return what it wrote."""
    matmul = importlib.import_module(MATMUL).matmul
    rows, above = x.flatten(0, -2), dc.flatten(0, -2)
    of_k, of_n = (cut(size, count) for size, count in zip(weight.shape[::-1], segments, strict=True))
    out = same(recorder, layer.forward(x, weight, bias), matmul, rows, weight.t(), bias=bias, **of_k)
    assert (out.shape, out.dtype, out._is_view()) == (dc.shape, x.dtype, False)
    dx, nothing = layer.gradients(dc, x, weight, None, (True, False))
    same(recorder, dx, matmul, above, weight, **of_n)
    assert (dx.shape, dx.dtype, nothing) == (x.shape, x.dtype, None)
    nothing, dw = layer.gradients(dc, x, weight, None, (False, True))
    same(recorder, dw, matmul, above.t(), rows)
    assert (dw.shape, dw.dtype, dw.is_contiguous(), nothing) == (weight.shape, x.dtype, True, None)
    total = torch.zeros(weight.shape)
    assert layer.gradients(dc, x, weight, total, (False, True))[1] is total
    same(recorder, total, matmul, above.t(), rows, continues=True)
    both = layer.gradients(dc, x, weight, None, (True, True))
    assert [each.shape for each in both] == [x.shape, weight.shape]
    assert len(recorder.launches) == 2
    recorder.launches.clear()
    return out, dx, dw, total, both


def hold_parts(layer, recorder, x, weight, bias, dc, own):
    """Hold the products of a rank with ``own`` segments to ``matmul``: of all rows, and of some; return outputs."""
    matmul, outs = importlib.import_module(MATMUL).matmul, []
    for a, b in ((x.flatten(0, -2), weight.t()), (dc.flatten(0, -2), weight)):
        least = segment_length(a.shape[1], own)
        ways = [(torch.float32, None, least), (torch.float32, None, least + 16), (a.dtype, None, least)]
        if bias is not None and b is not weight:
            ways.append((a.dtype, bias, least))
        for rows in (a, a[:1], a[len(a) // 2 :]):
            for dtype, added, length in ways:
                out = torch.zeros(len(rows), b.shape[1], dtype=dtype)
                assert layer.segmented_into(rows, b, out, added, own, length)
                outs.append(same(recorder, out, matmul, rows, b, bias=added, segments=own, length=length))
    return outs


def hold():
    """Hold layers of every shape, the second time with tensors at other addresses."""
    module, recorder, kept = importlib.import_module(PLAN), Recorder(processors=4), []
    module._maps.clear()
    with recorder.watching(PLAN, MATMUL):
        for place, (lead, inner, outer) in enumerate(SHAPES):
            draw = Draw((torch.float16, torch.bfloat16)[place % 2], seed=place)
            for bias, segments in ((False, (1, 1)), (True, (1, 1)), (True, (8, 4)), (False, (1, 8))):
                given = drawn(draw, lead, inner, outer, bias)
                layer = module.plan_linear(*given[:3], segments)
                for tensors in (given, drawn(draw, lead, inner, outer, bias)):
                    # What is freed gives its address to another tensor.
                    kept.append((tensors, hold_layer(layer, recorder, *tensors, segments)))
                    kept.append([hold_parts(layer, recorder, *tensors, own) for own in (1, 2, 4)])


def hold_others():
    """What does not lie as was planned is not launched."""
    module = importlib.import_module(PLAN)
    module._maps.clear()
    recorder = Recorder(processors=4)
    with recorder.watching(PLAN, MATMUL):
        draw = Draw(torch.bfloat16, seed=1)
        x, weight, _, dc = drawn(draw, (2, 8), 64, 40, False)
        layer = module.plan_linear(x, weight, None)
        named = {"x": x, "weight": weight, "dc": dc}
        odd = {name: value.new_empty(value.numel() + 1)[1:].view(value.shape) for name, value in named.items()}
        turned = {name: value.transpose(0, 1).contiguous().transpose(0, 1) for name, value in named.items()}
        total = torch.zeros(40, 64)
        assert layer.forward(odd["x"], weight, None) is None
        assert layer.forward(x, odd["weight"], None) is None
        special = dc.as_subclass(type("Special", (torch.Tensor,), {}))
        strange = special, torch._neg_view(dc), dc.float()
        for upstream in (odd["dc"], turned["dc"], dc[:1], dc[..., :1].expand(dc.shape), *strange):
            for needed in ((True, False), (False, True), (True, True)):
                assert layer.gradients(upstream, x, weight, None, needed) is None
            assert layer.gradients(upstream, x, weight, total, (True, True)) is None
        for other in (odd["weight"], turned["weight"], weight.float(), torch._neg_view(weight)):
            assert layer.gradients(dc, x, other, None, (True, True)) is None
        for other in (odd["x"], turned["x"], x.float(), torch._neg_view(x)):
            assert layer.gradients(dc, other, weight, None, (True, True)) is None
        shifted = torch.zeros(40 * 64 + 1)[1:].view(40, 64)
        above, out = dc.flatten(0, -2), torch.zeros(16, 64)
        for other in (odd["dc"].flatten(0, -2), above.float(), special.flatten(0, -2), torch._neg_view(above)):
            assert not layer.segmented_into(other, weight, out, None, 2, 32)
        for other in (odd["weight"], weight.float(), torch._neg_view(weight)):
            assert not layer.segmented_into(above, other, out, None, 2, 32)
        shifted = torch.zeros(16 * 64 + 1)[1:].view(16, 64)
        assert not layer.segmented_into(above, weight, shifted, None, 2, 32)
        for other in (total.t().contiguous().t(), shifted):
            assert layer.gradients(dc, x, weight, other, (True, True)) is None
        assert not recorder.launches
        assert layer.forward(x, weight, None) is not None
        recorder.launches.clear()
        # Segments need operands that TMA takes.
        spread = torch.zeros(40, 128, dtype=x.dtype)[:, ::2]
        layer = module.plan_linear(x, spread, None, (2, 2))
        assert layer.forward(x, spread, None) is None
        assert layer.gradients(dc, x, spread, None, (True, True)) is None
        assert not layer.segmented_into(dc.flatten(0, -2), spread, torch.zeros(16, 64), None, 2, 32)
        assert not recorder.launches
    for other in (x.transpose(0, 1), x[:0]):
        assert module.plan_linear(other, weight, None) is None
    assert module.plan_linear(x, weight, torch.zeros(80, dtype=x.dtype)[::2]) is None
    assert module.plan_linear(x[:, :1], weight, None) is not None


def hold_bound():
    """Maps that are remembered are few, and where they were forgotten they are remembered again."""
    module = importlib.import_module(PLAN)
    module._maps.clear()
    with patch.object(module, "KEPT", 5), Recorder(processors=4).watching(PLAN, MATMUL):
        draw, kept, counts = Draw(torch.bfloat16), [], []
        layer = module.plan_linear(*drawn(draw, (200,), 64, 40, False)[:3])
        for _ in range(9):
            kept.append(drawn(draw, (200,), 64, 40, False)[:2])
            kept.append(layer.forward(*kept[-1], None))
            counts.append(sum(map(len, module._maps.values())))
    assert max(counts) <= 5 + 3
    assert max(counts[4:]) > 1


def hold_all():
    hold()
    hold_others()
    hold_bound()


def test_a_plan_launches_what_matmul_launches():
    hold()


def test_what_does_not_lie_as_planned_takes_the_general_path():
    hold_others()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_bug_planted_in_a_plan_shows(bug):
    with planted([PLAN], bug), pytest.raises(FAILURES):
        hold_all()


def test_maps_that_are_kept_are_bounded():
    hold_bound()


class Plan:
    """A plan that multiplies by PyTorch, and lists what it was asked for; ``answers`` are what it takes on."""

    def __init__(self, *answers):
        self.asked, self._answers = [], answers

    def _found(self, name, make):
        self.asked.append(name)
        return make() if (name if isinstance(name, str) else name[0]) in self._answers else None

    def forward(self, x, weight, bias):
        return self._found("forward", lambda: torch.nn.functional.linear(x, weight, bias) + 100)

    def segmented_into(self, a, b, out, bias, segments, length):
        def make():
            out.copy_(a @ b + (0 if bias is None else bias) + 100)
            return True

        return bool(self._found("segmented_into", make))

    def gradients(self, dc, x, weight, into, needed):
        def make():
            dx, dw = dc @ weight + 100, dc.flatten(0, -2).t() @ x.flatten(0, -2) + 100
            # As a kernel writes: PyTorch does not see it.
            if into is not None:
                into.detach().numpy()[...] += dw.detach().numpy()
            return dx if needed[0] else None, (dw if into is None else into) if needed[1] else None

        return self._found(("gradients", *needed), make)


@contextmanager
def planned_by(monkeypatch, *answers):
    plan = Plan(*answers)
    with monkeypatch.context() as patch:
        for module in (api, parallel):
            patch.setattr(module, "chosen_for_linear", lambda *_: ("native", plan))
        yield plan


def leaves():
    draw = Draw(torch.float32)
    return [value.requires_grad_() for value in (draw.normal(2, 3, 8), draw.normal(5, 8), draw.normal(5))]


def gradients(given, upstream):
    for leaf in given:
        leaf.grad = None
    det_linear(*given).backward(upstream)
    return [leaf.grad for leaf in given]


@pytest.mark.parametrize("answers", [(), ("forward",), ("gradients",), ("forward", "gradients")])
def test_a_plan_is_taken_where_it_answers(monkeypatch, answers):
    given, upstream = leaves(), torch.randn(2, 3, 5)
    expected, grads = det_linear(*given).detach(), gradients(given, upstream)
    with planned_by(monkeypatch, *answers) as plan:
        found = gradients(given, upstream)
        with torch.no_grad():
            out = det_linear(*given)
    assert plan.asked == ["forward", ("gradients", True, True), "forward"]
    names = ("forward", "gradients", "gradients")
    for name, value, old in zip(names, (out, *found), (expected, *grads), strict=False):
        torch.testing.assert_close(value, old + 100 * (name in answers))
    assert torch.equal(found[2], grads[2])


def layers_of_one_rank(given, upstream):
    """Return outputs and gradients of both layers, whose sums are cut over one rank."""
    found = []
    for layer, segments in ((row_parallel_linear, "k_segments"), (column_parallel_linear, "dx_segments")):
        mine = [value.detach().requires_grad_() for value in given]
        out = layer(*mine, **{segments: 2})
        out.backward(upstream)
        found += [out.detach(), *(leaf.grad for leaf in mine)]
    return found


@pytest.mark.parametrize("answers", [(), ("segmented_into",), ("gradients",), ("segmented_into", "gradients")])
def test_layers_of_ranks_take_a_plan_where_it_answers(monkeypatch, answers):
    given, upstream = leaves(), torch.randn(2, 3, 5)
    expected = layers_of_one_rank(given, upstream)
    with planned_by(monkeypatch, *answers) as plan:
        found = layers_of_one_rank(given, upstream)
    of_rows = ["segmented_into", ("gradients", True, True)]
    assert plan.asked == [*of_rows, "forward", "segmented_into", ("gradients", False, True)]
    names = ("segmented_into", "gradients", "gradients", None, None, "segmented_into", "gradients", None)
    for name, value, old in zip(names, found, expected, strict=True):
        torch.testing.assert_close(value, old + 100 * (name in answers))


def test_layers_of_ranks_that_are_looked_at_take_no_plan(monkeypatch):
    given = leaves()
    with planned_by(monkeypatch, "segmented_into", "gradients") as plan, Ops():
        layers_of_one_rank(given, torch.randn(2, 3, 5))
    assert not plan.asked


def test_a_plan_continues_main_grad_and_says_that_it_wrote(monkeypatch):
    given = leaves()
    given[1].main_grad = torch.zeros(5, 8)
    with planned_by(monkeypatch, "gradients"):
        version = given[1].main_grad._version
        det_linear(*given).sum().backward()
    assert given[1].grad is None
    assert (given[1].main_grad > 50).all()
    assert given[1].main_grad._version > version


def test_gradients_that_are_not_asked_for_are_not_planned(monkeypatch):
    given = [value * 1 for value in leaves()]
    with planned_by(monkeypatch, "forward", "gradients") as plan:
        torch.autograd.grad(det_linear(*given), given[0], torch.ones(2, 3, 5))
    assert plan.asked == ["forward", ("gradients", True, False)]


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_who_looks_at_ops_sees_them(monkeypatch):
    given = leaves()
    with planned_by(monkeypatch, "forward", "gradients") as plan, Ops() as ops:
        det_linear(*given).sum().backward()
    assert not plan.asked
    names = [name for name in ops.seen if name.startswith("rl_kernels")]
    assert names == [f"rl_kernels.det_gemm_{name}.default" for name in ("forward", "forward", *["weight_gradient"] * 2)]


def test_gradients_in_batches_take_the_general_path(monkeypatch):
    given = leaves()
    upstream = torch.randn(2, 2, 3, 5)
    with planned_by(monkeypatch, "gradients") as plan:
        out = det_linear(*given)
        batched = torch.autograd.grad(out, given, upstream, is_grads_batched=True, retain_graph=True)
    assert plan.asked == ["forward"]
    for place, one in enumerate(upstream):
        found = torch.autograd.grad(det_linear(*given), given, one)
        assert [torch.equal(whole[place], part) for whole, part in zip(batched, found, strict=True)] == [True] * 3


def test_a_second_derivative_is_refused(monkeypatch):
    given = leaves()
    with planned_by(monkeypatch, "forward", "gradients") as plan:
        (grad,) = torch.autograd.grad((det_linear(*given) ** 2).sum(), given[0], create_graph=True)
        with pytest.raises(RuntimeError, match="double backward is not supported"):
            grad.square().sum().backward()
    assert plan.asked == ["forward"]


def test_results_may_change_in_place(monkeypatch):
    for answers in ((), ("forward",)):
        given = leaves()
        with planned_by(monkeypatch, *answers):
            out = det_linear(*given)
        out.mul_(2).sum().backward()
        assert torch.equal(given[2].grad, torch.full((5,), 12.0))


def test_kinds_are_planned_once(monkeypatch):
    made = []
    module = api.OPERATOR.backend("native").load()
    monkeypatch.setattr(module, "plan_linear", lambda *given: made.append(given), raising=False)
    x, weight, _ = (value.detach() for value in leaves())
    for call in 2 * [partial(det_linear, x, weight), partial(det_linear, x[:1], weight)]:
        call()
    assert [given[0].shape for given in made] == [(2, 3, 8), (1, 3, 8)]
    made.clear()
    special = type("Special", (torch.Tensor,), {})
    det_linear(x.as_subclass(special), weight)
    assert torch.equal(det_linear(torch._neg_view(x), weight), det_linear(-x, weight))
    assert torch.equal(det_linear(x, torch._neg_view(weight)), det_linear(x, -weight))
    bias = torch.ones(weight.shape[0], dtype=x.dtype)
    det_linear(x[:1, :2], weight, torch._neg_view(bias))
    assert not made
    assert torch.equal(det_linear(x, weight, torch._neg_view(bias)), det_linear(x, weight, -bias))
    made.clear()
    with use_backend(det_gemm="native"):
        det_linear(x[:, :2], weight)
    with record_dispatch():
        det_linear(x[:, :2], weight)
    torch.compile(det_linear, backend="eager")(x[:, :2], weight)
    assert not made
    # What autocast has cast is planned as what came in its dtype.
    with torch.autocast("cpu", torch.bfloat16):
        det_linear(x, weight)
        det_linear(x.bfloat16(), weight.bfloat16())
    assert [(given[0].dtype, given[1].dtype) for given in made] == [(torch.bfloat16, torch.bfloat16)]


def test_vmap_of_what_may_be_planned(monkeypatch):
    module = api.OPERATOR.backend("native").load()
    monkeypatch.setattr(module, "plan_linear", importlib.import_module(PLAN).plan_linear, raising=False)
    x, weight, _ = (value.detach() for value in leaves())
    found = torch.func.vmap(det_linear, in_dims=(0, None))(x[:, :1].expand(2, 7, 8), weight)
    torch.testing.assert_close(found[0, 0], x[0, 0] @ weight.t())


@pytest.mark.parametrize("main_grad", [False, True])
def test_a_tangent_of_a_gradient_is_not_lost(monkeypatch, main_grad):
    given = leaves()
    if main_grad:
        given[1].main_grad = torch.zeros(5, 8)
    with planned_by(monkeypatch, "forward", "gradients"):
        out = det_linear(*given)
        with torch.autograd.forward_ad.dual_level():
            upstream = torch.autograd.forward_ad.make_dual(torch.ones(2, 3, 5), torch.ones(2, 3, 5))
            with pytest.raises(RuntimeError, match="forward-mode AD is not supported"):
                out.backward(upstream)
