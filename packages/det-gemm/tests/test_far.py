"""Operands whose elements lie far apart in memory: an offset of 32 bits does not reach them."""

import pytest
import torch

from rl_kernels.core.operator import Call
from rl_kernels.core.testing.storage import lying
from rl_kernels.det_gemm import det_gemm, det_gemm_dw
from rl_kernels.det_gemm.op import OPERATOR

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CALL = Call.of(torch.zeros(1, device=DEVICE), N=16, K=40)
BACKENDS = [backend.name for backend in OPERATOR.backends if backend.why_not(CALL) is None]
LAYOUTS = {
    "far columns": lambda x: lying(x, "far"),
    "far rows": lambda x: lying(x.T, "far").T,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operand", ["left", "right"])
@pytest.mark.parametrize("function", [det_gemm, det_gemm_dw])
def test_elements_beyond_an_offset_of_32_bits(function, operand, layout, backend):
    torch.manual_seed(0)
    left = torch.randn(24, 40, device=DEVICE).half()
    right = torch.randn(*((40, 16) if function is det_gemm else (24, 16)), device=DEVICE).half()
    expected = function(left, right, backend=backend)
    moved = LAYOUTS[layout](left if operand == "left" else right)
    found = function(*((moved, right) if operand == "left" else (left, moved)), backend=backend)
    assert torch.equal(found, expected)
