"""Conformance tests of every backend of gated_delta_rule that runs here."""

from rl_kernels.core.testing.planted import Bug, Mutants
from rl_kernels.lab.check.conformance import Conformance
from rl_kernels.gated_delta.op import OPERATOR

BUGS = (
    Bug("scale missing in the gradient", "scale * upstream", "upstream"),
    Bug("output not written", ".to(x.dtype).contiguous()", ".to(x.dtype).new_empty(x.shape)"),
    Bug("gradient depends on rows", "upstream.contiguous().clone()", "upstream * (1 + 2e-7 * (len(upstream) % 2))"),
)


class TestConformance(Conformance):
    operator = OPERATOR
    planted = (Mutants("native", ("rl_kernels.gated_delta.backends.native",), BUGS),)
