"""Every backend of fused_logp that runs here, held to the rules of all operators."""

from rl_kernels.core.testing import Case
from rl_kernels.core.testing.planted import Bug, Mutants
from rl_kernels.fused_logp.op import OPERATOR
from rl_kernels.lab.check.conformance import Conformance

NATIVE = (
    *(f"rl_kernels.core.rowwise.{name}" for name in ("operands", "sums", "ids", "softmax", "logp_gradient")),
    "rl_kernels.fused_logp.backends.native",
)
PLANTED = (
    Mutants(
        "native",
        NATIVE,
        (
            Bug("temperature missing in backward", "return divide(dz, temperature)", "return dz"),
            Bug("mask missing in backward", "torch.nan, 0.0", "torch.nan, torch.nan"),
        ),
        ("temperature", "pad-token"),
    ),
    Mutants(
        "native",
        NATIVE,
        (
            Bug("maximum of all rows", "top = x.amax(-1)", "top = x.amax().expand(len(x))"),
            Bug(
                "gradient buffer kept between calls",
                "logits.new_zeros(logits.shape)",
                "globals().setdefault(str(logits.shape), logits.new_zeros(logits.shape))",
            ),
        ),
        ("masked-vocabulary",),
    ),
    Mutants(
        "triton",
        tuple(
            f"rl_kernels.fused_logp.{name}" for name in ("rows", "backends.triton.kernels", "backends.triton.backend")
        ),
        (
            Bug("mask of the last block off by one", "width, other", "width - 1, other"),
            Bug("last column has no gradient", "here = columns < V", "here = columns < V - 1"),
            Bug(
                "gradient of a row that is left out not written",
                "tl.store(target, tl.zeros((WIDTH,), tl.float32).to(dtype), mask=here)",
                "pass",
            ),
            Bug("id one past the vocabulary accepted, id 0 not", "(id >= 0) & (id < V)", "(id > 0) & (id <= V)"),
            Bug("ignored ids not skipped", "HAS_IGNORED:\n", "False:\n"),
        ),
        ("temperature-per-token", "pad-token", "indexed", "one-entry", "rising"),
    ),
)


class TestConformance(Conformance):
    operator = OPERATOR
    planted = PLANTED
    smoke = ("stats", "plain")
    interpreted = {"seq": 4}
    large = (
        Case("few-rows", {"batch": 2, "seq": 512, "vocab": 50257}, {"return_stats": True}),
        Case("many-rows", {"batch": 8, "seq": 512, "vocab": 32768}, {"return_stats": True}),
    )
    # Many long rows have a kernel of their own.
    far = tuple(
        Case(
            f"{rows}x{vocab}-{inplace}",
            {"batch": 1, "seq": rows, "vocab": vocab},
            {"return_stats": True, "temperature": "tensor", "inplace_backward": inplace},
            gpu=rows > 3,
        )
        for rows, vocab in ((2, 40), (3, 2), (3, 40), (2048, 16384))
        for inplace in (False, True)
    )
