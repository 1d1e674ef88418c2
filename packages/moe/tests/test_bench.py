"""The benchmark of experts on tiny shapes."""

from rl_kernels.lab.bench.conformance import BenchConformance
from rl_kernels.lab.bench.definition import Shape
from rl_kernels.moe.op import OPERATOR


class TestBench(BenchConformance):
    operator = OPERATOR
    tiny = (Shape((7, 16)), Shape((1, 9)))
