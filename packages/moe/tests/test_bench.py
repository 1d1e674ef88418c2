"""The benchmark of experts on tiny shapes."""

import torch

from rl_kernels.core.testing import Draw
from rl_kernels.lab.bench.conformance import BenchConformance
from rl_kernels.lab.bench.definition import Shape
from rl_kernels.moe import experts
from rl_kernels.moe.op import OPERATOR
from rl_kernels.moe.spec.bench import eager
from rl_kernels.moe.spec.cases import SPEC


class TestBench(BenchConformance):
    operator = OPERATOR
    tiny = (Shape((7, 16, 8, 4, 2)), Shape((1, 16, 8, 4, 2)))
    peers = ("eager",)


def test_eager_is_the_operator():
    call = SPEC.inputs(SPEC.case("plain"), Draw(torch.float32))
    torch.testing.assert_close(eager(**call), experts(**call))
