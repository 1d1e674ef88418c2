"""Conformance tests of every backend of experts that runs here."""

from rl_kernels.core.testing.planted import Bug, Mutants
from rl_kernels.lab.check.conformance import Conformance
from rl_kernels.moe.op import OPERATOR

NATIVE = (Bug("routes of an expert in another order", "stable=True", "stable=False, descending=True"),)


class TestConformance(Conformance):
    operator = OPERATOR
    planted = ()
