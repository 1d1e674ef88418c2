"""experts over ranks in several processes over gloo: one process's bits, one error for all ranks, planted bugs."""

from __future__ import annotations

import datetime
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from rl_kernels.core.operator import Call
from rl_kernels.core.testing import Draw
from rl_kernels.core.testing.planted import Bug
from rl_kernels.core.testing.ranks import missed, run_ranks
from rl_kernels.moe import experts
from rl_kernels.moe.op import OPERATOR, ops

sys.path.insert(0, str(Path(__file__).parent))
from experts_over_ranks import CALLS, EMPTY, EVEN, PARTS, differing, drawn, part_of, shard, tokens_of

SHORT = datetime.timedelta(seconds=3)


def accumulated(call: dict[str, Any], upstream: torch.Tensor) -> list[torch.Tensor]:
    """Return ``main_grad`` of both weights after two passes."""
    leaves = {name: call[name].clone().requires_grad_() for name in ("gate_up", "down")}
    for leaf in leaves.values():
        leaf.main_grad = torch.ones(leaf.shape)
    for _ in range(2):
        experts(**{**call, **leaves}).backward(upstream)
    assert all(leaf.grad is None for leaf in leaves.values())
    return [leaf.main_grad for leaf in leaves.values()]


def some(call: dict[str, Any], upstream: torch.Tensor, names: tuple[str, ...]) -> list[torch.Tensor]:
    """Return the gradients of some arguments, where all others need one too."""
    leaves = {name: call[name].clone().requires_grad_() for name in ("hidden", "gate_up", "down", "weights")}
    return list(torch.autograd.grad(experts(**{**call, **leaves}), [leaves[name] for name in names], upstream))


def bits(group: Any) -> list[Any]:
    failed: list[Any] = [(options, bad) for options in CALLS if (bad := differing(group=group, **options))]
    call = drawn(EVEN)
    mine, own, part = shard(call, EVEN, group), tokens_of(EVEN, group), part_of(len(call["gate_up"]), group)
    upstream = Draw(torch.float32, seed=5).normal(*call["hidden"].shape)
    pairs = zip(accumulated(mine, upstream[own]), accumulated(call, upstream), strict=True)
    failed += [] if all(torch.equal(one, other[part]) for one, other in pairs) else ["main_grad"]
    for names in (("hidden",), ("weights",), ("down",), ("gate_up", "weights")):
        expected = zip(names, some(call, upstream, names), strict=True)
        pieces = [x[part if name in PARTS else own] for name, x in expected]
        failed += [] if all(map(torch.equal, some(mine, upstream[own], names), pieces)) else [names]
    with torch.autocast("cpu", torch.bfloat16):
        failed += [] if torch.equal(experts(**mine), experts(**call)[own]) else ["autocast"]
    return failed


BUGS = (
    Bug(
        "combine in the order of arrival",
        "plan.send_back(y), ids, plan.places, weights, shared",
        "plan.send_back(y), *(x.gather(1, plan.places.long().argsort(1)) for x in (ids, plan.places, weights)), shared",
    ),
    Bug(
        "tokens are sent in descending order",
        "owner, order = torch.sort(owner.to(",
        "order = len(owner) - 1 - torch.sort(owner.flip(0), stable=True).indices\n    owner, _ = torch.sort(owner.to(",
    ),
    Bug(
        "the last rank's routes come first in an expert's chain",
        "dx, dots, *rest = op(*inputs, upstream, saved.z, saved.order, *more, needs, backend)",
        "inputs = inputs._replace(**{name: getattr(inputs, name).flip(0) for name in ('hidden', 'ids', 'weights')})\n"
        "    dx, dots, *rest = op(*inputs, upstream.flip(0), None, None, *more, needs, backend)\n"
        "    dx, dots = dx.flip(0), dots.flip(0)",
    ),
    Bug("sizes sent and received are swapped", "return Sizes(*sizes[0])", "return Sizes(*sizes[0][::-1])"),
    Bug("a token is sent to its first rank alone", " | (owner[1:] != owner[:-1])", ""),
    Bug("a weight of another route", "weights.flatten()[mine.order].float()", "weights.flatten().float()"),
    Bug(
        "ids wrap around in bytes",
        "(ids % experts).int().flatten()[mine.order]",
        "(ids.flatten()[mine.order] - mine.owner * experts).int()",
    ),
)
MODULES = ("rl_kernels.moe.exchange", "rl_kernels.moe.parallel")
TRIED = [partial(differing, **CALLS[number]) for number in (0, 3, 5, 8)]


