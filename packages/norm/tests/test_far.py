"""Arguments whose elements lie far apart in memory: an offset of 32 bits does not reach them."""

import pytest
import torch

from rl_kernels.core.testing import far
from rl_kernels.norm import rms_norm
from rl_kernels.norm.op import OPERATOR, describe

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] * (DEVICE == "cuda")
CALL = describe(torch.zeros(1, 8, device=DEVICE))
BACKENDS = [backend.name for backend in OPERATOR.backends if backend.why_not(CALL) is None]
NAMES = ("x", "residual", "upstream", "weight", "main_grad")


def results(backend, x, residual, upstream, weight, main_grad):
    """Return the norm, the sum, the gradient of x, and that of the weight in a buffer."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    weight.main_grad = main_grad
    found = rms_norm(x, weight, residual=residual, backend=backend)
    found.output.backward(upstream)
    return [found.output.detach(), found.sum.detach(), x.grad, main_grad.clone()]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_elements_beyond_an_offset_of_32_bits(backend, count):
    torch.manual_seed(0)
    operands = [*torch.randn(3, count, count, device=DEVICE).half(), torch.rand(count, device=DEVICE).half()]
    operands.append(torch.ones(count, device=DEVICE))
    expected = results(backend, *(x.clone() for x in operands))
    for place, name in enumerate(NAMES):
        for dim in range(operands[place].ndim):
            moved = [far(x, dim) if at == place else x.clone() for at, x in enumerate(operands)]
            assert all(map(torch.equal, results(backend, *moved), expected)), f"{name}, dim {dim}"
