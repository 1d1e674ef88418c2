"""Every backend of det_attention that runs here, held to the rules of all operators."""

import torch

from rl_kernels.attention.op import OPERATOR
from rl_kernels.attention.spec.cases import SPEC
from rl_kernels.core.testing import Case, Draw
from rl_kernels.core.testing.planted import Bug, Mutants
from rl_kernels.lab.check.conformance import Conformance, cell
from rl_kernels.lab.check.relations.integration import _no_sync


def sizes(*values):
    return dict(zip(("batch", "queries", "keys", "kv_heads", "group", "head"), values, strict=True))


HERE = "rl_kernels.attention"
TRITON = f"{HERE}.backends.triton"
PLANTED = (
    Mutants(
        "native",
        (
            *("rl_kernels.core.rowwise.operands", "rl_kernels.core.rowwise.sums", f"{HERE}.sinks"),
            *(f"{HERE}.backends.native.{name}" for name in ("places", "batches", "backend")),
        ),
        (
            Bug("blocks follow the length", "keys == BLOCK", "keys > 2 * BLOCK or keys == BLOCK"),
            Bug("a query sees one key too many", "shift + right", "shift + right + 1"),
            Bug("pages in the order of memory", "[b, key // size]", "[b].sort().values[key // size].clamp(0)"),
            Bug("delta left out", ".sub_(delta_rows).", "."),
        ),
        ("more-keys", "pages"),
    ),
    Mutants(
        "triton",
        (
            *(f"{TRITON}.{name}" for name in ("loads", "tiles", "forward", "backward", "dq", "dkdv", "boxes", "plan")),
            *(f"{HERE}.gpu", f"{TRITON}.backend"),
        ),
        (
            Bug(
                "accumulator not rescaled",
                "acc = product(acc, tl.broadcast_to(old_scale[:, None], acc.shape))\n    return",
                "return",
            ),
            Bug("mask one key too wide", "ahead <= right", "ahead <= right + 1"),
            Bug("keys that are gone are seen", "- left, gone", "- left, 0"),
            Bug("every page is the first", "(tl.int64)\n        valid", "(tl.int64) * 0\n        valid"),
            Bug("half of a row's sum left out", "sum(tl.reshape(x, [ROWS, 2, COL", "max(tl.reshape(x, [ROWS, 2, COL"),
            Bug("last state not merged", "(at < stop) &", "(at + SEGMENT < stop) &"),
            Bug("delta left out", "dweights - delta", "dweights"),
            Bug("rows behind the last query are read", "within(grad, whole, used * GROUP, ROWS)", "grad"),
        ),
        (
            *("sinks", "window", "left-padded", "dropped", "dropped-unseen", "block-edge", "pages"),
            *("large-pages", "packed", "softcap", "segments", "window-from-block-end", "right-padded"),
        ),
    ),
)


class TestConformance(Conformance):
    operator = OPERATOR
    planted = PLANTED
    smoke = ("plain", "packed", "softcap")
    large = (
        Case("prompt", sizes(2, 2048, 2048, 8, 4, 128), {"return_lse": True}),
        Case("decode", sizes(16, 1, 9000, 8, 4, 128), {"layout": "cache"}, grad=False),
        Case("packed", sizes(9, 1100, 1100, 4, 7, 64), {"layout": "packed", "return_lse": True}),
        Case("left", sizes(5, 1500, 1500, 2, 4, 128), {"layout": "left", "return_lse": True}),
    )


def test_the_checker_knows_which_calls_wait_for_the_device():
    asked = {"packed": "max_seqlen_q and max_seqlen_k", "packed-pages": "max_seqlen_q", "packed-keys": "", "plain": ""}
    for name, lengths in asked.items():
        case = SPEC.case(name)
        inputs = SPEC.inputs(case, Draw(torch.float32))
        assert SPEC.waits(inputs, "triton") == (f"without {lengths} the device is asked" if lengths else None)
        on_host = None if name == "plain" else "native reads lengths on the host"
        assert SPEC.waits(inputs, "native") == on_host
        if on_host:
            (found,) = _no_sync(cell(OPERATOR, case, backend="native"))
            assert found.reason == f"no host sync: {on_host}"
