"""Every backend of fused_logp that runs here, held to the rules of all operators."""

from rl_kernels.core.check.conformance import Conformance
from rl_kernels.fused_logp.op import OPERATOR


class TestConformance(Conformance):
    operator = OPERATOR
