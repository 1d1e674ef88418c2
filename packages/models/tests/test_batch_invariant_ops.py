"""The names of batch_invariant_ops: what the functions and the ops of PyTorch give in the mode, bit for bit."""

import math

import pytest
import torch
import torch.nn.functional as F

import rl_kernels.models.clients.batch_invariant_ops as batch_invariant_ops
from rl_kernels.core.testing import Draw
from rl_kernels.det_gemm import det_gemm, det_linear
from rl_kernels.fused_logp import fused_logp

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-3, torch.float64: 1e-12}
ROWS, INNER, COLUMNS = 37, 70, 23


@pytest.fixture
def mode():
    with batch_invariant_ops.set_batch_invariant_mode():
        yield


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


def draw(*shape, dtype=torch.float32, seed=0):
    return Draw(torch.float32, seed=seed).normal(*shape).to(dtype)


def close(found, expected):
    """Compare with a result in FP64; NaN nowhere."""
    limit = TOLERANCE[found.dtype]
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected.double(), rtol=limit, atol=limit)


@pytest.mark.smoke
@pytest.mark.usefixtures("mode", "poisoned_empty")
def test_a_row_of_a_product_follows_neither_batch_nor_place_nor_threads(dtype, torch_threads):
    a, b = draw(ROWS, INNER, dtype=dtype), draw(INNER, COLUMNS, dtype=dtype, seed=1)
    whole = a @ b
    close(whole, a.double() @ b.double())
    for threads in (1, 2):
        with torch_threads(threads):
            for first, last in ((0, 1), (5, 6), (3, 20), (36, 37), (4, 4)):
                assert torch.equal(a[first:last] @ b, whole[first:last])
            assert torch.equal(torch.cat([a[9:], a]) @ b, torch.cat([whole[9:], whole]))
            assert torch.equal(a.t().contiguous().t() @ b, whole)
    assert torch.equal(torch.mm(a, b, out=torch.empty(0, dtype=dtype)), whole)
    assert torch.equal(F.linear(a[7], b.t()), whole[7])
    if dtype != torch.float64:
        assert torch.equal(whole, det_gemm(a, b))
        assert torch.equal(batch_invariant_ops.mm_batch_invariant(a, b), whole)
        wide = torch.mm(a, b, out_dtype=torch.float32)
        assert torch.equal(wide, det_gemm(a, b, out_dtype=torch.float32))
        assert torch.equal(torch.mm(a, b, out_dtype=torch.float32, out=torch.empty_like(wide)), wide)


@pytest.mark.smoke
@pytest.mark.usefixtures("mode", "poisoned_empty")
def test_a_bias_of_any_shape_that_broadcasts(dtype):
    a, b = draw(ROWS, INNER, dtype=dtype), draw(INNER, COLUMNS, dtype=dtype, seed=1)
    product = a.double() @ b.double()
    for shape in ((COLUMNS,), (1,), (), (ROWS, COLUMNS), (ROWS, 1), (1, COLUMNS)):
        bias = draw(*shape, dtype=dtype, seed=2)
        for beta, alpha in ((1, 1), (0.5, 1), (1, -2.0), (0.25, 3)):
            whole = torch.addmm(bias, a, b, beta=beta, alpha=alpha)
            close(whole, (beta * bias.double() + alpha * product).to(dtype))
            row = bias.expand(ROWS, COLUMNS)[7:8]
            assert torch.equal(torch.addmm(row, a[7:8], b, beta=beta, alpha=alpha), whole[7:8])
            full = bias.expand(ROWS, COLUMNS)
            assert torch.equal(torch.addmm(full, a, b, beta=beta, alpha=alpha), whole)
            out = torch.full((ROWS, COLUMNS), math.nan, dtype=dtype)
            assert torch.addmm(bias, a, b, beta=beta, alpha=alpha, out=out) is out
            assert torch.equal(out, whole)
            assert torch.equal(full.clone().addmm_(a, b, beta=beta, alpha=alpha), whole)
    bias = draw(COLUMNS, dtype=dtype, seed=2)
    found = torch.addmm(bias, a, b)
    assert torch.equal(F.linear(a, b.t(), bias), found)
    assert torch.equal(torch.addmm(torch.full_like(bias, math.nan), a, b, beta=0), a @ b)
    if dtype != torch.float64:
        assert torch.equal(found, det_linear(a, b.t(), bias))
        assert torch.equal(batch_invariant_ops.addmm_batch_invariant(bias, a, b), found)
        assert torch.equal(batch_invariant_ops.linear_batch_invariant(a, b.t(), bias), found)
        wide = torch.addmm(bias, a, b, out_dtype=torch.float32)
        close(wide, bias.double() + product)
        assert torch.equal(torch.addmm(bias.float(), a, b, out_dtype=torch.float32), wide)
        assert wide.dtype == torch.float32


