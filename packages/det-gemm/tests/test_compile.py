"""torch.compile with the module, buffers, autocast and other row counts; the cases compile the plain calls."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from rl_kernels.core.testing import Draw
from rl_kernels.det_gemm import DetLinear, det_gemm_dw, det_linear


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()


def compiled(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def test_module_in_bf16_and_main_grad():
    draw = Draw(torch.bfloat16, seed=1)
    layer, x, upstream = DetLinear(24, 10, dtype=torch.bfloat16), draw.normal(2, 8, 24), draw.normal(2, 8, 10)
    leaves = (x.requires_grad_(), layer.weight, layer.bias)
    outs = compiled(layer)(x), layer(x)
    assert torch.equal(*outs)
    gradients = (torch.autograd.grad(out, leaves, upstream) for out in outs)
    assert all(torch.equal(value, other) for value, other in zip(*gradients, strict=True))
    buffers = []
    for module in (layer, compiled(layer)):
        layer.weight.main_grad = torch.ones(10, 24)
        for _ in range(2):
            module(x).backward(upstream)
        buffers.append(layer.weight.main_grad)
    assert torch.equal(*buffers)
    assert not torch.equal(buffers[0], torch.ones(10, 24))
    assert layer.weight.grad is None


def test_weight_gradient_into_a_buffer():
    draw = Draw(torch.float32, seed=3)
    a, dc = draw.normal(20, 6), draw.normal(20, 9)
    eager, traced = torch.ones(6, 9), torch.ones(6, 9)
    det_gemm_dw(a, dc, accumulate_into=eager)
    assert torch.equal(compiled(lambda out: det_gemm_dw(a, dc, accumulate_into=out))(traced), eager)
    assert torch.equal(traced, eager)


def test_autocast():
    draw = Draw(torch.float32, seed=4)
    x, weight = draw.normal(5, 24), draw.normal(10, 24)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = compiled(det_linear)(x, weight), det_linear(x, weight)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)


def test_few_graphs_for_all_row_counts():
    counter = CompileCounter()
    layer, draw = DetLinear(24, 10), Draw(torch.float32, seed=5)
    run = torch.compile(layer, fullgraph=True, backend=counter)
    for rows in (5, 6, 33, 100):
        x = draw.normal(rows, 24)
        assert torch.equal(run(x), layer(x))
    assert counter.frame_count <= 2
