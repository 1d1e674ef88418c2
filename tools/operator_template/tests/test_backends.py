"""Every backend of scaled_add that runs here, held to the rules of all operators."""

from rl_kernels.lab.check.conformance import Conformance
from rl_kernels.scaled_add.op import OPERATOR


class TestConformance(Conformance):
    operator = OPERATOR