@pytest.mark.usefixtures("mode", "poisoned_empty")
def test_batches_of_matrices(dtype):
    a, b = draw(3, 9, INNER, dtype=dtype), draw(3, INNER, 5, dtype=dtype, seed=1)
    whole = torch.bmm(a, b)
    close(whole, torch.bmm(a.double(), b.double()))
    for place in range(3):
        assert torch.equal(torch.bmm(a[place : place + 1], b[place : place + 1])[0], whole[place])
        assert torch.equal(a[place] @ b[place], whole[place])
    assert torch.equal(torch.bmm(a[:, 4:6], b), whole[:, 4:6])
    assert torch.equal(torch.bmm(a, b[:1].expand(3, -1, -1)), torch.stack([left @ b[0] for left in a]))
    assert torch.equal(torch.bmm(a, b, out=torch.empty(0, dtype=dtype)), whole)
    assert torch.bmm(a[:0], b[:0]).shape == (0, 9, 5)
    if dtype != torch.float64:
        out = torch.empty(3, 9, 5, dtype=dtype)
        assert batch_invariant_ops.bmm_batch_invariant(a, b, out=out) is out
        assert torch.equal(out, whole)
        assert torch.bmm(a, b, out_dtype=torch.float32).dtype == torch.float32


@pytest.mark.usefixtures("mode", "poisoned_empty")
@pytest.mark.parametrize("width", [1, 5, 4097])
def test_log_softmax(dtype, width, torch_threads):
    x = 8 * draw(4, 3, width, dtype=dtype) + 100
    whole = torch.log_softmax(x, -1)
    assert whole.dtype == dtype
    close(whole, x.double() - x.double().logsumexp(-1, keepdim=True))
    for threads in (1, 2):
        with torch_threads(threads):
            assert torch.equal(torch.log_softmax(x[1, 2], -1), whole[1, 2])
            assert torch.equal(torch.log_softmax(x[2:, :1], -1), whole[2:, :1])
            assert torch.equal(torch.log_softmax(x.movedim(-1, 0), 0), whole.movedim(-1, 0))
    assert torch.equal(batch_invariant_ops.log_softmax(x), whole)
    assert torch.equal(batch_invariant_ops.log_softmax(x, 1), torch.log_softmax(x, 1))
    assert torch.log_softmax(x, 1).is_contiguous()
    assert torch.equal(torch.log_softmax(x, 2, out=torch.empty(0, dtype=dtype)), whole)
    ids = torch.full((4, 3), width - 1)
    chosen = fused_logp(x, ids, out_dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(chosen.to(dtype), whole[..., -1])


@pytest.mark.usefixtures("mode")
def test_rows_that_are_no_distribution():
    x = torch.tensor([[0.0, -math.inf, 1.0], [-math.inf] * 3, [math.inf, 0.0, 0.0], [math.nan, 0.0, 0.0]])
    found = torch.log_softmax(x, -1)
    assert found[0, 1] == -math.inf
    assert found[0, [0, 2]].exp().sum().item() == pytest.approx(1)
    assert found[1:].isnan().all()
    assert torch.log_softmax(torch.tensor(3.0), 0).item() == 0
    assert torch.log_softmax(torch.zeros(0, 3), -1).shape == (0, 3)
    assert torch.log_softmax(torch.zeros(3, 0), -1).shape == (3, 0)
    wide = torch._log_softmax(x[:1].half(), -1, True)
    assert wide.dtype == torch.float32
    assert torch.equal(wide, torch.log_softmax(x[:1], -1))


@pytest.mark.usefixtures("mode", "poisoned_empty")
def test_mean(dtype, torch_threads):
    x = draw(5, 4, 5000, dtype=dtype) + 1
    other_layout = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    for dim in (0, 1, -1, (0, 2), (-1, -3), (0, 1, 2), ()):
        reduced = [0, 1, 2] if dim == () else [one % 3 for one in (dim if isinstance(dim, tuple) else (dim,))]
        for keepdim in (False, True):
            whole = torch.mean(x, dim, keepdim)
            assert whole.dtype == dtype
            with batch_invariant_ops.set_batch_invariant_mode(False):
                close(whole, x.double().mean(reduced, keepdim))
            assert torch.equal(batch_invariant_ops.mean_dim(x, dim, keepdim), whole)
            assert torch.equal(batch_invariant_ops.mean_batch_invariant(x, reduced, keepdim), whole)
            assert torch.equal(batch_invariant_ops.mean_batch_invariant(x, reduced[::-1], keepdim), whole)
            assert torch.equal(torch.mean(x, dim, keepdim, out=torch.empty(0, dtype=dtype)), whole)
            with torch_threads(1 + keepdim):
                assert torch.equal(other_layout.mean(dim, keepdim), whole)
        if 1 not in reduced:
            assert torch.equal(x[:, 2:3].mean(dim, True), x.mean(dim, True)[:, 2:3])


@pytest.mark.usefixtures("mode")
def test_mean_of_everything_of_nothing_and_of_integers():
    x = draw(3, 4)
    assert x.mean() == x.mean((0, 1))
    assert torch.tensor(3.0).mean(0) == 3
    assert torch.zeros(0, 2).mean(0).isnan().all()
    assert torch.zeros(2, 0).mean(0).shape == (0,)
    numbers = torch.arange(4)
    assert numbers.mean(0, dtype=torch.float32) == 1.5
    assert batch_invariant_ops.mean_dim(numbers, 0) == 1.5
    assert batch_invariant_ops.mean_batch_invariant(numbers, [0], dtype=torch.float64).dtype == torch.float64
    assert x.bfloat16().mean(0, dtype=torch.float32).dtype == torch.float32
    # In FP32 the one would be lost.
    assert torch.tensor([1e8, -1e8, 1.0]).mean(0, dtype=torch.float64) == pytest.approx(1 / 3)


def test_rms_norm_and_the_functions_without_the_mode():
    x, weight = draw(6, 48), draw(48, seed=1)
    found = batch_invariant_ops.rms_norm(x, weight, 0.5)
    close(found, (x.double() / (x.double().square().mean(-1, keepdim=True) + 0.5).sqrt()) * weight.double())
    assert torch.equal(batch_invariant_ops.rms_norm_batch_invariant(x[2:3], weight, 0.5), found[2:3])
    half = batch_invariant_ops.rms_norm(x.bfloat16(), weight.bfloat16())
    # Rounded once: the weight multiplies a row in FP32.
    exact = F.rms_norm(x.bfloat16().float(), (48,), weight.bfloat16().float(), 1e-6).bfloat16()
    assert (half != exact).float().mean() < 0.02
    b, bias = draw(48, 5, seed=2), draw(5, seed=3)
    assert torch.equal(batch_invariant_ops.matmul_persistent(x, b, bias), det_linear(x, b.t(), bias))
    assert torch.equal(batch_invariant_ops.matmul_persistent(x, b), det_gemm(x, b))


NAMES = """set_batch_invariant_mode is_batch_invariant_mode_enabled disable_batch_invariant_mode
    enable_batch_invariant_mode matmul_persistent log_softmax mean_dim get_batch_invariant_attention_block_size
    AttentionBlockSize rms_norm_batch_invariant bmm_batch_invariant"""


def test_names_and_the_attention_blocks_of_det_attention():
    from rl_kernels.attention.backends.native import backend as native

    size = batch_invariant_ops.get_batch_invariant_attention_block_size()
    assert size == batch_invariant_ops.AttentionBlockSize(block_m=native.BLOCK, block_n=native.BLOCK)
    assert set(NAMES.split()) <= set(batch_invariant_ops.__all__)
    assert all(hasattr(batch_invariant_ops, name) for name in batch_invariant_ops.__all__)
