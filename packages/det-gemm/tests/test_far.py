"""Operands whose elements lie far apart in memory: an offset of 32 bits does not reach them."""

import pytest
import torch

from rl_kernels.core.operator import Call
from rl_kernels.core.testing import far
from rl_kernels.det_gemm import det_gemm_dw, det_linear
from rl_kernels.det_gemm.op import OPERATOR

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] * (DEVICE == "cuda")
SIZES = {"a stride": (2, 2, 2), "an index times a stride": (24, 40, 16)}
CASES = [
    pytest.param(backend.name, *sizes, id=f"{backend.name}-{name}")
    for backend in OPERATOR.backends
    for name, sizes in SIZES.items()
    if backend.why_not(Call.of(torch.zeros(1, device=DEVICE).half(), N=sizes[2], K=sizes[1])) is None
]
NAMES = ("x", "weight", "bias", "upstream", "main_grad")


def results(backend, x, weight, bias, upstream, main_grad):
    """Return the product, the gradients of its operands, and the gradient of the weight by itself and in a buffer."""
    leaves = [value.detach().requires_grad_() for value in (x, weight, bias)]
    out = det_linear(*leaves, backend=backend)
    dweight = det_gemm_dw(upstream, x, backend=backend)
    total = det_gemm_dw(upstream, x, accumulate_into=main_grad, backend=backend)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream), dweight, total.clone()]


@pytest.mark.parametrize(("backend", "m", "k", "n"), CASES)
def test_elements_beyond_an_offset_of_32_bits(backend, m, k, n):
    torch.manual_seed(0)
    operands = [torch.randn(*shape, device=DEVICE).half() for shape in ((m, k), (n, k), (n,), (m, n))]
    operands.append(torch.ones(n, k, device=DEVICE))
    expected = results(backend, *operands)
    operands[-1] = torch.ones(n, k, device=DEVICE)
    for place, name in enumerate(NAMES):
        for dim in range(operands[place].ndim):
            moved = [far(x, dim) if at == place else x.clone() for at, x in enumerate(operands)]
            assert all(map(torch.equal, results(backend, *moved), expected)), f"{name}, dim {dim}"
