"""Numbers that become tensors, and operands that autocast casts."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rl_kernels.core.torchlib.autocast import autocast_dtype, autocast_linear
from rl_kernels.core.torchlib.scalars import scalar, scalar_or_rows, scalars


def test_numbers_in_one_tensor_are_those_of_one_each():
    values = (0.1, 1, 1e-30)
    expected = [scalar(value, torch.float64) for value in values]
    compiled = torch.compile(scalars, fullgraph=True, backend="aot_eager")
    for found in (scalars(*values), compiled(*values)):
        assert found.dtype == torch.float64
        assert torch.equal(found, torch.stack(expected))


def test_numbers_are_kept_where_they_may_be():
    with torch.inference_mode():
        first = scalar(0.37, torch.float32)
    assert scalar(0.37, torch.float32) is first
    assert not first.is_inference()
    with FakeTensorMode():
        fake = scalars(0.5, 7.25)
    kept = scalars(0.5, 7.25)
    assert type(fake) is not type(kept)
    assert type(kept) is torch.Tensor
    assert kept.tolist() == [0.5, 7.25]
    for value in (0.0, -0.0, 0.0):
        assert math.copysign(1, float(scalar(value, torch.float32))) == math.copysign(1, value)
        assert math.copysign(1, scalars(1.0, value).tolist()[1]) == math.copysign(1, value)
    assert scalar(3, torch.float64).dtype == torch.float64
    assert scalar(3, torch.float32).dtype == torch.float32


def test_a_number_stays_on_the_cpu_and_a_tensor_is_one_value_a_row():
    assert scalar_or_rows(0.5, 3, torch.float32).shape == ()
    for shape, rows in (((), 1), ((), 4), ((3,), 3), ((2, 3), 6)):
        found = scalar_or_rows(torch.full(shape, 0.5, dtype=torch.float64), rows, torch.float32)
        assert (found.shape, found.dtype) == ((rows,), torch.float32)


def test_any_real_number_becomes_a_scalar():
    for value in (2**70, Fraction(1, 3), np.float32(0.7), 3):
        assert scalar(value, torch.float64).item() == float(value)


@pytest.mark.parametrize("first", [0.5, 3])
def test_a_scalar_stays_one_graph(first):
    def scaled(x, value):
        return x * scalar(value, torch.float32)

    compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager")
    for value in (first, first + 1, first + 2):
        assert torch.equal(compiled(torch.ones(2), value), torch.full((2,), float(value)))


def test_operands_of_a_layer_under_autocast():
    x, weight, bias = torch.ones(2, 3), torch.ones(4, 3), torch.ones(4)
    assert autocast_dtype(x) is None
    assert all(a is b for a, b in zip(autocast_linear(x, weight, bias), (x, weight, bias), strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_dtype(x) == torch.bfloat16
        assert autocast_dtype(x.to("meta")) is None
        assert autocast_dtype([1.0]) is None
        assert [value.dtype for value in autocast_linear(x, weight, bias)] == [torch.bfloat16] * 3
        for other in (x.double(), x.int(), x.to(torch.float8_e4m3fn), x.to_sparse(), None, "x"):
            with torch.no_grad():
                assert all(value is other for value in autocast_linear(x, other, other)[1:])
        assert autocast_linear(x, weight.half(), None)[1].dtype == torch.bfloat16
        halves = x.bfloat16(), weight.bfloat16(), None
        assert all(a is b for a, b in zip(autocast_linear(*halves), halves, strict=True))


def test_casts_of_a_layer_with_gradients_and_without():
    x, weight = torch.randn(2, 3), torch.nn.Parameter(torch.randn(4, 3))
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            first = autocast_linear(x, weight.t(), weight)
        assert torch.equal(first[1], weight.t().bfloat16())
        assert torch.equal(first[2], weight.bfloat16())
        assert not first[2].requires_grad
        # Not what autocast may have kept, which leads to no gradient.
        autocast_linear(x, weight, None)[1].sum().backward()
    assert torch.equal(weight.grad, torch.ones(4, 3))


@pytest.mark.gpu
def test_autocast_keeps_what_it_cast_of_a_parameter():
    weight = torch.nn.Parameter(torch.randn(4, 3, device="cuda"))
    x = torch.randn(2, 3, device="cuda")

    def kept():
        return autocast_linear(x, weight, None)[1]

    with torch.autocast("cuda", torch.bfloat16):
        with torch.no_grad():
            first = kept()
            assert first.dtype == torch.bfloat16
            assert kept().data_ptr() == first.data_ptr()
            with torch.autocast("cuda", torch.bfloat16):
                assert kept().data_ptr() == first.data_ptr()
            with torch.autocast("cuda", torch.float16):
                assert torch.equal(kept(), weight.half())
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = kept()
        assert kept().data_ptr() != first.data_ptr()
        kept().sum().backward()
    assert torch.equal(weight.grad, torch.ones_like(weight))
    with torch.no_grad():
        weight.add_(1)
        # What was captured casts it anew.
        graph.replay()
        assert torch.equal(captured, weight.bfloat16())
        with torch.autocast("cuda", torch.bfloat16):
            assert torch.equal(kept(), weight.bfloat16())
