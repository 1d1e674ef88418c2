"""Every backend of det_gemm that runs here, held to the rules of all operators; and what is special to det_gemm."""

from rl_kernels.core.check.conformance import Conformance
from rl_kernels.det_gemm.op import OPERATOR


class TestConformance(Conformance):
    operator = OPERATOR