def errors(group: Any) -> dict[str, str]:
    """Return the text of each error, which must be the same on all ranks."""
    call, texts, last = shard(drawn(EVEN), EVEN, group), {}, group.rank() == group.size() - 1
    hidden, weights, ids = call["hidden"], call["weights"], call["ids"]

    def attempt(name: str, **changes: Any) -> None:
        try:
            experts(**{**call, "validate": "ranks", **changes})
        except Exception as error:
            texts[name] = f"{type(error).__name__}: {error}"

    attempt("number", num_experts=None)
    attempt("divides", num_experts=group.size() * 8 + 1)
    attempt("shard", num_experts=group.size() * 8)
    attempt("dtype", **{name: call[name].bfloat16() if last else call[name] for name in ("hidden", "gate_up", "down")})
    attempt("width", hidden=hidden[:, :8] if last else hidden, **thin(call, last))
    attempt("slots", ids=ids[:, : 3 - last], weights=weights[:, : 3 - last])
    attempt("activation", activation="gelu_tanh" if last else "silu")
    attempt("bias", down_bias=torch.zeros(len(call["down"]), 16) if last else None)
    attempt("ids", ids=ids + 100 * last)
    attempt("tokens", max_tokens=100 + last)
    attempt("bound", max_tokens=1)
    attempt("gradient", hidden=hidden.clone().requires_grad_(last))
    attempt("tensor", hidden=[1.0] if last else hidden)
    attempt("validate", validate="rank")
    # The first call of a kind is compared by default.
    attempt("default", validate=None, activation="clamped_swiglu" if last else "silu", interleaved=True)
    # The group is still in step.
    experts(**call)
    return texts


def thin(call: dict[str, Any], last: bool) -> dict[str, Any]:
    return {"gate_up": call["gate_up"][:, :, :8], "down": call["down"][:, :8]} if last else {}


def ended(group: Any) -> tuple[str, float]:
    """Return the error, and after how many seconds, of ranks that were not compared; the last one has no experts."""
    call, started = shard(drawn(EVEN), EVEN, group), time.monotonic()
    if group.rank():
        call["gate_up"] = call["gate_up"][:0]
    try:
        experts(**call, validate=False)
    except Exception as error:
        return str(error), time.monotonic() - started
    return "", 0.0


