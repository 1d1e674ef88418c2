"""The order of routes and the tiles in Triton, against the definition; bits of no float are in it."""

from __future__ import annotations

import importlib

import pytest
import torch

from rl_kernels.core.operator import Call
from rl_kernels.moe.op import OPERATOR
from rl_kernels.moe.routes import sort_routes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CALL = Call(torch.device(DEVICE), torch.float32, "cpu", {})
SIZES = (
    (1, 8, 128),
    (0, 2, 3),
    (5, 2, 4),
    (128, 1, 6),
    (300, 4, 6),
    (683, 3, 1),
    (700, 3, 5),
    (130, 8, 510),
    (600, 8, 128),
)
MORE = ((4096, 8, 128), (65536, 8, 512), (32768, 10, 64)) if DEVICE == "cuda" else ()

pytestmark = pytest.mark.skipif(
    OPERATOR.backend("triton").why_not(CALL) is not None, reason="needs a GPU, or Triton's interpreter"
)


@pytest.mark.parametrize(("tokens", "slots", "experts"), [*SIZES, *MORE])
@pytest.mark.parametrize("chosen", ["drawn", "skewed"])
def test_routes_and_tiles_are_those_of_the_definition(tokens: int, slots: int, experts: int, chosen: str) -> None:
    sorting = importlib.import_module("rl_kernels.moe.triton_lib.sorting")
    torch.manual_seed(tokens)
    # Also ids without an expert, of which -1 and those above E are not allowed, but sorted.
    ids = torch.randint(-1, experts + 2, (tokens, slots), device=DEVICE)
    if chosen == "skewed":
        ids[: tokens // 2] = experts // 2
    rows = 16 if tokens < 200 else 64
    order, tiles = sorting.Sort(ids, experts, rows)(ids)
    assert torch.equal(order, sort_routes(ids, experts))
    bounds = order[ids.numel() :]
    ends = bounds.tolist()
    expected = [(e, at, ends[e + 1]) for e in range(experts) for at in range(ends[e], ends[e + 1], rows)]
    for listed in (tiles, sorting.List(ids.numel(), experts, rows)(bounds)):
        assert [tuple(tile) for tile in listed.t().tolist()[: len(expected)]] == expected
        assert (listed[0, len(expected) :] == experts).all()
