"""The canary of det_gemm: its digest depends on the order of sums, and it runs in the first eager call."""

import pytest
import torch

from rl_kernels.core import CanaryMismatch
from rl_kernels.core import canary as canaries
from rl_kernels.det_gemm import DetLinear, canary, det_gemm

CPU = torch.device("cpu")


def test_digest_depends_on_the_order_of_the_sum(monkeypatch):
    """What the canary is for: the same terms in another order, or with the digits of TF32, have another digest."""
    found = set()
    for change in (lambda x: x, lambda x: x.flip(-1)):

        def product(a, b, out_dtype, backend, change=change):
            total = a.new_zeros(a.shape[0], b.shape[1], dtype=torch.float32)
            left, right = change(a).float(), change(b.t()).float()
            for k in range(0, a.shape[1], 16):
                total = total + (left[:, None, k : k + 16] * right[None, :, k : k + 16]).sum(-1)
            return total

        monkeypatch.setattr(canary, "det_gemm", product)
        found |= {canaries.digest(canary.results(dtype, CPU, "native")) for dtype in canaries.BITS}
    assert len(found) == 6


def test_canary_runs_after_a_compiled_call(monkeypatch):
    monkeypatch.setattr(canaries, "records_of", lambda canary: {"cpu": {"native": {"fp32": {"forward": "0" * 64}}}})
    monkeypatch.setattr(canaries, "_passed", set())
    torch.compiler.reset()
    layer, x = DetLinear(3, 2), torch.ones(2, 3)
    torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    for run in (lambda: layer(x), lambda: det_gemm(x, x.t())):
        with pytest.raises(CanaryMismatch):
            run()
