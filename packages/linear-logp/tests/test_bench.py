"""The benchmark of linear_logp on tiny shapes, with stand-ins of the peers' signatures."""

import torch.nn.functional as F

from rl_kernels.lab.bench.conformance import BenchConformance
from rl_kernels.lab.bench.definition import Shape
from rl_kernels.linear_logp.op import OPERATOR
from rl_kernels.linear_logp.spec.bench import BENCH, MASKED


def linear_cross_entropy(x, weight, target, bias=None, *, ignore_index=-100, reduction="mean", filter_eps="high"):
    assert (x.ndim, target.ndim) == (2, 1)
    assert reduction == "none" or filter_eps == "high"
    logits = F.linear(x, weight).float()
    return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)


class TestBench(BenchConformance):
    operator = OPERATOR
    tiny = (Shape((7, 16, 33)), Shape((1, 9, 130)), Shape((9, 8, 65), MASKED, "ignored"))
    peers = ("eager", "gemm", "cce", "cce-unfiltered", "liger", "quack")
    modules = {
        "cut_cross_entropy": {"linear_cross_entropy": linear_cross_entropy},
        "liger_kernel.transformers.functional": {"liger_fused_linear_cross_entropy": linear_cross_entropy},
        "quack.linear_cross_entropy": {"chunked_linear_cross_entropy": linear_cross_entropy},
    }


def test_flops_of_both_passes():
    forward, both = BENCH.passes(Shape((4096, 2048, 131072)), 2).values()
    assert forward.work.flops == 2 * 4096 * 2048 * 131072
    assert both.work.flops == 8 * 4096 * 2048 * 131072
