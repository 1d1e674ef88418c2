"""The operands of the Triton kernels, recorded without Triton: whatever their layout, rows that 16 bytes divide."""

import torch

from rl_kernels.core.testing import with_layout
from rl_kernels.core.testing.host_tests import TritonHost
from rl_kernels.core.testing.planted import Bug


class TestLaunches(TritonHost):
    modules = ("rl_kernels.norm.backends.triton.backend",)
    bugs = (Bug("alignment not looked at", "() and x.data_ptr() % ALIGNED == 0", "()"),)
    calls = ("row", "column", "apart", "odd")

    def check(self, call, backend, recorder):
        x, residual, grad = (with_layout(torch.randn(33, 96), call) for _ in range(3))
        weight, form = torch.rand(97)[1:], (False, 0.5)
        *_, stats = backend.forward_sum(x, residual, weight, None, 1e-5, *form, True)
        backend.backward(grad, residual, x, weight, stats, *form, True, False)
        backend.forward_gated(x, residual, weight, None, 1e-5, *form, True)
        backend.backward_gated(residual, grad, None, x, weight, stats, *form, True, False)
        backend.backward_into(grad, None, x, weight, stats, *form, torch.ones(96, 3)[:, 1], False)
        for launch in recorder.launches:
            for name, value in launch.arguments.items():
                if isinstance(value, torch.Tensor) and name != "OUT":
                    assert value.is_contiguous(), name
                    assert value.data_ptr() % 16 == 0, name
