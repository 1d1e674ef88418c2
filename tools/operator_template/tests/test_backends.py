"""Conformance tests of every backend of scaled_add that runs here."""

from rl_kernels.lab.check.conformance import Conformance
from rl_kernels.scaled_add.op import OPERATOR


class TestConformance(Conformance):
    operator = OPERATOR
