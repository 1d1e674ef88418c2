"""The benchmark of det_gemm on tiny shapes: the three products, their layouts, and the settings of the peers."""

from itertools import product

import pytest
import torch

from rl_kernels.core.testing import Draw
from rl_kernels.det_gemm.op import OPERATOR
from rl_kernels.det_gemm.spec.bench import BENCH
from rl_kernels.det_gemm.spec.cases import SPEC
from rl_kernels.lab.bench.conformance import BenchConformance
from rl_kernels.lab.bench.definition import Shape
from rl_kernels.lab.bench.peers import no_split_k, tf32


class TestBench(BenchConformance):
    operator = OPERATOR
    tiny = (Shape((7, 16, 33)), Shape((1, 9, 130)))
    peers = ("eager", "batch-invariant")
    modules = {"batch_invariant_ops": {"matmul_persistent": torch.matmul}}


def test_benchmark_times_the_products_of_a_linear_layer():
    """Forward NT, dA NN, dW TN, as autograd takes them of ``F.linear``."""
    m, n, k = 6, 5, 4
    forward, da, dw = (
        SPEC.inputs(each.case, Draw(torch.float32)) for each in BENCH.passes(Shape((m, n, k)), 4).values()
    )
    assert (forward["a"].shape, da["a"].shape, da["b"].shape) == ((m, k), (m, n), (n, k))
    assert (dw["a"].shape, dw["dc"].shape) == ((m, k), (m, n))
    assert forward["b"].t().is_contiguous()
    assert da["b"].is_contiguous()


def test_settings_without_split_k_are_restored(monkeypatch):
    matmul, library = torch.backends.cuda.matmul, ["cublas"]
    ends = product(("bf16", "fp16"), ("", "_split_k"))
    names = [f"allow_{dtype}_reduced_precision_reduction{end}" for dtype, end in ends]
    if not hasattr(matmul, names[1]):
        pytest.skip("this PyTorch cannot forbid split-K")

    def prefer(name=None):
        library.extend([name] if name else [])
        return library[-1]

    def allowed():
        return [getattr(matmul, name) for name in names]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", prefer)
    before = allowed()
    assert any(before)
    with no_split_k():
        assert not any(allowed())
        assert prefer() == "cublaslt"
    assert (allowed(), prefer()) == (before, "cublas")


def test_only_the_tf32_peer_uses_tf32():
    with tf32():
        assert torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32
