"""The benchmark of rms_norm on tiny shapes, with stand-ins of the peers' signatures."""

import torch
import torch.nn.functional as F

from rl_kernels.lab.bench.conformance import BenchConformance
from rl_kernels.lab.bench.definition import Shape
from rl_kernels.norm.op import OPERATOR
from rl_kernels.norm.spec.bench import BENCH
from rl_kernels.norm.spec.cases import ADDED, GATED


def liger_rms_norm(x, weight, eps, offset=0.0, casting_mode="llama", in_place=True):
    assert (offset, casting_mode, in_place) == (0.0, "llama", False)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def liger_fused_add_rms_norm(x, residual, weight, eps, offset=0.0, casting_mode="llama", in_place=True):
    return liger_rms_norm(x + residual, weight, eps, offset, casting_mode, in_place), x + residual


class TestBench(BenchConformance):
    operator = OPERATOR
    tiny = (Shape((7, 16)), Shape((17, 33)), Shape((5, 24), ADDED))
    peers = ("eager", "liger")
    modules = {
        "liger_kernel.transformers.functional": {
            "liger_rms_norm": liger_rms_norm,
            "liger_fused_add_rms_norm": liger_fused_add_rms_norm,
        },
    }


class TestGatedBench(BenchConformance):
    operator = OPERATOR
    tiny = (Shape((6, 32), GATED),)


def test_bytes_are_counted_once():
    size = 64 * 128 * 2
    forward, both = BENCH.passes(Shape((64, 128)), 2).values()
    assert (forward.work.bytes, both.work.bytes) == (2 * size, 5 * size)
    forward, both = BENCH.passes(Shape((64, 128), ADDED), 2).values()
    assert (forward.work.bytes, both.work.bytes) == (4 * size, 8 * size)
    forward, both = BENCH.passes(Shape((64, 128), GATED), 2).values()
    assert (forward.work.bytes, both.work.bytes) == (3 * size, 8 * size)


def test_eager_is_llamas_module():
    x, weight = torch.randn(3, 8).bfloat16(), torch.rand(8).bfloat16()
    row = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(BENCH.peers["eager"].make()(x, weight), weight * row.bfloat16())
