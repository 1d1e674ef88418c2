"""The launches of a planned linear layer: those of ``matmul`` for the same tensors, or none."""

from __future__ import annotations

import importlib
from unittest.mock import patch

import pytest
import torch

from rl_kernels.core.testing import Draw
from rl_kernels.core.testing.launches import Box, Recorder
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.det_gemm.segments import segment_length

BUGS = (
    Bug("maps of all operands in one", "box, x.shape, x.stride(), x", "x"),
    Bug("unaligned addresses launched", "(left_address | right_address | out_address) % ALIGNED", "False"),
)
MATMUL = "rl_kernels.core.cuda.gemm.matmul"
PLAN = "rl_kernels.det_gemm.backends.cuda_sm90.planned"
SHAPES = (((1,), 64, 40), ((5,), 200, 64), ((300,), 72, 264), ((2, 3), 136, 24), ((3, 1, 30), 64, 128), ((40,), 64, 64))
"""Leading dims, K and N: few rows, and many."""
KINDS = ((False, (1, 1), 1), (True, (1, 1), 2), (True, (8, 4), 4), (False, (1, 8), 2))
"""Whether there is a bias, segments of K and of N, and segments of a rank."""


def described(launch):
    """Return all that a launch is; the numbers beside a pointer give the layout of its tensor."""

    def value_of(value):
        if isinstance(value, Box):
            tensor = value.tensor
            layout = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
            return layout, value.box, value.swizzle, value.promotion
        return value.data_ptr() if isinstance(value, torch.Tensor) else value

    form = launch.program, launch.entry, launch.grid, launch.block, launch.shared, launch.pdl
    return form, {name: value_of(value) for name, value in launch.arguments.items()}


def same(recorder, out, *operands, **options):
    """Compare the last launch with that of ``matmul`` for the same tensors; return the output."""
    assert out is not None
    importlib.import_module(MATMUL).matmul(*operands, out.view(-1, out.shape[-1]), **options)
    launch, expected = recorder.launches
    assert described(launch) == described(expected)
    recorder.launches.clear()
    return out


def drawn(draw, lead, inner, outer, bias):
    x, weight = draw.normal(*lead, inner), draw.normal(outer, inner)
    return x, weight, draw.normal(outer) if bias else None, draw.normal(*lead, outer)


def cut(size, segments):
    """Return the options of ``matmul`` for a sum of this size."""
    return {"segments": segments, "length": segment_length(size, segments)} if segments > 1 else {}


def check_layer(layer, recorder, x, weight, bias, dc, segments):
    """Compare every product of a layer with ``matmul``; return the outputs, so that they stay alive."""
    rows, upstream = x.flatten(0, -2), dc.flatten(0, -2)
    of_k, of_n = (cut(size, count) for size, count in zip(weight.shape[::-1], segments, strict=True))
    out = same(recorder, layer.forward(x, weight, bias), rows, weight.t(), bias=bias, **of_k)
    assert (out.shape, out.dtype, out._is_view()) == (dc.shape, x.dtype, False)
    dx, absent = layer.gradients(dc, x, weight, None, (True, False))
    same(recorder, dx, upstream, weight, **of_n)
    assert (dx.shape, dx.dtype, absent) == (x.shape, x.dtype, None)
    absent, dw = layer.gradients(dc, x, weight, None, (False, True))
    same(recorder, dw, upstream.t(), rows)
    assert (dw.shape, dw.dtype, dw.is_contiguous(), absent) == (weight.shape, x.dtype, True, None)
    total = torch.zeros(weight.shape)
    assert layer.gradients(dc, x, weight, total, (False, True))[1] is total
    same(recorder, total, upstream.t(), rows, continues=True)
    both = layer.gradients(dc, x, weight, None, (True, True))
    assert [each.shape for each in both] == [x.shape, weight.shape]
    assert len(recorder.launches) == 2
    recorder.launches.clear()
    return out, dx, dw, total, both


