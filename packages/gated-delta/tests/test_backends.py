"""Conformance tests of every backend of gated_delta_rule that runs here."""

from rl_kernels.core.testing.planted import Bug, Mutants
from rl_kernels.gated_delta.op import OPERATOR
from rl_kernels.lab.check.conformance import Conformance

HERE = "rl_kernels.gated_delta"
NATIVE = (
    Bug("a row sees itself", "row < row[:, None], between", "row <= row[:, None], between"),
    Bug("decay left out of the state", "last.exp()[..., None] * rows.state)", "rows.state)"),
    Bug("the inverse ends early", "range(BLOCK - 1)", "range(BLOCK - 2)"),
    Bug("padding is read", "begin + row - ahead, batch * count)", "begin + row - ahead, batch * count - 1)"),
    Bug("gradient of the decay at the end left out", "ddecays[..., -1] += at_last", "ddecays[..., -1] += 0"),
    Bug("gradient of keys through the state left out", "multiply(faded, dstate.mT, dk)", "dk"),
)
NATIVE_MODULES = tuple(f"{HERE}.{name}" for name in ("places", "chunks", "gradients", "backends.native"))


class TestConformance(Conformance):
    operator = OPERATOR
    planted = (Mutants("native", NATIVE_MODULES, NATIVE),)
    smoke = ("plain", "packed", "initial")
