"""Segments of a sum: their bounds, their tree, and that the parts of ranks have the bits of one process."""

import copy
import importlib
import pickle

import pytest
import torch
from torch import nn

from rl_kernels.core.distributed import tree_sum
from rl_kernels.core.products import matmul
from rl_kernels.core.testing import Draw
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.det_gemm import DetLinear, det_gemm, det_gemm_dw, det_linear
from rl_kernels.det_gemm.op import ops
from rl_kernels.det_gemm.segments import bounds, segment_length

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = (0, 1, 16, 17, 30, 128, 200, 1000)


@pytest.mark.parametrize("segments", [1, 2, 4, 8])
@pytest.mark.parametrize("size", SIZES)
def test_segments_are_equal_multiples_of_16_and_hold_all_terms(size, segments):
    length = segment_length(size, segments)
    assert length % 16 == 0
    assert segments * length >= size > segments * (length - 16) or size == 0
    cuts = bounds(size, segments, length)
    assert [first for first, _ in cuts] == [min(i * length, size) for i in range(segments)]
    assert [end for _, end in cuts] == [*(first for first, _ in cuts[1:]), size]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("segments", [2, 4, 8])
def test_a_product_is_the_tree_of_its_segments(dtype, segments):
    draw = Draw(dtype, seed=1)
    x, weight, bias = draw.normal(9, 300), draw.normal(24, 300), draw.normal(24)
    cuts = bounds(300, segments, segment_length(300, segments))
    parts = [det_gemm(x[:, f:e], weight[:, f:e].t(), out_dtype=torch.float32) for f, e in cuts]
    expected = tree_sum(parts)
    assert torch.equal(det_gemm(x, weight.t(), k_segments=segments, out_dtype=torch.float32), expected)
    assert torch.equal(det_linear(x, weight, bias, k_segments=segments), (expected + bias.float()).to(dtype))
    assert not torch.equal(det_gemm(x, weight.t(), out_dtype=torch.float32), expected)


@pytest.mark.parametrize("size", [30, 264, 1000])
@pytest.mark.parametrize("segments", [2, 4, 8])
def test_the_parts_of_ranks_have_the_bits_of_one_process(segments, size):
    draw = Draw(torch.bfloat16, seed=2)
    x, weight = draw.normal(5, size), draw.normal(24, size)
    whole, length = (
        det_gemm(x, weight.t(), k_segments=segments, out_dtype=torch.float32),
        segment_length(size, segments),
    )
    for ranks in (2, 4, 8):
        if ranks > segments:
            continue
        held, parts = segments // ranks, []
        for rank in range(ranks):
            part = slice(rank * held * length, (rank + 1) * held * length)
            a, b = x[:, part], weight[:, part].t()
            parts.append(ops["segmented"](a, b, None, torch.float32, held, length, "native"))
        assert torch.equal(tree_sum(parts), whole)


def test_a_gradient_of_the_input_is_a_product_in_segments_of_n():
    draw = Draw(torch.bfloat16, seed=3)
    x, weight, upstream = (
        draw.normal(2, 9, 40).requires_grad_(),
        draw.normal(200, 40).requires_grad_(),
        draw.normal(2, 9, 200),
    )
    plain = torch.autograd.grad(det_linear(x, weight), (x, weight), upstream)
    dx, dweight = torch.autograd.grad(det_linear(x, weight, k_segments=2, dx_segments=8), (x, weight), upstream)
    rows = upstream.flatten(0, 1)
    assert torch.equal(dx.flatten(0, 1), det_gemm(rows, weight.detach(), k_segments=8))
    assert torch.equal(dweight, plain[1])
    assert torch.equal(dweight, det_gemm_dw(rows, x.detach().flatten(0, 1)))
    a = x.detach().flatten(0, 1).requires_grad_()
    (da,) = torch.autograd.grad(det_gemm(a, weight.detach().t(), dx_segments=8), a, rows)
    assert torch.equal(da, dx.flatten(0, 1))


def test_one_segment_is_the_plain_product():
    draw = Draw(torch.float32, seed=4)
    x, weight = draw.normal(9, 300), draw.normal(24, 300)
    assert torch.equal(det_linear(x, weight, k_segments=1, dx_segments=1), det_linear(x, weight))
    assert torch.equal(ops["segmented"](x, weight.t(), None, torch.float32, 1, 304, "native"), det_gemm(x, weight.t()))


