"""Every backend of det_attention that runs here, held to the rules of all operators."""

import pytest
import torch

from rl_kernels.attention.op import OPERATOR
from rl_kernels.attention.spec.cases import SPEC
from rl_kernels.core.testing import Case, Draw
from rl_kernels.lab.check.conformance import Conformance, cell
from rl_kernels.lab.check.relations.integration import _no_sync


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


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("packed", "max_seqlen_q and max_seqlen_k"),
        ("packed-pages", "max_seqlen_q"),
        ("packed-keys", ""),
        ("plain", ""),
    ],
)
def test_the_checker_knows_which_calls_wait_for_the_device(name, asked):
    case = SPEC.case(name)
    reason = SPEC.waits(SPEC.inputs(case, Draw(torch.float32)))
    assert reason == (f"without {asked} the device is asked" if asked else None)
    if asked:
        (found,) = _no_sync(cell(OPERATOR, case))
        assert found.reason == f"no host sync: {reason}"
