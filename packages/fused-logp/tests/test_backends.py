"""Every backend of fused_logp that runs here, held to the rules of all operators."""

from rl_kernels.core.testing import Case
from rl_kernels.fused_logp.op import OPERATOR
from rl_kernels.lab.check.conformance import Conformance


class TestConformance(Conformance):
    operator = OPERATOR
    large = (
        Case("few-rows", {"batch": 2, "seq": 512, "vocab": 50257}, {"return_stats": True}),
        Case("many-rows", {"batch": 8, "seq": 512, "vocab": 32768}, {"return_stats": True}),
    )
