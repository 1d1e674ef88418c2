"""Conformance tests of every backend of experts that runs here."""

from rl_kernels.core.testing.planted import Bug, Mutants
from rl_kernels.lab.check.conformance import Conformance
from rl_kernels.moe.op import OPERATOR

NATIVE = (
    Bug("last route of an expert left out", "bounds[expert + 1])", "bounds[expert + 1] - 1)"),
    Bug("shared left out", "total + shared.float()", "total"),
    Bug("bias left out of the weights' gradient", "dot if bias is None else", "dot if True else"),
    Bug("output depends on other tokens", "return z\n", "return z * (1 + 2e-3 * (len(hidden) % 2))\n"),
)
TRITON = (
    Bug("last route of an expert left out", "first + counts, mask", "first + counts - 1, mask"),
    Bug("up is read in gate's place", "row + more, begin + k", "row, begin + k"),
    Bug("an unknown id without NaN", 'tl.where(expert == E, total, float("nan"))', "total"),
    Bug("weight left out of the gradient", "activated_backward(weight * dh", "activated_backward(dh"),
)
MODULES = ("order", "rows", "products", "sorting", "launches", "grouped")
TRITON_MODULES = tuple(f"rl_kernels.moe.triton_lib.{name}" for name in MODULES)
KERNELS = (*TRITON_MODULES, "rl_kernels.moe.backends.triton.backend")


class TestConformance(Conformance):
    operator = OPERATOR
    planted = (Mutants("native", ("rl_kernels.moe.backends.native",), NATIVE), Mutants("triton", KERNELS, TRITON))
