"""Every backend of linear_logp that runs here, against the rules of all operators."""

from __future__ import annotations

from rl_kernels.core.testing import Case
from rl_kernels.core.testing.planted import Bug, Mutants
from rl_kernels.lab.check.conformance import Conformance
from rl_kernels.linear_logp.op import OPERATOR

SHARED = ("vocabulary", "inputs", "backward")
NATIVE = (
    *(f"rl_kernels.core.rowwise.{name}" for name in ("operands", "sums", "ids", "softmax", "logp_gradient")),
    *(f"rl_kernels.linear_logp.{name}" for name in (*SHARED, "backends.native")),
)
PLANTED = (
    Mutants(
        "native",
        NATIVE,
        (
            Bug(
                "logits rounded to BF16",
                "(block.hidden, block.weight[columns].t(), out=out)",
                "(block.hidden, block.weight[columns].t(), out=out)\n    x.copy_(x.bfloat16())",
            ),
            Bug("cap not differentiated", "block.cap is not None", "False"),
            Bug("mask missing in backward", "target_ids == block.ignore_index", "target_ids < -block.vocab"),
        ),
        ("softcap-small", "pad-token"),
    ),
    Mutants(
        "native",
        NATIVE,
        (
            Bug(
                "units follow the rows",
                "(block.weight.shape[0], UNIT",
                "(block.weight.shape[0], UNIT if block.hidden.shape[0] > 4 else 2 * UNIT",
            ),
        ),
        ("odd",),
    ),
    Mutants(
        "native",
        NATIVE,
        (Bug("dW does not continue its buffer", "not begins or (main_grad", "(main_grad"),),
        ("kept",),
    ),
    Mutants(
        "triton",
        (
            "rl_kernels.core.triton_lib.softcap",
            *(f"rl_kernels.linear_logp.{name}" for name in (*SHARED, "backends.triton.kernels")),
            *(f"rl_kernels.linear_logp.backends.triton.{name}" for name in ("backward", "backend")),
        ),
        (
            Bug("columns beyond the vocabulary counted", "(columns < V)", "(columns < V + 1)"),
            Bug("selected logit of the row before", "lanes[None, :]", "lanes[None, :] + 1"),
            Bug("block states after the first lost", "+ UNIT // BLOCK", "+ 1"),
            Bug(
                "ignored rows have a gradient",
                "here & (id != ignore_index) if HAS_IGNORED else here\n        inv",
                "here\n        inv",
            ),
            Bug(
                "last column of dz not written",
                "here[:, None] & (columns < width)[None, :])",
                "here[:, None] & (columns < width - 1)[None, :])",
            ),
            Bug("cap applied twice", "(x, cap, rate) if", "(softcap.capped(x, cap, rate), cap, rate) if"),
        ),
        ("bias", "temperature-per-token", "odd", "pad-token", "blocks", "softcap-small"),
    ),
)


class TestConformance(Conformance):
    operator = OPERATOR
    planted = PLANTED
    smoke = ("bias", "plain")
    large = (
        Case("few-rows", {"batch": 1, "seq": 129, "hidden": 2048, "vocab": 32768}, {"return_stats": True}),
        Case(
            "many-rows", {"batch": 4, "seq": 512, "hidden": 1024, "vocab": 50257}, {"return_stats": True, "bias": True}
        ),
    )
    far = tuple(
        Case(
            f"of-{rows}",
            {"batch": 1, "seq": rows, "hidden": size, "vocab": vocab},
            {"return_stats": True, "bias": True, "temperature": "tensor"},
        )
        for rows, size, vocab in ((2, 8, 2), (3, 24, 40))
    )
