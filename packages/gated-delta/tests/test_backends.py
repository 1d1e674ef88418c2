"""Conformance tests of every backend of gated_delta_rule that runs here."""

from rl_kernels.core.testing.planted import Bug, Mutants
from rl_kernels.gated_delta.op import OPERATOR
from rl_kernels.lab.check.conformance import Conformance

HERE = "rl_kernels.gated_delta"
NATIVE = (
    Bug("residuals see an undecayed state", "chunks.decays[part].exp()[..., None] * keys_state", "keys_state"),
    Bug("decay left out of the state", "decays[part][..., -1:].exp()[..., None] * state", "state"),
    Bug("the inverse ends early", "range(CHUNK - 1):\n        result", "range(CHUNK - 2):\n        result"),
    Bug("padding is read", "begin + row - ahead, batch * count)", "begin + row - ahead, batch * count - 1)"),
    Bug("gradient of the decay at the end left out", "ddecays[..., -1] += row_sum(leaving) +", "ddecays[..., -1] +="),
    Bug("gradient of keys through the state left out", "multiply(chunks.faded, dweights, dk)", "dk"),
)
TRITON = (
    Bug(
        "beta left out of the inverse",
        "tl.reshape(times(below, beta[:, None])",
        "tl.reshape((below + 0.0 * beta[:, None])",
    ),
    Bug("an earlier block left out", "x3 = dot(block_of(BELOW, 3, 2), u2, x3)", "x3 = x3 + 0.0 * u2"),
    Bug("decay left out of the state", "state = times(state, tl.exp(last))", "state = state + 0.0 * last"),
    Bug("a later block left out of gradients", "dot(tl.trans(block_of(below, 1, 0)), dv1, du)", "du + 0.0 * dv1"),
    Bug("gradient of the decay at the end left out", "CHUNK - 1, dsums + at_last, dsums)", "CHUNK, at_last, dsums)"),
    Bug(
        "gradient of keys through the state left out",
        "total = dot(faded, tl.trans(part_at(DSTATES, item, c, D, DV)), total)",
        "total = total + 0.0",
    ),
)
NATIVE_MODULES = tuple(f"{HERE}.{name}" for name in ("places", "chunks", "gradients", "backends.native"))
TRITON_NAMES = ("tiles", "prepare", "scan", "decode", "reverse", "differentiate", "plan", "backward", "backend")
TRITON_MODULES = tuple(f"{HERE}.backends.triton.{name}" for name in TRITON_NAMES)


class TestConformance(Conformance):
    operator = OPERATOR
    planted = (
        Mutants("native", NATIVE_MODULES, NATIVE, ("chunks", "left")),
        Mutants("triton", TRITON_MODULES, TRITON, ("chunks",)),
    )
    smoke = ("plain", "packed", "initial")
    interpreted = {"batch": 2, "tokens": 66, "group": 1, "key_heads": 1}