def test_main_grad_and_autocast_are_as_without_segments():
    draw = Draw(torch.float32, seed=5)
    x, weight, upstream = draw.normal(32, 40), draw.normal(24, 40).requires_grad_(), draw.normal(32, 24)
    buffers = []
    for options in ({}, {"k_segments": 4, "dx_segments": 4}):
        weight.main_grad = torch.zeros(24, 40)
        det_linear(x, weight, **options).backward(upstream)
        buffers.append(weight.main_grad)
    assert torch.equal(*buffers)
    assert weight.grad is None
    with torch.autocast("cpu", torch.bfloat16):
        found = det_linear(x, weight, k_segments=4)
    assert torch.equal(found, det_linear(x.bfloat16(), weight.bfloat16(), k_segments=4))


def test_a_layer_keeps_its_segments():
    plain = nn.Linear(40, 24)
    layer = DetLinear.from_linear(plain, k_segments=8, dx_segments=2)
    x = Draw(torch.float32).normal(3, 40)
    for twin in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert (twin.k_segments, twin.dx_segments) == (8, 2)
        assert torch.equal(twin(x), det_linear(x, plain.weight, plain.bias, k_segments=8))
    assert repr(layer) == "DetLinear(in_features=40, out_features=24, bias=True, k_segments=8, dx_segments=2)"
    assert repr(DetLinear(4, 2)) == "DetLinear(in_features=4, out_features=2, bias=True)"
    made = DetLinear(40, 24, False, dtype=torch.bfloat16, k_segments=2)
    assert (made.bias, made.weight.dtype, made.k_segments, made.dx_segments) == (None, torch.bfloat16, 2, 1)


@pytest.mark.parametrize("name", ["k_segments", "dx_segments"])
def test_a_layer_refuses_other_numbers_of_segments(name):
    for value, error in ((3, ValueError), (0, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match=f"{name}: expected"):
            DetLinear(4, 2, **{name: value})
        with pytest.raises(error, match=f"{name}: expected"):
            DetLinear.from_linear(nn.Linear(4, 2), **{name: value})


def test_compiled_with_numbers_of_segments_that_change():
    torch.compiler.reset()
    draw = Draw(torch.bfloat16, seed=6)
    x, weight = draw.normal(5, 200).requires_grad_(), draw.normal(40, 200)

    def gradient(count, call=det_linear):
        out = call(x, weight, k_segments=count, dx_segments=count)
        return out, torch.autograd.grad(out, x, torch.ones_like(out))[0]

    run = torch.compile(det_linear, fullgraph=True, backend="aot_eager")
    for count in (1, 8, 2):
        assert all(torch.equal(*pair) for pair in zip(gradient(count, run), gradient(count), strict=True))


def hold_order():
    """Hold the native backend to the tree, written out."""
    module = importlib.import_module("rl_kernels.det_gemm.segments")
    backend = importlib.import_module("rl_kernels.det_gemm.backends.native")
    draw = Draw(torch.bfloat16, seed=9)
    a, b, bias = draw.normal(40, 1000), draw.normal(1000, 24), draw.normal(24)
    # 1000 terms in 8 segments of 128, the last of 104.
    s = [matmul(a[:, first : first + 128], b[first : first + 128]) for first in range(0, 1000, 128)]
    total = ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]))
    found = backend.segmented(a, b, bias, torch.float32, 8, module.segment_length(1000, 8))
    assert torch.equal(found, total + bias.float())


def test_the_order_is_the_tree_of_the_contract():
    hold_order()


def test_bug_planted_in_the_order_shows():
    bug = Bug("segments added in a chain", "total = tree_sum", "total = sum")
    modules = "rl_kernels.det_gemm.segments", "rl_kernels.det_gemm.backends.native"
    with planted(modules, bug), pytest.raises((AssertionError, RuntimeError)):
        hold_order()


@pytest.mark.parametrize("bias", [True, False])
def test_the_raw_op_is_registered_as_pytorch_wants_it(bias):
    draw = Draw(torch.bfloat16, seed=7)
    given = draw.normal(5, 100), draw.normal(24, 100).t(), draw.normal(24) if bias else None
    for segments in (1, 2, 8):
        options = torch.float32, segments, segment_length(100, segments), "native"
        torch.library.opcheck(torch.ops.rl_kernels.det_gemm_segmented.default, (*given, *options))


def test_a_second_derivative_is_refused():
    draw = Draw(torch.float32, seed=8)
    x, weight = draw.normal(5, 40).requires_grad_(), draw.normal(24, 40)
    out = det_linear(x, weight, dx_segments=2)
    (dx,) = torch.autograd.grad(out, x, torch.ones_like(out).requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        dx.sum().backward()
