"""Every backend of det_attention that runs here, held to the rules of all operators."""

from rl_kernels.attention.op import OPERATOR
from rl_kernels.core.testing import Case
from rl_kernels.lab.check.conformance import Conformance


def sizes(*values):
    return dict(zip(("batch", "queries", "keys", "kv_heads", "group", "head"), values, strict=True))


class TestConformance(Conformance):
    operator = OPERATOR
    large = (
        Case("prompt", sizes(2, 2048, 2048, 8, 4, 128), {"return_lse": True}),
        Case("decode", sizes(16, 1, 9000, 8, 4, 128), {"layout": "cache"}, grad=False),
        Case("packed", sizes(9, 1100, 1100, 4, 7, 64), {"layout": "packed", "return_lse": True}),
        Case("left", sizes(5, 1500, 1500, 2, 4, 128), {"layout": "left", "return_lse": True}),
    )
