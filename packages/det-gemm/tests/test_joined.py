"""Sums of chains of ``join_tokens`` rows: what they are, and that micro-batches keep their bits."""

from itertools import pairwise

import pytest
import torch

from rl_kernels.core.testing import Draw
from rl_kernels.det_gemm import DetLinear, det_gemm_dw, det_linear

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16]
JOIN = 64


def rows(count, dtype, device, salt=0):
    draw = Draw(dtype, device, seed=3 + salt)
    return draw.normal(count, 24), draw.normal(count, 40)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chains_are_added_in_order(device, dtype):
    a, dc = rows(200, dtype, device)
    expected = torch.full((24, 40), 0.1, device=device)
    for first in range(0, 200, JOIN):
        expected += det_gemm_dw(a[first : first + JOIN], dc[first : first + JOIN], out_dtype=torch.float32)
    found = torch.full((24, 40), 0.1, device=device)
    det_gemm_dw(a, dc, accumulate_into=found, join_tokens=JOIN)
    assert torch.equal(found, expected)
    chain = det_gemm_dw(a, dc, accumulate_into=torch.full_like(found, 0.1))
    assert not torch.equal(found, chain)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cuts", [(0, 64, 200), (0, 128, 192, 200)])
def test_micro_batches_keep_their_bits(device, dtype, cuts):
    x, upstream = rows(200, dtype, device)

    def main_grad(*ends):
        weight = torch.zeros(40, 24, dtype=dtype, device=device, requires_grad=True)
        weight.main_grad = torch.zeros(40, 24, device=device)
        for first, last in pairwise(ends):
            det_linear(x[first:last], weight, join_tokens=JOIN).backward(upstream[first:last])
        assert weight.grad is None
        return weight.main_grad

    whole = main_grad(0, 200)
    assert torch.equal(main_grad(*cuts), whole)
    # Inside a chain a cut is another sum.
    assert not torch.equal(main_grad(0, 96, 200), whole)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_without_a_buffer_are_rounded_once(device):
    x, upstream = rows(200, torch.bfloat16, device)
    layer = DetLinear(24, 40, device=device, dtype=torch.bfloat16, join_tokens=JOIN)
    x.requires_grad_()
    layer(x).backward(upstream)
    assert torch.equal(layer.weight.grad, det_gemm_dw(upstream, x.detach(), join_tokens=JOIN))
    ones = torch.ones(200, 1, dtype=torch.bfloat16, device=device)
    assert torch.equal(layer.bias.grad, det_gemm_dw(ones, upstream, join_tokens=JOIN)[0])
    plain = DetLinear.from_linear(layer)
    (of_x,) = torch.autograd.grad(plain(x), x, upstream)
    assert torch.equal(x.grad, of_x)
    assert repr(layer) == "DetLinear(in_features=24, out_features=40, bias=True, join_tokens=64)"
    assert "join" not in repr(plain)


def test_every_option_is_kept_beside_it():
    """In FP32, where no rounding hides a sum: the bias, segments of the input's gradient, dtype and buffer."""
    x, upstream = rows(400, torch.float32, "cpu")
    layer = DetLinear(24, 40, dx_segments=2, join_tokens=JOIN)
    plain = DetLinear.from_linear(layer, dx_segments=2)
    x.requires_grad_()
    found = torch.autograd.grad(layer(x), [layer.bias, x], upstream)
    other = torch.autograd.grad(plain(x), [plain.bias, x], upstream)
    ones = torch.ones(400, 1)
    assert torch.equal(found[0], det_gemm_dw(ones, upstream, join_tokens=JOIN)[0])
    assert not torch.equal(found[0], other[0])
    assert torch.equal(found[1], other[1])
    whole = DetLinear.from_linear(layer)
    assert not torch.equal(found[1], torch.autograd.grad(whole(x), x, upstream)[0])
    a = x.detach().bfloat16()
    assert det_gemm_dw(a, upstream.bfloat16(), out_dtype=torch.float32, join_tokens=JOIN).dtype == torch.float32
    buffer = torch.zeros(24, 40)
    assert det_gemm_dw(x.detach(), upstream, accumulate_into=buffer, join_tokens=JOIN) is buffer


@pytest.mark.parametrize("value", [0, 8, 24, -16])
def test_bad_lengths(value):
    a, dc = rows(32, torch.float32, "cpu")
    with pytest.raises(ValueError, match="join_tokens: expected None or a multiple of 16"):
        det_gemm_dw(a, dc, join_tokens=value)


def test_under_compile():
    x, upstream = rows(96, torch.float32, "cpu")
    layer = DetLinear(24, 40, join_tokens=32)
    expected = torch.autograd.grad(layer(x), list(layer.parameters()), upstream)
    torch.compiler.reset()
    found = torch.autograd.grad(
        torch.compile(layer, fullgraph=True, backend="aot_eager")(x), list(layer.parameters()), upstream
    )
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.gpu
def test_a_long_sum_is_more_exact():
    """131,072 rows of one sign: one chain shrinks by 8e-4, chains of 4096 by 1.4e-5 (tools/chain_error.py)."""
    a, dc = (torch.rand(1 << 17, 64, device="cuda").bfloat16() for _ in range(2))
    exact = a.double().t() @ dc.double()
    for join, most in ((None, 2e-3), (4096, 4e-5)):
        found = det_gemm_dw(a, dc, out_dtype=torch.float32, join_tokens=join)
        assert float(((found.double() - exact) / exact).abs().max()) < most
