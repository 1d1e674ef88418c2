"""The benchmark of experts on tiny shapes, and what its check accepts for experts with many routes."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from rl_kernels.core.testing import Case, Draw
from rl_kernels.lab.bench.arena import Arena
from rl_kernels.lab.bench.conformance import BenchConformance
from rl_kernels.lab.bench.definition import Shape
from rl_kernels.lab.bench.verify import Wrong, call, verify
from rl_kernels.moe import experts, reference
from rl_kernels.moe.op import OPERATOR
from rl_kernels.moe.spec.bench import BENCH, eager
from rl_kernels.moe.spec.cases import SPEC
from rl_kernels.moe.spec.cases_dimensions import sizes

CPU = torch.device("cpu")
BLOCK_OF_ONE = 1
"""Elements of a block of rows, too few for a second expert."""


class TestBench(BenchConformance):
    operator = OPERATOR
    tiny = (Shape((7, 16, 8, 4, 2)), Shape((1, 16, 8, 4, 2)))
    peers = ("eager",)


def test_eager_is_the_operator():
    call = SPEC.inputs(SPEC.case("plain"), Draw(torch.float32))
    torch.testing.assert_close(eager(**call), experts(**call))


def test_half_of_a_skewed_batch_is_on_one_expert():
    ids = SPEC.inputs(Case("skewed", sizes(40, 8, 8, 16, 4), {"chosen": "half"}), Draw(torch.float32))["ids"]
    assert (ids[::2, 0] == 0).all()
    assert (ids[1::2] == 0).sum() < 20
    assert all(len(set(row)) == 4 for row in ids.tolist())


Results = Mapping[str, torch.Tensor]


def computed(arena: Arena, upstream: Results, **changes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return output and gradients of the operator, called with other tensors in place of some."""
    return dict(call(experts, "output", {**arena.inputs, **changes}, arena.leaves, dict(upstream)))


def many_routes() -> tuple[Arena, Results]:
    """Return a call of one expert that all of 4,096 tokens choose, beside a second one, and an upstream gradient."""
    arena = Arena(SPEC, Case("many routes", sizes(4096, 64, 256, 2, 1), {"chosen": "first"}), "bf16", CPU)
    return arena, {"output": Draw(torch.bfloat16, CPU).normal(4096, 64)}


def test_the_check_by_experts_is_that_of_the_whole():
    arena = Arena(SPEC, Case("toy", sizes(9, 16, 12, 5, 2)), "bf16", CPU)
    upstream = {"output": Draw(torch.bfloat16, CPU).normal(9, 16)}
    results, seen = computed(arena, upstream), []

    def counted(*, gate_up: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        seen.append(len(gate_up))
        return reference.experts(gate_up=gate_up, **others)

    counting = replace(arena, spec=replace(SPEC, references={"": counted}))
    share = verify(counting, BENCH.rows[""], results, upstream, "cpu", BLOCK_OF_ONE)
    assert seen == [1] * 10
    assert share == pytest.approx(verify(arena, None, results, upstream, "cpu"), rel=1e-3)
    for name in results:
        wrong = {**results, name: results[name].clone()}
        wrong[name].view(-1)[-1] += 1
        with pytest.raises(Wrong, match=f"{name}: outside the contract's fence"):
            verify(arena, BENCH.rows[""], wrong, upstream, "cpu", BLOCK_OF_ONE)


def test_the_fence_of_weights_grows_with_routes():
    """Rounded activations alone would leave a fixed one."""
    arena, upstream = many_routes()
    results = computed(arena, upstream)
    verify(arena, BENCH.rows[""], results, upstream, "cpu")
    fixed = replace(arena, spec=replace(SPEC, deviations=None))
    with pytest.raises(Wrong, match=r"gradient:.*fence"):
        verify(fixed, BENCH.rows[""], results, upstream, "cpu")


@pytest.mark.parametrize("name", ["gate_up", "down"])
@pytest.mark.parametrize(
    "change", ["route 2000 left out", "last route left out", "weights twice", "weights of neighbors"]
)
def test_the_fence_of_many_routes_refuses_a_wrong_sum(change: str, name: str):
    arena, upstream = many_routes()
    ids, weights = (arena.inputs[name].clone() for name in ("ids", "weights"))
    if change == "weights twice":
        weights.square_()
    elif change == "weights of neighbors":
        weights = weights.roll(1, 0)
    else:
        # An expert that is not here adds nothing.
        ids[2000 if change.startswith("route 2000") else -1] = 2
    item = f"gradient:{name}"
    wrong = {**computed(arena, upstream), item: computed(arena, upstream, ids=ids, weights=weights)[item]}
    with pytest.raises(Wrong, match=item):
        verify(arena, BENCH.rows[""], wrong, upstream, "cpu")
