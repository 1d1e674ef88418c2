"""The benchmark of gated_delta_rule on tiny shapes."""

from rl_kernels.lab.bench.conformance import BenchConformance
from rl_kernels.lab.bench.definition import Shape
from rl_kernels.gated_delta.op import OPERATOR


class TestBench(BenchConformance):
    operator = OPERATOR
    tiny = (Shape((7, 16)), Shape((1, 9)))
