"""experts over ranks in several processes over gloo: one process's bits, one error for all ranks, planted bugs."""

from __future__ import annotations

import datetime
import time
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from rl_kernels.core.operator import Call
from rl_kernels.core.testing import Draw, bits_of
from rl_kernels.core.testing.planted import Bug, planted
from rl_kernels.core.testing.ranks import run_ranks
from rl_kernels.moe import experts
from rl_kernels.moe.op import OPERATOR, ops

ROWS, PARTS = ("hidden", "ids", "weights", "shared"), ("gate_up", "down", "gate_up_bias", "down_bias")
LEAVES = ("hidden", "weights", "shared", *PARTS)
SHORT = datetime.timedelta(seconds=3)
EVEN, EMPTY = (5, 3, 7, 4), (0, 9, 0, 2)
CALLS: tuple[dict[str, Any], ...] = (
    dict(tokens=EVEN),
    dict(tokens=EMPTY, shared=True, recompute=True),
    dict(tokens=(0, 0, 0, 0), shared=True),
    dict(tokens=(1, 0, 0, 0), slots=1),
    dict(tokens=(40, 1, 90, 33), chosen=5, slots=1, ids=torch.int32),
    dict(tokens=(20, 17, 9, 30), chosen=0, biases=True, activation="gelu_tanh"),
    dict(tokens=(30, 0, 25, 8), few=3, dtype=torch.bfloat16, shared=True),
    dict(
        tokens=EVEN, dtype=torch.bfloat16, routes=torch.bfloat16, biases=True, shared=True,
        activation="clamped_swiglu", interleaved=True, transposed=True,
    ),
    dict(tokens=(12, 6, 1, 0), count=520, width=3, inner=2),
    dict(tokens=EVEN, max_tokens=7, dtype=torch.float16, shared=True),
    dict(tokens=EMPTY, max_tokens=11, biases=True, recompute=True),
    dict(tokens=EVEN, bad=True, validate=False),
)  # fmt: skip


def drawn(tokens: tuple[int, ...], **options: Any) -> dict[str, Any]:
    """Return the keyword arguments of a call with the tokens of all ranks."""
    sizes = {"count": 8, "width": 16, "inner": 12, "slots": 3}
    count, width, inner, slots = (options.get(name, size) for name, size in sizes.items())
    given = {name: value for name, value in options.items() if name not in sizes}
    draw = Draw(given.pop("dtype", torch.float32), given.pop("device", "cpu"), seed=count + sum(tokens))
    total = sum(tokens)
    chosen, few, kind, routes = (given.pop(name, None) for name in ("chosen", "few", "ids", "routes"))
    ids = torch.tensor([draw.integer(0, few or count + 1) for _ in range(total * slots)]).long().view(total, slots)
    if chosen is not None:
        ids[::2], ids[1::2, 0] = chosen, chosen
    if given.pop("bad", False):
        ids[1, 1], ids[-1, 0] = -1, count + 3
    call = {
        "hidden": draw.normal(total, width),
        "gate_up": draw.normal(count, 2 * inner, width, scale=width**-0.5),
        "down": draw.normal(count, width, inner, scale=inner**-0.5),
        "ids": ids.to(draw.device, kind or torch.int64),
        "weights": draw.normal(total, slots, dtype=torch.float32).to(routes or torch.float32),
    }
    if given.pop("biases", False):
        call |= {"gate_up_bias": draw.normal(count, 2 * inner), "down_bias": draw.normal(count, width)}
    if given.pop("shared", False):
        call["shared"] = draw.normal(total, width)
    if given.get("transposed"):
        call |= {name: call[name].mT.contiguous() for name in ("gate_up", "down")}
    return {**call, **given}


def tokens_of(tokens: tuple[int, ...], group: Any) -> slice:
    """Return the tokens of this rank; a group of two has those of ranks 0 and 1, then those of 2 and 3."""
    each, rank = len(tokens) // group.size(), group.rank()
    return slice(sum(tokens[: each * rank]), sum(tokens[: each * (rank + 1)]))


def part_of(count: int, group: Any) -> slice:
    return slice(count // group.size() * group.rank(), count // group.size() * (group.rank() + 1))


def shard(call: dict[str, Any], tokens: tuple[int, ...], group: Any) -> dict[str, Any]:
    own, part, count = tokens_of(tokens, group), part_of(len(call["gate_up"]), group), len(call["gate_up"])
    mine = {name: call[name][own] for name in ROWS if name in call}
    mine |= {name: call[name][part] for name in PARTS if name in call}
    if call.get("max_tokens"):
        mine["max_tokens"] = max(sum(tokens[at : at + 4 // group.size()]) for at in range(0, 4, 4 // group.size()))
    return {**call, **mine, "process_group": group, "num_experts": count}


def results(call: dict[str, Any], upstream: torch.Tensor) -> dict[str, torch.Tensor]:
    leaves = {name: call[name].detach().clone().requires_grad_() for name in LEAVES if name in call}
    with torch.no_grad():
        plain = experts(**call)
    out = experts(**{**call, **leaves})
    assert same(plain, out.detach())
    out.backward(upstream)
    return {"output": out.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def same(result: torch.Tensor, expected: torch.Tensor) -> bool:
    one, other = (bits_of(value.masked_fill(value.isnan(), torch.nan)) for value in (result, expected))
    return result.dtype == expected.dtype and torch.equal(one, other)


def differing(tokens: tuple[int, ...], group: Any, **options: Any) -> list[str]:
    """Return the names of the results that do not have the bits of one process with the tokens of all ranks."""
    call = drawn(tokens, **options)
    own, part = tokens_of(tokens, group), part_of(len(call["gate_up"]), group)
    upstream = Draw(call["hidden"].dtype, call["hidden"].device, seed=3).normal(*call["hidden"].shape)
    expected = results({**call, "max_tokens": None}, upstream)
    result = results(shard(call, tokens, group), upstream[own])
    return [name for name, x in expected.items() if not same(result[name], x[part if name in PARTS else own])]


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
TRIED = (CALLS[0], CALLS[3], CALLS[5], CALLS[8])


def missed(world: int) -> list[str]:
    """Return the bugs that leave all bits as they are."""
    found = []
    for bug in BUGS:
        with planted(MODULES, bug):
            if not any(fails(options, world) for options in TRIED):
                found.append(bug.name)
    # The calls themselves do not fail.
    return found if not any(fails(options, world) for options in TRIED) else ["no bug"]


def fails(options: dict[str, Any], world: int) -> bool:
    """Say whether a call fails on any rank, in a group of its own: one that raises leaves the others waiting."""
    group = distributed.new_group([*range(world)], timeout=SHORT)
    try:
        failed = bool(differing(group=group, **options))
    except Exception:
        failed = True
    every = torch.tensor(int(failed))
    distributed.all_reduce(every)
    return bool(every)


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
    return {"failed": failed, "missed": missed(world), "errors": [errors(whole), errors(pair)], "ended": ended(short)}


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
