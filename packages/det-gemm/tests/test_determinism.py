"""The promises in bits: rows alone and in batches, tokens whole and in micro-batches."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rl_kernels.core.testing import Draw
from rl_kernels.det_gemm import det_gemm, det_gemm_dw, det_linear

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [1, 2, 3, 7, 8, 16, 17, 33, 63, 64, 65, 127, 128, 129, 257]
K, N = 100, 71


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request, torch_threads):
    with torch_threads(request.param):
        yield request.param


def linear(x, weight, bias, upstream):
    """Return the output and the gradient of ``x``, both ``[M, .]``."""
    x = x.detach().requires_grad_()
    out = det_linear(x, weight, bias)
    return out.detach(), torch.autograd.grad(out, x, upstream)[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_alone_equal_rows_in_a_batch(threads, dtype):
    draw = Draw(dtype, seed=1)
    x, weight, bias = draw.normal(ROWS[-1], K), draw.normal(N, K, scale=K**-0.5), draw.normal(N)
    upstream = draw.normal(ROWS[-1], N)
    whole = linear(x, weight, bias, upstream)
    for rows in ROWS:
        for part in (slice(rows), slice(len(x) - rows, len(x))):
            found = linear(x[part], weight, bias, upstream[part])
            assert all(torch.equal(value, expected[part]) for value, expected in zip(found, whole, strict=True)), rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_thread_count_changes_no_bit(dtype, torch_threads):
    draw = Draw(dtype, seed=2)
    operands = draw.normal(65, 300), draw.normal(300, 129), draw.normal(65, 129)
    results = []
    for count in (1, 2):
        with torch_threads(count):
            a, b = (value.clone().requires_grad_() for value in operands[:2])
            out = det_gemm(a, b)
            results.append((out, *torch.autograd.grad(out, (a, b), operands[2])))
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_plain_matmul_follows_the_batch():
    """The control: were this not so somewhere, the tests above would show nothing."""
    draw = Draw(torch.float32, seed=1)
    x, weight = draw.normal(ROWS[-1], K), draw.normal(K, N, scale=K**-0.5)
    whole = x @ weight
    if all(torch.equal(x[:rows] @ weight, whole[:rows]) for rows in ROWS):
        pytest.skip("on this machine torch.matmul gives the same rows in all these batches")


def test_a_row_of_nan_or_inf_stays_in_its_row():
    draw = Draw(torch.float32, seed=5)
    x, weight = draw.normal(9, K), draw.normal(N, K)
    expected = det_linear(x, weight)
    x[3], x[6, 0] = torch.nan, torch.inf
    found = det_linear(x, weight)
    others = [0, 1, 2, 4, 5, 7, 8]
    assert torch.equal(found[others], expected[others])
    assert bool(found[3].isnan().all())
    assert not bool(found[6].isfinite().any())


@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_micro_batches_continue_the_chain(threads, dtype, parts):
    draw = Draw(dtype, seed=6)
    a, dc = draw.normal(16 * 8 * 2 + 5, K), draw.normal(16 * 8 * 2 + 5, N)
    whole = det_gemm_dw(a, dc, out_dtype=torch.float32)
    buffers = torch.zeros(K, N), torch.zeros(N, K).t(), torch.zeros(K, 2 * N)[:, ::2]
    for buffer in buffers:
        for cut in range(parts):
            last = cut == parts - 1
            tokens = slice(cut * 256 // parts, None if last else (cut + 1) * 256 // parts)
            assert det_gemm_dw(a[tokens], dc[tokens], accumulate_into=buffer) is buffer
        assert torch.equal(buffer, whole)


def test_a_cut_inside_a_step_is_another_sum():
    """The control of the test above, and why the promise is about multiples of 16."""
    draw = Draw(torch.float32, seed=6)
    a, dc = draw.normal(128, K), draw.normal(128, N)
    buffer = det_gemm_dw(a[:40], dc[:40])
    det_gemm_dw(a[40:], dc[40:], accumulate_into=buffer)
    whole = det_gemm_dw(a, dc)
    assert not torch.equal(buffer, whole)
    torch.testing.assert_close(buffer, whole)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_does_not_continue_a_sum_twice(use_reentrant):
    buffer = torch.zeros(K, N)

    def step(x, dc):
        det_gemm_dw(x.detach(), dc, accumulate_into=buffer)
        return x.exp()

    with pytest.raises(ValueError, match=r"accumulate_into: expected no torch\.utils\.checkpoint around det_gemm_dw"):
        checkpoint(step, torch.ones(16, K, requires_grad=True), torch.ones(16, N), use_reentrant=use_reentrant)
    assert not buffer.any()


def test_float32_matmul_precision_changes_nothing():
    draw = Draw(torch.float32, seed=7)
    x, weight, upstream = draw.normal(20, K), draw.normal(N, K).requires_grad_(), draw.normal(20, N)

    def run():
        x_grad = x.clone().requires_grad_()
        out = det_linear(x_grad, weight)
        return out, *torch.autograd.grad(out, (x_grad, weight), upstream)

    expected, before = run(), torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        found = run()
    finally:
        torch.set_float32_matmul_precision(before)
    assert all(torch.equal(value, other) for value, other in zip(found, expected, strict=True))
