"""The benchmark of causal_conv1d on tiny shapes."""

from rl_kernels.gated_delta.conv_op import OPERATOR
from rl_kernels.gated_delta.spec.conv_bench import BENCH
from rl_kernels.gated_delta.spec.conv_cases import STATE
from rl_kernels.lab.bench.conformance import BenchConformance
from rl_kernels.lab.bench.definition import FORWARD, Shape


class TestBench(BenchConformance):
    operator = OPERATOR
    tiny = (Shape((2, 9, 16)), Shape((3, 1, 8), STATE))
    peers = ("eager",)


def test_bytes_are_counted_once():
    forward, both = BENCH.passes(Shape((2, 5, 16)), 2).values()
    assert (forward.work.bytes, both.work.bytes) == (2 * 320 + 128, 5 * 320 + 3 * 128)
    assert BENCH.passes(Shape((3, 1, 16), STATE), 2)[FORWARD].work.bytes == 2 * 96 + 6 * 96 + 128
