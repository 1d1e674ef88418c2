"""Bugs in the order of sums, ties and bounds, planted in each backend: the tests of these promises fail."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from rl_kernels.core.testing import Case, Draw
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.moe import experts, reference
from rl_kernels.moe.spec.cases import SPEC
from rl_kernels.moe.spec.cases_dimensions import sizes

sys.path.insert(0, str(Path(__file__).parent))
import test_experts
import test_route

Test = Callable[[str], None]
routes_alone = partial(test_experts.test_an_output_is_the_sum_of_its_routes_alone, dtype=torch.float32)
chains: Test = test_experts.test_main_grad_continues_the_chain
ties = partial(test_route.test_equal_scores_are_ordered_by_id, scoring="softmax")


def definition(backend: str) -> None:
    """Compare with the definition; expert 1 of 4 has no tokens."""
    tensors = SPEC.inputs(Case("empty", sizes(40, 16, 12, 4, 2)), Draw(torch.float32, test_experts.DEVICE))
    tensors["ids"] = torch.where(tensors["ids"] == 1, 3, tensors["ids"])
    torch.testing.assert_close(experts(**tensors, backend=backend), reference.experts(**tensors), rtol=1e-4, atol=1e-4)


TRITON = "rl_kernels.moe.triton_lib"
MODULES = MappingProxyType(
    {
        "native": ("rl_kernels.moe.routes", "rl_kernels.moe.choice", "rl_kernels.moe.backends.native"),
        "triton": (
            *(f"{TRITON}.{name}" for name in ("choice", "order", "rows", "sorting", "routing", "launches", "grouped")),
            "rl_kernels.moe.backends.triton.backend",
        ),
    }
)
REVERSED = "len(keys) - 1 - torch.sort(keys.flip(0), stable=True).indices.int()"
BUGS = (
    ("native", routes_alone, Bug("slots descend", "in range(slots)", "in reversed(range(slots))")),
    ("native", routes_alone, Bug("weights twice", "None].float() * term", "None].float() ** 2 * term")),
    ("native", definition, Bug("an empty expert's offset", "out_int32=True)", "out_int32=True, right=True)")),
    ("native", chains, Bug("routes in another order", "places.indices.int()", REVERSED)),
    (
        "native",
        ties,
        Bug("larger id", "order = torch.sort(rank,", "order = rank.shape[-1] - 1 - torch.sort(rank.flip(-1),"),
    ),
    ("triton", routes_alone, Bug("slots descend", "static_range(SLOTS)", "static_range(SLOTS - 1, -1, -1)")),
    ("triton", routes_alone, Bug("weights twice", "tl.float32) * weight, y)", "tl.float32) * weight * weight, y)")),
    ("triton", routes_alone, Bug("an offset of one tile", "first + index * BLOCK", "first + (index + 1) * BLOCK")),
    ("triton", chains, Bug("routes in another order", "< row[:, None])", "> row[:, None])")),
    (
        "triton",
        ties,
        Bug("larger id", "tl.min(tl.min(tl.where(where, ids, FAR)", "tl.max(tl.max(tl.where(where, ids, -1)"),
    ),
)


@pytest.mark.parametrize(("backend", "test", "bug"), BUGS, ids=[f"{name}: {bug.name}" for name, _, bug in BUGS])
def test_planted_bug_fails(backend: str, test: Test, bug: Bug) -> None:
    if backend not in test_experts.BACKENDS or (backend == "triton" and torch.cuda.is_available()):
        pytest.skip("needs Triton's interpreter: on a GPU a wrong offset writes anywhere")
    with planted(MODULES[backend], bug), pytest.raises((AssertionError, IndexError)):
        test(backend)
