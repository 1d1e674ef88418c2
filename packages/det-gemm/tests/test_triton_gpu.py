"""The Triton backend on a GPU: bits of rows, of the canonical chain, of cuBLASLt without split-K, of micro-batches.

Run as a program it compares with cuBLASLt, whose settings are those of a whole process, and prints what differs.
"""

import json
import os
import subprocess
import sys
import threading
from itertools import pairwise, product

import pytest
import torch

from rl_kernels.core.testing import Draw
from rl_kernels.det_gemm import det_gemm, det_gemm_dw
from rl_kernels.det_gemm.op import OPERATOR
from rl_kernels.lab.check.compare import bits

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
gemm = pytest.importorskip("rl_kernels.core.triton_lib.gemm")
schedule = pytest.importorskip("rl_kernels.core.triton_lib.schedule")
if "triton" not in [backend.name for backend in OPERATOR.backends]:
    pytest.skip("det_gemm has no Triton backend", allow_module_level=True)
pytestmark = pytest.mark.gpu

HALVES = [torch.bfloat16, torch.float16]
TOKENS = 1024 + 5
WORKSPACE = {
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0",
    "CUBLASLT_WORKSPACE_SIZE": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
}
"""KiB and less: too little for partial sums of any shape compared here."""


def forced(function, *args, **options):
    return function(*args, backend="triton", **options)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_micro_batches_continue_the_chain(dtype):
    cuts = [[*range(0, 1024, 1024 // parts), TOKENS] for parts in (2, 4, 8)]
    cuts += [(0, 16, 48, 304, 1024, TOKENS), (0, 1008, TOKENS), (0, *range(16, TOKENS, 16), TOKENS)]
    for (k, n), ends in product(((1024, 768), (129, 100)), cuts):
        draw = Draw(dtype, "cuda", seed=2)
        a, dc = draw.normal(TOKENS, k), draw.normal(TOKENS, n)
        whole = forced(det_gemm_dw, a, dc, out_dtype=torch.float32)
        buffers = (torch.zeros(k, n), torch.zeros(n, k).t(), torch.zeros(k, 2 * n)[:, ::2])
        for buffer in (value.to("cuda") for value in buffers):
            for start, stop in pairwise(ends):
                forced(det_gemm_dw, a[start:stop], dc[start:stop], accumulate_into=buffer)
            assert bits(buffer, whole).passed, (k, n, buffer.stride(), ends)


@triton.jit
def chain(a, b, c, M, N, K, row_a, column_a, row_b, column_b):
    """The definition: one tile of 16 by 16, K in steps of 16, ascending, from zero."""
    rows = tl.program_id(0) * 16 + tl.arange(0, 16)
    columns = tl.program_id(1) * 16 + tl.arange(0, 16)
    total = tl.zeros((16, 16), tl.float32)
    for start in range(0, K, 16):
        inner = start + tl.arange(0, 16)
        x_here = (rows[:, None] < M) & (inner[None, :] < K)
        y_here = (inner[:, None] < K) & (columns[None, :] < N)
        x = tl.load(a + rows[:, None] * row_a + inner[None, :] * column_a, mask=x_here, other=0.0)
        y = tl.load(b + inner[:, None] * row_b + columns[None, :] * column_b, mask=y_here, other=0.0)
        total = tl.dot(x, y, total)
    here = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(c + rows[:, None] * N + columns[None, :], total, mask=here)


def chained(a, b):
    """Return ``a @ b`` by the plain chain, FP32."""
    (m, k), n = a.shape, b.shape[1]
    out = torch.full((m, n), torch.nan, device=a.device)
    chain[(triton.cdiv(m, 16), triton.cdiv(n, 16))](a, b, out, m, n, k, *a.stride(), *b.stride(), num_warps=1)
    return out


SHAPES = [(1, 129, 4104), (33, 129, 4104), (65, 200, 72), (7, 13, 37), (300, 517, 1001), (1000, 1280, 8192)]


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_products_match_the_plain_chain(dtype, m, n, k):
    draw = Draw(dtype, "cuda", seed=3)
    a, b = draw.normal(m, k), draw.normal(k, n)
    expected = chained(a, b)
    for left in (a, a.t().contiguous().t()):
        for right in (b, b.t().contiguous().t()):
            assert bits(forced(det_gemm, left, right, out_dtype=torch.float32), expected).passed
    assert bits(forced(det_gemm, a, b), expected.to(dtype)).passed
    upstream = draw.normal(m, n)
    leaves = a.requires_grad_(), b.requires_grad_()
    da, db = torch.autograd.grad(forced(det_gemm, *leaves), leaves, upstream)
    assert bits(da, chained(upstream, b.detach().t()).to(dtype)).passed
    assert bits(db, chained(a.detach().t(), upstream).to(dtype)).passed
    # Exponents far apart.
    a, b = ((draw.normal(*shape, dtype=torch.float64) ** 5).to(dtype) for shape in ((m, k), (k, n)))
    assert bits(forced(det_gemm, a, b, out_dtype=torch.float32), chained(a, b)).passed


def test_expanded_and_overlapping_rows_match_copies() -> None:
    draw = Draw(torch.bfloat16, "cuda", seed=9)
    b = draw.normal(256, 128)
    for a in (draw.normal(1, 256).expand(300, 256), draw.normal(4096).unfold(0, 256, 8)):
        assert bits(forced(det_gemm, a, b), forced(det_gemm, a.clone(), b)).passed
        upstream = draw.normal(1, 128).expand(len(a), 128)
        found = [forced(det_gemm_dw, a, value) for value in (upstream, upstream.clone())]
        assert bits(*found).passed


def test_product_in_a_thread_without_a_context() -> None:
    draw = Draw(torch.bfloat16, "cuda", seed=8)
    a, b = draw.normal(64, 64), draw.normal(64, 64)
    expected, found = forced(det_gemm, a, b), torch.empty(64, 64, device="cuda", dtype=torch.bfloat16)
    # No tensor is made in it, so nothing but the product can give the thread a context.
    thread = threading.Thread(target=lambda: gemm.Product(a, b, found)(a, b, found))
    thread.start()
    thread.join()
    assert bits(found, expected).passed


def test_fp32_schedules_change_no_bit():
    draw = Draw(torch.float32, "cuda", seed=6)
    a, b = ((draw.normal(*shape, dtype=torch.float64) ** 5).float() for shape in ((300, 1001), (1001, 130)))
    schedules = [schedule.ANYWHERE[torch.float32], schedule.FP32_SMALL, schedule.FP32_LARGE]
    found = []
    for cut in (*schedules, *(cut for _, cut in schedule.FP32)):
        for left in (a, a.t().contiguous().t()):
            for right in (b, b.t().contiguous().t()):
                found.append(torch.empty(300, 130, device="cuda"))
                gemm.Product(left, right, found[-1], schedule=cut)(left, right, found[-1])
    assert all(bits(each, found[0]).passed for each in found[1:])


def test_fp32_products_use_ieee_arithmetic():
    draw = Draw(torch.float32, "cuda", seed=5)
    x, y = draw.normal(100, 1), draw.normal(1, 70)
    assert bits(forced(det_gemm, x, y), (x.double() @ y.double()).float()).passed
    a, b = draw.normal(100, 4104), draw.normal(4104, 129)
    error = (forced(det_gemm, a, b).double() - a.double() @ b.double()).abs()
    # TF32 would be off by twenty times as much.
    assert bool((error <= 1e-6 * (a.double().abs() @ b.double().abs())).all())


def test_bits_match_cublaslt_without_split_k():
    if not hasattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction_split_k"):
        pytest.skip("this torch cannot forbid split-K")
    command = [sys.executable, __file__]
    done = subprocess.run(command, env={**os.environ, **WORKSPACE}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["compared"] == 60
    assert found["differ"] == []


def compare_with_cublaslt():
    """Return how many products were compared, and which differ: output, dA and dW at aligned shapes."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)
    results = {}
    for dtype in HALVES:
        for n, k in ((4096, 4096), (1280, 8192)):
            draw = Draw(dtype, "cuda", seed=6)
            whole = draw.normal(4096, k), draw.normal(4096, n)
            weight = draw.normal(n, k, scale=k**-0.5)
            for m in (64, 128, 256, 1024, 4096):
                x, dc = (value[:m] for value in whole)
                pairs = {"output": (x, weight.t()), "dA": (dc, weight), "dW": (dc.t(), x)}
                for name, (a, b) in pairs.items():
                    results[f"{name} {dtype} {m}x{n}x{k}"] = bits(forced(det_gemm, a, b), a @ b)
    return {
        "compared": len(results),
        "differ": [f"{name}: {found.message}" for name, found in results.items() if not found.passed],
    }


if __name__ == "__main__":
    print(json.dumps(compare_with_cublaslt()))
