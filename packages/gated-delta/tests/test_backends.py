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
    Bug("beta left out of the inverse", "times(products, -beta[:, None])", "-products + 0.0 * beta[:, None]"),
    Bug(
        "a block of rows left out of the inverse",
        "x2 = add_rows(x2, x0, system + 2 * STEP)",
        "x2 = x2 + 0.0 * x0",
    ),
    Bug(
        "decay left out of the state",
        "scaled(state, tl.exp(tl.load(sums_at + CHUNK - 1)))",
        "state + 0.0 * tl.load(sums_at)",
    ),
    Bug(
        "gradient of the state through residuals left out",
        "dstate = dot(tl.trans(whole_tile(UNIT_K, key_item, CHUNK, D)), dkeys, dstate)",
        "dstate = dstate + 0.0",
    ),
    Bug("gradient of the decay at the end left out", "CHUNK - 1, moved + at_last, moved)", "CHUNK, at_last, moved)"),
    Bug("gradient of keys through the next state left out", "total += dk\n        last =", "last ="),
)
NATIVE_MODULES = tuple(f"{HERE}.{name}" for name in ("places", "chunks", "gradients", "backends.native"))
SHARED = tuple(f"{HERE}.triton_lib.{name}" for name in ("tiles", "differentiate", "backward"))
TRITON_NAMES = ("prepare", "scan", "decode", "reverse", "plan", "backward", "backend")
TRITON_MODULES = (*SHARED, *(f"{HERE}.backends.triton.{name}" for name in TRITON_NAMES))


class TestConformance(Conformance):
    operator = OPERATOR
    planted = (
        Mutants("native", NATIVE_MODULES, NATIVE, ("chunks", "left")),
        Mutants("triton", TRITON_MODULES, TRITON, ("chunks",)),
    )
    smoke = ("plain", "packed", "initial")
    interpreted = {"batch": 2, "tokens": 66, "group": 1, "key_heads": 1}
