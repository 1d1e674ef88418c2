"""det_attention over ranks in processes over gloo: one process's bits, one error for all ranks, planted bugs."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from rl_kernels.attention import context_shards, cut_context, det_attention, join_context
from rl_kernels.attention.op import OPERATOR
from rl_kernels.core.operator import Call
from rl_kernels.core.testing import Draw
from rl_kernels.core.testing.planted import Bug
from rl_kernels.core.testing.ranks import missed, run_ranks

SHORT = datetime.timedelta(seconds=3)
CAUSAL, HALF = {"causal": True}, torch.float16
MANY = (7, 0, 201, 1, 129, 64, 2, 330, 300)
CALLS: tuple[dict[str, Any], ...] = (
    {**CAUSAL, "heads": (8, 2), "dtype": torch.bfloat16},
    {"heads": (8, 2), "dtype": HALF},
    {**CAUSAL, "length": 280, "heads": (10, 2), "size": 16},
    {"length": 280, "heads": (10, 2), "size": 16, "scale": 0.3},
    {**CAUSAL, "lengths": MANY, "heads": (3, 1), "size": 16},
    {"lengths": MANY, "heads": (4, 4), "size": 16, "size_v": 24},
    {**CAUSAL, "lengths": MANY, "heads": (4, 2), "size": 16, "window": (70, None), "softcap": 5.0, "sinks": True},
    {**CAUSAL, "lengths": MANY, "heads": (4, 2), "size": 16, "window": (0, 0)},
    {**CAUSAL, "length": 280, "heads": (2, 1), "size": 16, "window": (130, 3), "batch": 1},
    {**CAUSAL, "lengths": (1031,), "heads": (4, 1), "size": 128, "dtype": torch.bfloat16},
    {"lengths": (333, 40), "heads": (4, 1), "size": 128, "sinks": True},
    {**CAUSAL, "lengths": (1,), "heads": (2, 1)},
    {**CAUSAL, "lengths": (0, 0), "heads": (2, 1)},
    {"lengths": (), "heads": (2, 1)},
    {**CAUSAL, "heads": (2, 1), "length": 0},
    {**CAUSAL, "heads": (2, 1), "batch": 0},
)


def drawn(
    heads: tuple[int, int] = (4, 2),
    size: int = 64,
    size_v: int | None = None,
    batch: int = 2,
    length: int = 72,
    lengths: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **options: Any,
) -> tuple[dict[str, Any], torch.Tensor]:
    """Return a call of whole sequences, and the gradient of its output."""
    draw, rows = Draw(dtype, device, seed=7), (batch, length) if lengths is None else (sum(lengths),)
    wide = size_v or size
    sizes = ((heads[0], size), (heads[1], size), (heads[1], wide), (heads[0], wide))
    q, k, v, upstream = (draw.normal(*rows, *each) for each in sizes)
    call = {"q": q, "k": k, "v": v, **options}
    if options.get("sinks"):
        call["sinks"] = draw.normal(heads[0])
    if lengths is not None:
        call["cu_seqlens_q"] = call["cu_seqlens_k"] = torch.tensor([0, *lengths], device=device).cumsum(0)
    return call, upstream


def shard(call: dict[str, Any], group: Any) -> dict[str, Any]:
    bounds = call.get("cu_seqlens_q")
    own = {name: cut_context(call[name], group, bounds) for name in ("q", "k", "v")}
    return {**call, **own, "process_group": group}


def results(call: dict[str, Any], upstream: torch.Tensor) -> dict[str, torch.Tensor]:
    leaves = {name: call[name].detach().clone().requires_grad_() for name in ("q", "k", "v", "sinks") if name in call}
    with torch.no_grad():
        plain = det_attention(**call)
    out, lse = det_attention(**{**call, **leaves}, return_lse=True)
    assert torch.equal(plain, out.detach())
    out.backward(upstream)
    return {"out": out.detach(), "lse": lse.mT, **{name: leaf.grad for name, leaf in leaves.items()}}


def differing(group: Any, same: Callable[..., bool] = torch.equal, **options: Any) -> list[str]:
    """Return the names of the results that do not have the bits of one process."""
    call, upstream = drawn(**options)
    bounds, expected = call.get("cu_seqlens_q"), results(call, upstream)
    found = results(shard(call, group), cut_context(upstream, group, bounds))
    if "sinks" in call:
        total = found.pop("sinks")
        distributed.all_reduce(total, group=group)
        torch.testing.assert_close(total, expected.pop("sinks"), rtol=2e-2, atol=1e-4)
    failed = [name for name, x in found.items() if not same(x, cut_context(expected[name], group, bounds))]
    return failed if same(join_context(found["out"], group, bounds), expected["out"]) else [*failed, "join"]


def some(call: dict[str, Any], names: str) -> list[torch.Tensor]:
    """Return the gradients of some operands; all others need none."""
    leaves = {name: call[name].clone().requires_grad_() for name in names}
    out = det_attention(**{**call, **leaves})
    return list(torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out)))


def bits(group: Any) -> list[Any]:
    failed: list[Any] = [(options, bad) for options in CALLS if (bad := differing(group, **options))]
    call, _ = drawn(causal=True)
    turned = {**call, **{name: call[name].transpose(1, 2).contiguous().transpose(1, 2) for name in "qkv"}}
    mine = shard(turned, group)
    for names in ("q", "k", "v", "qv"):
        pairs = zip(some(mine, names), some(call, names), strict=True)
        failed += [] if all(torch.equal(one, cut_context(other, group)) for one, other in pairs) else [names]
    hidden = call["q"].clone().requires_grad_()
    weights = torch.rand(hidden.shape[1])
    distributed.broadcast(weights, group=group, group_src=0)
    (join_context(cut_context(hidden, group), group) * weights[:, None, None]).sum().backward()
    whole = weights[:, None, None].expand(hidden.shape)
    failed += [] if torch.equal(cut_context(hidden.grad, group), cut_context(whole, group)) else ["gradient of join"]
    with torch.inference_mode():
        failed += [] if torch.equal(det_attention(**mine), cut_context(det_attention(**call), group)) else ["inference"]
    return failed


BUGS = (
    Bug("keys begin at a piece", "[(start, start + end)]))", "[(start + ranges[0][0], start + end)]))"),
    Bug("keys end at a piece's first row", "end = ranges[-1][1] if", "end = ranges[0][0] + 1 if"),
    Bug("keys in the order of ranks", "keys=places[key_rows]", "keys=key_rows"),
    Bug("queries in the order of ranks", "queries=places[query_rows]", "queries=query_rows"),
    Bug("blocks of rows begin anywhere", "begin = first // step * step", "begin = first"),
    Bug("blocks of rows without the heads of a group", "first // step * step", "first // 16 * 16"),
    Bug("a window ends too early", "min(length, end + left)", "min(length, end + left - 1)"),
    Bug("the left side of a window is not shifted", "else left - most, most)", "else left, most)"),
    Bug("sequences without padding", "count + ahead - piece.ahead", "count"),
    Bug("padding is read", "None if used == queries else in_use", "None"),
    Bug("gradients of other keys", "(start + piece.others, start + count)", "(start, start + count - piece.others)"),
    Bug("gradients of keys of one call alone", "in of_keys(settings.where):", "in of_keys(settings.where)[:1]:"),
    Bug("keys without their values", "settings.gather(k, v)())", "settings.gather(k, v * 0)())"),
)
MODULES = ("rl_kernels.attention.plan", "rl_kernels.attention.parallel")
TRIED = [partial(differing, **CALLS[number]) for number in (2, 6)]


def errors(group: Any) -> dict[str, str]:
    """Return the text of each error, which must be the same on all ranks."""
    texts, last = {}, group.rank() == group.size() - 1
    call, packed = (shard(drawn(**CAUSAL, **options)[0], group) for options in ({}, {"lengths": (9, 40)}))
    q, bounds = call["q"], packed["cu_seqlens_q"]

    def attempt(name: str, given: dict[str, Any] = call, **changes: Any) -> None:
        try:
            det_attention(**{**given, "validate": "ranks", **changes})
        except Exception as error:
            texts[name] = f"{type(error).__name__}: {error}"

    numbers = torch.zeros(2, dtype=torch.int64)
    for name in ("k_start", "seqused_q", "seqused_k"):
        attempt(name, **{name: numbers if last else None})
    attempt("block_table", block_table=numbers[None] if last else None)
    attempt("window", causal=False, window=(3, 3))
    attempt("dtype", **{name: call[name].bfloat16() if last else call[name] for name in "qkv"})
    attempt("heads", q=q[:, :, :2] if last else q)
    attempt("causal", causal=not last)
    attempt("scale", scale=1.0 if last else 0.5)
    attempt("sinks", sinks=torch.zeros(4) if last else None)
    attempt("gradient", k=call["k"].clone().requires_grad_(last))
    attempt("rows of k", k=call["k"][:, :-1], v=call["v"][:, :-1])
    attempt("length", **{name: call[name][:, : q.shape[1] - last] for name in "qkv"})
    attempt("rows", packed, **{name: packed[name][: len(packed[name]) - last] for name in "qkv"})
    attempt("lengths", packed, cu_seqlens_q=bounds + last * torch.tensor([0, 1, 1]), cu_seqlens_k=None)
    attempt("keys", packed, cu_seqlens_k=torch.tensor([0, 10, 49]))
    attempt("keys alone", cu_seqlens_k=bounds)
    attempt("descending", packed, cu_seqlens_q=torch.tensor([0, 50, 49]), cu_seqlens_k=None)
    attempt("longest", packed, max_seqlen_k=39)
    attempt("tensor", q=[1.0] if last else q)
    # The first call of a kind is compared by default.
    attempt("default", validate=True, softcap=2.0 + last)
    # The group is still in step.
    det_attention(**call)
    det_attention(**{**packed, "cu_seqlens_k": None}, max_seqlen_q=40)
    return texts


def ended(group: Any) -> tuple[str, float]:
    """Return the error, and after how many seconds, of ranks that were not compared; the last one stays away."""
    call, started = shard(drawn(causal=True)[0], group), time.monotonic()
    if group.rank():
        call["q"] = call["q"][:, :-1]
    try:
        det_attention(**call, validate=False)
    except Exception as error:
        return str(error), time.monotonic() - started
    return "", 0.0


def ranks(rank: int, world: int) -> dict[str, Any]:
    mesh, whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")), distributed.group.WORLD
    pair, single = mesh["cp"].get_group(), [distributed.new_group([one]) for one in range(world)][rank]
    short = [distributed.new_group([one, one + 1], timeout=SHORT) for one in (0, 2)][rank // 2]
    failed = [*bits(whole), *bits(pair), *bits(single)]
    call, _ = drawn(causal=True)
    compiled = torch.compile(det_attention, backend="eager")(**shard(call, whole))
    by_mesh = det_attention(**{**shard(call, pair), "process_group": mesh["cp"]})
    failed += [] if torch.equal(compiled, cut_context(det_attention(**call), whole)) else ["compiled"]
    failed += [] if torch.equal(by_mesh, cut_context(det_attention(**call), mesh["cp"])) else ["mesh"]
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


def check(texts: dict[str, str], world: int) -> None:
    """Check the text of each error."""
    where = f"(on rank {world - 1} of process_group)"
    differ = "expected the same on every rank of process_group"
    for name in ("k_start", "seqused_q", "seqused_k", "block_table"):
        assert texts[name].startswith(f"ValueError: {name}: expected None with process_group")
        assert texts[name].endswith(where)
    assert texts["window"].startswith("ValueError: window: expected causal=True with a window and process_group")
    assert texts["dtype"].startswith(f"ValueError: q: {differ}, got 4 dims, 4 heads of 64, torch.float32, ")
    assert texts["heads"].startswith(f"ValueError: q: {differ}, got 4 dims, 4 heads of 64, torch.float32, ")
    assert texts["causal"].startswith(f"ValueError: causal: {differ}, got True, ")
    assert texts["scale"].startswith(f"ValueError: scale: {differ}, got 0.5, ")
    assert texts["sinks"].startswith(f"ValueError: sinks: {differ}, got none, ")
    assert texts["gradient"].startswith(f"ValueError: gradient of k and v: {differ}, got not needed, ")
    assert texts["rows of k"].startswith("ValueError: k: expected as many rows as q has")
    assert texts["length"].startswith(f"ValueError: q (lengths of sequences): {differ}, got (72, 72), ")
    assert texts["rows"].startswith(f"ValueError: q: expected {49 // world} rows, those of context_shards on rank ")
    assert texts["lengths"].startswith(f"ValueError: q: expected {49 // world + 1} rows, those of context_shards on ")
    assert texts["keys"].startswith("ValueError: cu_seqlens_k: expected None or the numbers of cu_seqlens_q")
    assert texts["keys alone"].startswith("ValueError: cu_seqlens_k: expected None without cu_seqlens_q")
    assert texts["descending"].startswith("ValueError: cu_seqlens_q: expected numbers that ascend from 0, got [0, 50")
    assert texts["longest"].startswith("ValueError: max_seqlen_k: expected at least 40, the length of the longest")
    assert texts["tensor"] == f"TypeError: q: expected a tensor, got list {where}"
    assert texts["default"].startswith(f"ValueError: softcap: {differ}, got 2.0, ")
    assert len(texts) == 21


def on_gpus(rank: int) -> list[Any]:
    group, options = distributed.group.WORLD, {"device": "cuda", "dtype": torch.bfloat16}
    heads = ({"heads": (32, 8), "size": 128}, {"heads": (28, 4), "size": 64, "dtype": torch.float16})
    calls = [*CALLS, *({**CAUSAL, "length": 4096, **more, "backend": name} for more in heads for name in BACKENDS)]
    return [(call, bad) for call in calls if (bad := differing(group, **{**options, **call}))]


BACKENDS = ("cuda-sm90", "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
def test_gpus(world: int) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    assert run_ranks(on_gpus, world, backend="nccl", timeout=120.0) == [[]] * world


def in_triton(rank: int) -> list[Any]:
    """In the interpreter a product's bits follow a row's place in it: results are only close."""
    calls = ({"lengths": (40, 3, 21), **CAUSAL, "sinks": True}, {"lengths": (40, 3)}, {"length": 40, "window": (9, 0)})
    given = {"heads": (5, 1), "size": 16, "batch": 1, "backend": "triton"}
    close = partial(torch.allclose, rtol=1e-4, atol=1e-5)
    return [bad for call in calls if (bad := differing(distributed.group.WORLD, close, **given, **call))]


def test_triton_over_ranks() -> None:
    reason = OPERATOR.backend("triton").why_not(Call(torch.device("cpu"), torch.float32, "cpu", {}))
    if reason is not None:
        pytest.skip(reason)
    assert run_ranks(in_triton, 2) == [[], []]


@pytest.mark.smoke
def test_shards_are_parts_of_equal_work() -> None:
    for length in (*range(40), 1000, 65536):
        for count in (1, 2, 3, 4, 8):
            shards = context_shards(length, count)
            pieces = sorted(piece for rank in shards for piece in rank)
            assert [first for first, _ in pieces] == [0, *(end for _, end in pieces[:-1])]
            assert pieces[-1][1] == length
            sizes = [sum(end - first for first, end in rank) for rank in shards]
            assert max(sizes) - min(sizes) <= 2
            seen = [sum(end * (end + 1) - first * (first + 1) for first, end in rank) for rank in shards]
            assert max(seen) - min(seen) <= 4 * length
    with pytest.raises(ValueError, match="length: expected an integer >= 0"):
        context_shards(-1, 2)
    with pytest.raises(TypeError, match="ranks: expected an integer"):
        context_shards(8, 2.0)