def ranks(rank: int, world: int) -> dict[str, Any]:
    mesh, whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep")), distributed.group.WORLD
    pair, single = mesh["ep"].get_group(), [distributed.new_group([one]) for one in range(world)][rank]
    short = [distributed.new_group([one, one + 1], timeout=SHORT) for one in (0, 2)][rank // 2]
    failed = [*bits(whole), *bits(pair), *bits(single)]
    call = drawn(EVEN)
    compiled = torch.compile(experts, backend="eager")(**shard(call, EVEN, whole))
    by_mesh = experts(**{**shard(call, EVEN, pair), "process_group": mesh["ep"]})
    failed += [] if torch.equal(compiled, experts(**call)[tokens_of(EVEN, whole)]) else ["compiled"]
    failed += [] if torch.equal(by_mesh, experts(**call)[tokens_of(EVEN, pair)]) else ["mesh"]
    return {
        "failed": failed,
        "missed": missed(BUGS, MODULES, TRIED, world),
        "errors": [errors(whole), errors(pair)],
        "ended": ended(short),
    }


def test_ranks_have_the_bits_of_one_process() -> None:
    result = run_ranks(ranks, 4, 4)
    assert [each["failed"] for each in result] == [[]] * 4
    assert [each["missed"] for each in result] == [[]] * 4
    for each in result:
        text, seconds = each["ended"]
        assert text
        assert seconds < 30
    whole, pairs = zip(*(each["errors"] for each in result), strict=True)
    for texts in (whole, pairs[:2], pairs[2:]):
        check(texts[0], len(texts))
        assert all(other == texts[0] for other in texts)


def on_gpus(rank: int) -> list[Any]:
    group, options = distributed.group.WORLD, {"device": "cuda", "dtype": torch.bfloat16}
    failed: list[Any] = [(call, bad) for call in CALLS if (bad := differing(group=group, **{**options, **call}))]
    call = {**shard(drawn(EVEN, max_tokens=7, **options), EVEN, group), "validate": False}
    expected, graph = experts(**call), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(**call)
    graph.replay()
    return failed if torch.equal(out, expected) else [*failed, "graph"]


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
def test_gpus(world: int) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    assert run_ranks(on_gpus, world, backend="nccl", timeout=120.0) == [[]] * world


def in_triton(rank: int) -> list[str]:
    return differing(EMPTY, distributed.group.WORLD, max_tokens=11, shared=True, backend="triton")


def test_triton_over_ranks() -> None:
    reason = OPERATOR.backend("triton").why_not(Call(torch.device("cpu"), torch.float32, "cpu", {}))
    if reason is not None:
        pytest.skip(reason)
    assert run_ranks(in_triton, 2) == [[], []]


def check(texts: dict[str, str], world: int) -> None:
    """Check the text of each error."""
    where = f"(on rank {world - 1} of process_group)"
    differ = "expected the same on every rank of process_group"
    assert texts["number"].startswith("ValueError: num_experts: expected the number of experts of all ranks")
    assert texts["divides"].startswith(f"ValueError: num_experts: expected a multiple of the {world} ranks")
    assert texts["shard"].startswith("ValueError: gate_up: expected the weights of 8 experts on each of")
    assert texts["dtype"].startswith(f"ValueError: hidden: {differ}, got D = 16, float32, ")
    assert texts["width"].startswith(f"ValueError: hidden: {differ}, got D = 16, float32, ")
    assert texts["slots"].startswith(f"ValueError: ids: {differ}, got k = 3, ")
    assert texts["activation"].startswith(f"ValueError: activation: {differ}, got silu, ")
    assert texts["bias"].startswith(f"ValueError: down_bias: {differ}, got none, ")
    assert texts["ids"].startswith("ValueError: ids: expected values in [0, 9)")
    assert texts["ids"].endswith(where)
    assert texts["tokens"].startswith(f"ValueError: max_tokens: {differ}, got 100, ")
    assert texts["bound"].startswith("ValueError: max_tokens: expected an integer >= ")
    assert texts["gradient"].startswith(f"ValueError: gradient of hidden: {differ}, got not needed, ")
    assert texts["tensor"] == f"TypeError: hidden: expected a tensor, got list {where}"
    assert texts["validate"].startswith("TypeError: validate: expected a bool, got str")
    assert texts["default"].startswith(f"ValueError: activation: {differ}")
    assert len(texts) == 15


def test_raw_ops_of_ranks_pass_opcheck() -> None:
    call = drawn(EVEN)
    inputs = (call["hidden"], call["gate_up"], call["down"], call["ids"][:, :1].clone(), *[None] * 4, "silu", False)
    torch.library.opcheck(ops["forward_kept"]._op, (*inputs, "native"))
    ids, rows, places = call["ids"], Draw(torch.float32).normal(60, 16), torch.arange(57).flip(0).view(19, 3)
    torch.library.opcheck(ops["combine"]._op, (rows, ids, places, call["weights"], call["hidden"], 8, "native"))


def test_one_process_needs_no_group() -> None:
    call = drawn(EVEN)
    assert torch.equal(experts(**call, num_experts=8, max_tokens=sum(EVEN)), experts(**call))
    with pytest.raises(ValueError, match="gate_up: expected the weights of 7 experts"):
        experts(**call, num_experts=7)
    with pytest.raises(ValueError, match="max_tokens: expected an integer >= 19"):
        experts(**call, max_tokens=18)
