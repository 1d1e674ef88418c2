"""Sums over rows: one chain, or chains of ``join_tokens`` rows; a batch in parts has the bits of the whole."""

from itertools import pairwise

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rl_kernels.core.testing import Draw
from rl_kernels.det_gemm import DetLinear, det_gemm_dw, det_linear

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
JOIN, K, N = 64, 24, 40


def rows(count, dtype=torch.float32, device="cpu"):
    draw = Draw(dtype, device, seed=3)
    return draw.normal(count, K), draw.normal(count, N)


def in_parts(a, dc, ends, buffer, **options):
    for first, last in pairwise(ends):
        assert det_gemm_dw(a[first:last], dc[first:last], accumulate_into=buffer, **options) is buffer
    return buffer


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_micro_batches_continue_the_chain(device, dtype):
    a, dc = rows(261, dtype, device)
    whole = det_gemm_dw(a, dc, out_dtype=torch.float32)
    for parts in (2, 4, 8):
        ends = [*range(0, 256, 256 // parts), 261]
        for buffer in (torch.zeros(K, N), torch.zeros(N, K).t(), torch.zeros(K, 2 * N)[:, ::2]):
            assert torch.equal(in_parts(a, dc, ends, buffer.to(device)), whole), parts
    # The promise is about multiples of 16: inside a step, a cut is another sum.
    other = in_parts(a, dc, (0, 40, 261), torch.zeros_like(whole))
    assert not torch.equal(other, whole)
    torch.testing.assert_close(other, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_joined_chains_are_added_in_order(device, dtype):
    a, dc = rows(200, dtype, device)
    start = torch.full((K, N), 0.1, device=device)
    expected = start.clone()
    for first in range(0, 200, JOIN):
        expected += det_gemm_dw(a[first : first + JOIN], dc[first : first + JOIN], out_dtype=torch.float32)
    assert torch.equal(in_parts(a, dc, (0, 200), start.clone(), join_tokens=JOIN), expected)
    assert torch.equal(in_parts(a, dc, (0, 64, 200), start.clone(), join_tokens=JOIN), expected)
    assert not torch.equal(in_parts(a, dc, (0, 96, 200), start.clone(), join_tokens=JOIN), expected)
    assert not torch.equal(in_parts(a, dc, (0, 200), start.clone()), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_main_grad_of_micro_batches(device, dtype):
    x, upstream = rows(200, dtype, device)

    def main_grad(*ends):
        weight = torch.zeros(N, K, dtype=dtype, device=device, requires_grad=True)
        weight.main_grad = torch.zeros(N, K, device=device)
        for first, last in pairwise(ends):
            det_linear(x[first:last], weight, join_tokens=JOIN).backward(upstream[first:last])
        assert weight.grad is None
        return weight.main_grad

    whole = main_grad(0, 200)
    assert torch.equal(main_grad(0, 64, 200), whole)
    assert torch.equal(main_grad(0, 128, 192, 200), whole)
    assert not torch.equal(main_grad(0, 96, 200), whole)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_joined_gradients_without_main_grad(device, dtype):
    x, upstream = rows(200, dtype, device)
    layer = DetLinear(K, N, device=device, dtype=dtype, dx_segments=2, join_tokens=JOIN)
    plain = DetLinear.from_linear(layer, dx_segments=2)
    leaves = [x.requires_grad_(), layer.weight, layer.bias]
    (dx, dweight, dbias), other = (torch.autograd.grad(each(x), leaves, upstream) for each in (layer, plain))
    ones = x.new_ones(200, 1)
    assert torch.equal(dweight, det_gemm_dw(upstream, x.detach(), join_tokens=JOIN))
    assert torch.equal(dbias, det_gemm_dw(ones, upstream, join_tokens=JOIN)[0])
    assert torch.equal(dx, other[0])
    if dtype == torch.float32:
        # No rounding hides the order of a sum.
        assert not torch.equal(dweight, other[1])
        assert not torch.equal(dbias, other[2])
    if dtype == torch.float32 and device == "cpu":
        # Blocks of Triton kernels end where the first segment of 40 terms does.
        assert not torch.equal(dx, torch.autograd.grad(DetLinear.from_linear(layer)(x), x, upstream)[0])
    assert det_gemm_dw(x.detach(), upstream, out_dtype=torch.float32, join_tokens=JOIN).dtype == torch.float32


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_around_accumulation_raises(use_reentrant):
    buffer = torch.zeros(K, N)

    def step(x, dc):
        det_gemm_dw(x.detach(), dc, accumulate_into=buffer)
        return x.exp()

    with pytest.raises(ValueError, match=r"accumulate_into: expected no torch\.utils\.checkpoint around det_gemm_dw"):
        checkpoint(step, torch.ones(16, K, requires_grad=True), torch.ones(16, N), use_reentrant=use_reentrant)
    assert not buffer.any()


@pytest.mark.gpu
def test_joined_chains_are_more_exact():
    """131,072 rows of one sign: one chain shrinks by 8e-4, chains of 4096 by 1.4e-5 (tools/chain_error.py)."""
    a, dc = (torch.rand(1 << 17, 64, device="cuda").bfloat16() for _ in range(2))
    exact = a.double().t() @ dc.double()
    for join, most in ((None, 2e-3), (4096, 4e-5)):
        found = det_gemm_dw(a, dc, out_dtype=torch.float32, join_tokens=join)
        assert float(((found.double() - exact) / exact).abs().max()) < most
