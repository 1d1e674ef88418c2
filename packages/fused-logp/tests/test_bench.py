"""The benchmark of fused_logp on tiny shapes, with stand-ins of the peers' signatures."""

import torch.nn.functional as F

from rl_kernels.fused_logp.op import OPERATOR
from rl_kernels.fused_logp.spec.bench import BENCH, MASKED
from rl_kernels.lab.bench.conformance import BenchConformance
from rl_kernels.lab.bench.definition import Shape


def cross_entropy(x, target, *, ignore_index=-100, reduction="mean"):
    assert x.ndim == 2
    return F.cross_entropy(x.float(), target, ignore_index=ignore_index, reduction=reduction)


class TestBench(BenchConformance):
    operator = OPERATOR
    tiny = (Shape((7, 33)), Shape((1, 130)), Shape((9, 65), MASKED, "ignored"))
    peers = ("eager", "liger", "quack")
    modules = {
        "liger_kernel.transformers.functional": {"liger_cross_entropy": cross_entropy},
        "quack.cross_entropy": {"cross_entropy": cross_entropy},
    }


def test_bytes_of_both_passes():
    forward, both = BENCH.passes(Shape((8192, 32768)), 2).values()
    assert (forward.work.bytes, both.work.bytes) == (8192 * 32768 * 2, 3 * 8192 * 32768 * 2)
