"""The benchmark of gated_delta_rule on tiny shapes."""

from rl_kernels.gated_delta.op import OPERATOR
from rl_kernels.lab.bench.conformance import BenchConformance
from rl_kernels.lab.bench.definition import Shape


class TestBench(BenchConformance):
    operator = OPERATOR
    tiny = (Shape((2, 7, 1, 2, 16, 16)), Shape((1, 70, 1, 1, 16, 32)))
    peers = ("recurrence",)