def check_parts(layer, recorder, x, weight, bias, dc, own):
    """Compare the products of a rank with ``own`` segments with ``matmul``: of all rows, and of some."""
    outs = []
    for a, b in ((x.flatten(0, -2), weight.t()), (dc.flatten(0, -2), weight)):
        least = segment_length(a.shape[1], own)
        ways = [(torch.float32, None, least), (torch.float32, None, least + 16), (a.dtype, None, least)]
        if bias is not None and b is not weight:
            ways.append((a.dtype, bias, least))
        for rows in (a, a[:1], a[len(a) // 2 :]):
            for dtype, added, length in ways:
                out = torch.zeros(len(rows), b.shape[1], dtype=dtype)
                assert layer.segmented_into(rows, b, out, added, own, length)
                outs.append(same(recorder, out, rows, b, bias=added, segments=own, length=length))
    return outs


def planned_layers():
    """Return the module of plans, without what it remembers, and a recorder."""
    module = importlib.import_module(PLAN)
    module._maps.clear()
    return module, Recorder(processors=4)


def check_layers():
    """Compare layers of every shape, the second time with tensors at other addresses."""
    (module, recorder), kept = planned_layers(), []
    with recorder.watching(PLAN, MATMUL):
        for place, (lead, inner, outer) in enumerate(SHAPES):
            draw = Draw((torch.float16, torch.bfloat16)[place % 2], seed=place)
            for bias, segments, own in KINDS:
                given = drawn(draw, lead, inner, outer, bias)
                layer = module.plan_linear(*given[:3], segments)
                for tensors in (given, drawn(draw, lead, inner, outer, bias)):
                    # A freed tensor would give its address to another one.
                    kept.append((tensors, check_layer(layer, recorder, *tensors, segments)))
                    kept.append(check_parts(layer, recorder, *tensors, own))


def check_refusals():
    """Nothing is launched for tensors with another layout than the plan's."""
    module, recorder = planned_layers()
    x, weight, _, dc = drawn(Draw(torch.bfloat16, seed=1), (2, 8), 64, 40, False)
    named = {"x": x, "weight": weight, "dc": dc}
    odd = {name: value.new_empty(value.numel() + 1)[1:].view(value.shape) for name, value in named.items()}
    turned = {name: value.transpose(0, 1).contiguous().transpose(0, 1) for name, value in named.items()}
    special = dc.as_subclass(type("Special", (torch.Tensor,), {}))
    total, rows, out = torch.zeros(40, 64), dc.flatten(0, -2), torch.zeros(16, 64)
    shifted = {shape: torch.zeros(shape[0] * shape[1] + 1)[1:].view(shape) for shape in ((40, 64), (16, 64))}
    strange = odd["dc"], turned["dc"], dc[:1], dc[..., :1].expand(dc.shape), special, torch._neg_view(dc), dc.float()
    with recorder.watching(PLAN, MATMUL):
        layer = module.plan_linear(x, weight, None)
        assert layer.forward(odd["x"], weight, None) is None
        assert layer.forward(x, odd["weight"], None) is None
        for other in strange:
            for needed in ((True, False), (False, True), (True, True)):
                assert layer.gradients(other, x, weight, None, needed) is None
            assert layer.gradients(other, x, weight, total, (True, True)) is None
        for other in (odd["weight"], turned["weight"], weight.float(), torch._neg_view(weight)):
            assert layer.gradients(dc, x, other, None, (True, True)) is None
            assert other is turned["weight"] or not layer.segmented_into(rows, other, out, None, 2, 32)
        for other in (odd["x"], turned["x"], x.float(), torch._neg_view(x)):
            assert layer.gradients(dc, other, weight, None, (True, True)) is None
        for other in (total.t().contiguous().t(), shifted[40, 64]):
            assert layer.gradients(dc, x, weight, other, (True, True)) is None
        for other in (odd["dc"].flatten(0, -2), rows.float(), special.flatten(0, -2), torch._neg_view(rows)):
            assert not layer.segmented_into(other, weight, out, None, 2, 32)
        assert not layer.segmented_into(rows, weight, shifted[16, 64], None, 2, 32)
        assert not recorder.launches
        assert layer.forward(x, weight, None) is not None
        recorder.launches.clear()
        # Segments need operands that TMA takes.
        spread = torch.zeros(40, 128, dtype=x.dtype)[:, ::2]
        layer = module.plan_linear(x, spread, None, (2, 2))
        assert layer.forward(x, spread, None) is None
        assert layer.gradients(dc, x, spread, None, (True, True)) is None
        assert not layer.segmented_into(rows, spread, out, None, 2, 32)
        assert not recorder.launches
    for other in (x.transpose(0, 1), x[:0]):
        assert module.plan_linear(other, weight, None) is None
    assert module.plan_linear(x, weight, torch.zeros(80, dtype=x.dtype)[::2]) is None
    assert module.plan_linear(x[:, :1], weight, None) is not None


def check_all():
    check_refusals()
    check_layers()


def test_launches_are_those_of_matmul():
    check_layers()


def test_other_layouts_launch_nothing():
    check_refusals()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug_shows(bug):
    with planted([PLAN], bug), pytest.raises((AssertionError, RuntimeError, TypeError, KeyError)):
        check_all()


def test_remembered_maps_are_bounded():
    """Maps are forgotten when there are too many, and then remembered again."""
    (module, recorder), draw, kept, counts = planned_layers(), Draw(torch.bfloat16), [], []
    with patch.object(module, "MOST_MAPS", 5), recorder.watching(PLAN, MATMUL):
        layer = module.plan_linear(*drawn(draw, (200,), 64, 40, False)[:3])
        for _ in range(9):
            kept.append(drawn(draw, (200,), 64, 40, False)[:2])
            kept.append(layer.forward(*kept[-1], None))
            counts.append(sum(map(len, module._maps.values())))
    assert max(counts) <= 5 + 3
    assert max(counts[4:]) > 1
