"""linear_logp over ranks whose shards are not those of vocab_shards: one process's bits, planted bugs, one error."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from rl_kernels.core.operator import Call
from rl_kernels.core.testing.planted import Bug
from rl_kernels.core.testing.ranks import PLANTED_TIMEOUT, missed, run_ranks
from rl_kernels.linear_logp import (
    Memory,
    VocabCuts,
    linear_logp,
    linear_logp_from_known,
    linear_logp_known,
    linear_logp_loss,
)
from rl_kernels.linear_logp.op import OPERATOR

sys.path.insert(0, str(Path(__file__).parent))
from test_group import CALLS, OPERANDS, SIZE, accumulated, drawn, results, same

MODULES = ("rl_kernels.linear_logp.halo",)
BUGS = (
    Bug(
        "a halo that is kept until the weight's version changes",
        "self._weight = self._fetch(weight.detach(), in_background=True)",
        "fetched = self._fetch(weight.detach(), in_background=True)\n"
        "        self._wait()\n"
        "        key = weight.data_ptr(), weight._version\n"
        "        self._weight = distributed.__dict__.setdefault('kept', {}).setdefault(key, fetched)",
    ),
    Bug("the halo is read before it has come", "self._under_way.append(work)", "out.zero_()"),
    Bug("the halo of higher ranks comes first", "(rows.halo, self._high - before,", "(rows.halo, self._high,"),
    Bug("states of parts of units", "low = begin + units(self._low - begin) * UNIT", "low = self._low"),
    Bug("the selected logit is that of the last part", "part[-1], chosen))", "part[-1], part[-1]))"),
    Bug("gradients of the halo do not go back", "rows.own[:before] = received[:before]", "pass"),
    Bug("totals do not travel", "Rows(total, self._fetch(total))", "Rows(total, self._fetch(total).zero_())"),
    Bug("sums of segments in a chain", "add_segment(waiting, number,", "add_segment(waiting, 2 if waiting else 1,"),
    Bug("kept logits of the next columns", "max(low - begins, 0) : stops]", "max(low - begins, 0) + 1 :]"),
    Bug("pad rows have a gradient", "own[self._rows :] = 0", "own[self._rows :] = 1"),
)
"""A kept halo is stale after a step of an optimizer that writes through ``.data``, as Megatron's does."""


BF16 = torch.bfloat16
OF_FOUR, OF_TWO, UPDATED = (0, 4112, 7500, 8600, 9008), (0, 7000, 9001), (0, 2100, 4096, 4128, 5010)


def cut_sets(vocab: int, world: int) -> list[tuple[int, ...]]:
    """Return even cuts, padded ones, ours with pad rows; several cuts in a unit, all rows on one rank, random ones."""
    draw, even = random.Random(vocab), -(-vocab // world)
    steps = [0, 16, 48, 80, 1008][:world]
    inside = [draw.randrange(0, vocab + 1) // 16 * 16 for _ in range(world - 1)]
    return [
        tuple(min(rank * even, vocab) for rank in range(world + 1)),
        tuple(rank * -(-even // 128) * 128 for rank in range(world + 1)),
        tuple(rank * 1024 * -(-vocab // 8192) * 8 // world for rank in range(world + 1)),
        (*steps, vocab + 5),
        (*[0] * world, vocab),
        (0, *sorted(inside), vocab),
        (0, *sorted(draw.randrange(0, vocab + 1) for _ in range(world - 1)), vocab),
    ]


def shard(call: dict[str, Any], group: Any, cuts: tuple[int, ...]) -> dict[str, Any]:
    """Return the arguments of a rank; pad rows are NaN."""
    vocab, (first, end) = len(call["lm_head_weight"]), cuts[group.rank() : group.rank() + 2]
    mine = {}
    for name in OPERANDS[1:]:
        if name in call:
            whole = call[name]
            pad = whole.new_full((max(end - vocab, 0), *whole.shape[1:]), torch.nan)
            mine[name] = torch.cat([whole, pad])[first:end].clone()
    return {**call, **mine, "process_group": group, "vocab_size": VocabCuts(vocab, cuts)}


def differing(call: dict[str, Any], group: Any, cuts: tuple[int, ...], expected: Any = None, **more: Any) -> list[str]:
    """Return the names of the results that do not have one process's bits."""
    expected = expected or results({**call, "vocab_segments": 8})
    result = results({**shard(call, group, cuts), **more})
    return [name for name, value in expected.items() if not same(result[name], of_rank(name, value, group, cuts))]


def of_rank(name: str, value: torch.Tensor, group: Any, cuts: tuple[int, ...]) -> torch.Tensor:
    """Return this rank's rows of a gradient of weight or bias, and 0 for pad rows; other results as they are."""
    if not name.endswith(("lm_head_weight", "bias")):
        return value
    first, end = cuts[group.rank() : group.rank() + 2]
    return torch.cat([value[first:end], value.new_zeros(max(end - max(first, len(value)), 0), *value.shape[1:])])


def bits(group: Any) -> list[Any]:
    failed: list[Any] = []
    for options in (*CALLS, dict(vocab=4128, return_stats=True), dict(vocab=5008, dtype=torch.float16, bias=True)):
        call = drawn(**options)
        expected = results({**call, "vocab_segments": 8})
        for number, cuts in enumerate(cut_sets(len(call["lm_head_weight"]), group.size())):
            # Even cuts are found, and those of vocab_shards with pad rows.
            is_found = {"vocab_size": len(call["lm_head_weight"]), "validate": call.get("validate", "ranks")}
            more = is_found if number < 3 else {}
            if bad := differing(call, group, cuts, expected, **more):
                failed.append((options, cuts, bad))
    return failed


def updates(group: Any, cuts: tuple[int, ...]) -> list[str]:
    """Weights that are updated in place between calls, seen by autograd or not; then ``main_grad``."""
    call = drawn(5008, rows=48, bias=True)
    mine, failed = shard(call, group, cuts), []
    for step in range(3):
        for arguments in (call, mine):
            for name in OPERANDS[1:]:
                x = arguments[name]
                x.data.mul_(1.5) if step == 1 else x.mul_(0.5)
        expected = results({**call, "vocab_segments": 8})
        failed += [
            f"{name}, step {step}"
            for name, value in results(mine).items()
            if not same(value, of_rank(name, expected[name], group, cuts))
        ]
    (result, grads), (whole, expected) = accumulated(mine, 3), accumulated({**call, "vocab_segments": 8}, 3)
    # Pad rows of main_grad stay as they are.
    rows = of_rank("lm_head_weight", whole, group, cuts)
    rows[max(5008 - cuts[group.rank()], 0) :] = 1
    failed += [] if torch.equal(result, rows) else ["main_grad"]
    return failed + ["hidden" for one, other in zip(grads, expected, strict=True) if not torch.equal(one, other)]


def ways(group: Any, cuts: tuple[int, ...]) -> list[str]:
    """Known statistics, a loss by chunks, kept logits, slices of rows, a frozen weight."""
    call = drawn(9001, rows=70, bias=True, return_stats=True)
    failed, expected = [], results({**call, "vocab_segments": 8})

    def compare(what: str, function: Callable[..., Any] = linear_logp, **more: Any) -> None:
        result = results({**shard(call, group, cuts), **more}, function)
        bad = [name for name, value in expected.items() if not same(result[name], of_rank(name, value, group, cuts))]
        failed.extend(f"{what}: {name}" for name in bad)

    for saved_mib in (0, 1, 2, 64):
        compare(f"{saved_mib} MiB kept", memory=Memory(saved_mib=saved_mib, workspace_mib=1))
    with torch.no_grad():
        known = linear_logp_known(**shard(call, group, cuts))
    compare("known", lambda **arguments: linear_logp_from_known(**arguments, known=known))
    losses = []
    for arguments in (shard(call, group, cuts), {**call, "vocab_segments": 8}):
        for chunk_tokens in (32, 70):
            leaves = {name: arguments[name].clone().requires_grad_() for name in OPERANDS}
            options = {"cu_seqlens": [0, 9, 30, 70], "chunk_tokens": chunk_tokens}
            linear_logp_loss(**{**arguments, **leaves}, loss=chunk_losses, **options).backward()
            losses.append([(name, leaf.grad) for name, leaf in leaves.items()])
    for one, other in zip(losses[:2], losses[2:], strict=True):
        pairs = zip(one, other, strict=True)
        failed += [f"loss: {name}" for (name, a), (_, b) in pairs if not same(a, of_rank(name, b, group, cuts))]
    for name in OPERANDS:
        leaf, other = (x[name].clone().requires_grad_() for x in (shard(call, group, cuts), call))
        alone = torch.autograd.grad(linear_logp(**{**shard(call, group, cuts), name: leaf}).logp.sum(), leaf)[0]
        whole = torch.autograd.grad(linear_logp(**{**call, name: other}, vocab_segments=8).logp.sum(), other)[0]
        failed += [] if same(alone, of_rank(name, whole, group, cuts)) else [f"{name} alone"]
    return failed


def chunk_losses(stats: Any, chunk: Any) -> torch.Tensor:
    return torch.stack([part.square().sum() for part in stats.logp.split(chunk.cu_seqlens.diff().tolist())])


def dtensors(mesh: Any) -> list[str]:
    """A head and a bias that PyTorch has sharded, in a vocabulary that does not divide, and a padded one."""
    call, group = drawn(5001, bias=True), mesh.get_group()
    placed = {name: DTensor.from_local(call[name].clone(), mesh, [Replicate()]) for name in OPERANDS[1:]}
    placed = {name: x.redistribute(mesh, [Shard(0)]) for name, x in placed.items()}
    failed = []
    for vocab, sizes in ((5001, {}), (4990, {"vocab_size": 4990})):
        ids = call["target_ids"].clamp(max=vocab - 1)
        whole = {**call, "target_ids": ids, **{name: call[name][:vocab] for name in OPERANDS[1:]}}
        expected = results({**whole, "vocab_segments": 8})
        result = results({**call, **placed, "target_ids": ids, "process_group": mesh, **sizes})
        for name, value in expected.items():
            full = result[name].full_tensor() if isinstance(result[name], DTensor) else result[name]
            failed += [] if same(full[:vocab] if "of lm" in name or "bias" in name else full, value) else [name]
    return failed if group.size() > 1 else []


def noticed(group: Any) -> bool:
    """Say whether a bit differs on this rank."""
    pair = [distributed.new_group([one, one + 1], timeout=PLANTED_TIMEOUT) for one in (0, 2)][group.rank() // 2]
    call = drawn(9001, rows=70)
    differ = differing(call, group, OF_FOUR, memory=Memory(saved_mib=1)) or differing(call, pair, OF_TWO)
    return bool(differ or updates(group, UPDATED))


def errors(group: Any, mesh: Any, other: Any) -> dict[str, str]:
    """Return the text of each error, which must be the same on all ranks."""
    world, rank = group.size(), group.rank()
    whole, texts, last = drawn(5008, bias=True), {}, rank == world - 1
    even = tuple(5008 // world * one for one in range(world + 1))
    call = shard(whole, group, even)

    def attempt(name: str, **changes: Any) -> None:
        try:
            linear_logp(**{**call, "validate": "ranks", **changes})
        except Exception as error:
            texts[name] = f"{type(error).__name__}: {error}"

    for name, cuts in {
        "kind": 3.5,
        "number": even[:-1],
        "order": (0, *even[:0:-1]),
        "end": (*even[:-1], 5007),
        "integer": (*even[:-1], 5008.0),
        "rows": (0, *[1] * (world - 1), 5008),
    }.items():
        attempt(name, vocab_size=VocabCuts(5008, cuts))
    attempt("whole", vocab_size=VocabCuts("5008", even))
    attempt("alone", process_group=None)
    attempt("default", vocab_size=5008, lm_head_weight=torch.ones(3000, SIZE), bias=None)
    found = {"lm_head_weight": torch.ones(5008 // world + 16 * last, SIZE), "bias": None}
    attempt("found", vocab_size=5008, **found)
    attempt("cuts", vocab_size=VocabCuts(5008, (*even[:-1], 5008 + 16 * last)), **found)
    attempt("frozen", lm_head_weight=call["lm_head_weight"].clone().requires_grad_(last))
    weight = DTensor.from_local(call["lm_head_weight"], mesh, [Shard(0)])
    attempt("plain bias", lm_head_weight=weight, vocab_size=None)
    attempt("known cuts", lm_head_weight=weight, bias=None)
    attempt("replicated", lm_head_weight=weight.redistribute(mesh, [Replicate()]), vocab_size=None, bias=None)
    attempt("size", lm_head_weight=weight, bias=None, vocab_size=5009)
    attempt("elsewhere", lm_head_weight=weight, vocab_size=None, bias=None, process_group=other)
    weight.main_grad = torch.zeros(5008, SIZE)
    attempt("main_grad", lm_head_weight=weight, vocab_size=None, bias=None)
    with patch("torch.compiler.is_compiling", return_value=True):
        attempt("compile")
    # The group is still in step.
    linear_logp(**call)
    return texts


def check(texts: dict[str, str], world: int) -> None:
    """Check the text of each error."""
    differ = "expected the same on every rank of process_group, got"
    rise = f"ValueError: vocab_size.cuts: expected {world + 1} numbers that rise from 0 to 5008 or beyond, got"
    assert texts["kind"].startswith("TypeError: vocab_size.cuts: expected a sequence of integers, got float")
    assert all(texts[name].startswith(rise) for name in ("number", "order", "end"))
    assert texts["integer"].startswith("TypeError: vocab_size.cuts: expected an integer")
    assert texts["whole"].startswith("TypeError: vocab_size.size: expected an integer")
    assert texts["rows"].startswith(
        "ValueError: lm_head_weight: expected 1 rows, as vocab_size.cuts says of rank 0, got"
    )
    assert texts["alone"] == "ValueError: vocab_size: expected an integer or None without process_group, got VocabCuts"
    assert texts["default"].startswith("ValueError: lm_head_weight: expected ")
    assert "of vocab_shards(5008, " in texts["default"]
    assert "give vocab_size as VocabCuts(5008, cuts)" in texts["default"]
    assert texts["found"].startswith(f"ValueError: first columns of the shards: {differ} (0, ")
    assert texts["cuts"].startswith(f"ValueError: vocab_size: {differ} VocabCuts(size=5008, cuts=(0, ")
    assert texts["frozen"].startswith(f"ValueError: gradient of lm_head_weight: {differ} is not computed, ")
    assert texts["plain bias"].startswith("TypeError: bias: expected a DTensor, as lm_head_weight is, got Tensor")
    assert texts["known cuts"].startswith("ValueError: vocab_size: expected an integer or None with a DTensor")
    assert texts["replicated"].startswith("ValueError: lm_head_weight: expected a DTensor with placements (Shard(0),)")
    assert texts["size"].startswith("ValueError: vocab_size: expected at most 5008, the rows of the DTensor")
    assert texts["main_grad"].startswith("ValueError: lm_head_weight.main_grad: expected none on a DTensor")
    expected = f"ValueError: lm_head_weight: expected the rows of vocab_shards(5008, {world}) under torch.compile"
    assert texts["compile"].startswith(expected)
    assert texts["elsewhere"].startswith("ValueError: lm_head_weight: expected a DTensor on the ranks of process_group")
    assert len(texts) == 19


def ranks(rank: int, world: int) -> dict[str, Any]:
    mesh, whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), distributed.group.WORLD
    line, pair = init_device_mesh("cpu", (world,)), mesh["tp"].get_group()
    single = [distributed.new_group([one]) for one in range(world)][rank]
    failed = [*bits(whole), *bits(pair), *(bits(single) if rank == 0 else [])]
    for group, cuts in ((whole, UPDATED), (pair, (0, 16, 5008)), (single, (0, 5010))):
        failed += updates(group, cuts)
    for group, cuts in ((whole, OF_FOUR), (pair, OF_TWO), (single, (0, 9008))):
        failed += ways(group, cuts)
    failed += [*dtensors(line), *dtensors(mesh["tp"])]
    return {
        "failed": failed,
        "missed": missed(BUGS, MODULES, [noticed], world),
        "errors": [errors(whole, line, pair), errors(pair, mesh["tp"], whole)],
    }


def test_any_cut_has_the_bits_of_one_process() -> None:
    result = run_ranks(ranks, 4, 4)
    assert [each["failed"] for each in result] == [[]] * 4
    assert [each["missed"] for each in result] == [[]] * 4
    whole, pairs = zip(*(each["errors"] for each in result), strict=True)
    for texts in (whole, pairs[:2], pairs[2:]):
        check(texts[0], len(texts))
        assert all(other == texts[0] for other in texts)


def in_triton(rank: int) -> list[str]:
    return differing({**drawn(2500, rows=3), "backend": "triton"}, distributed.group.WORLD, (0, 1040, 2500))


def test_any_cut_in_triton() -> None:
    reason = OPERATOR.backend("triton").why_not(Call(torch.device("cpu"), torch.float32, "cpu", {}))
    if reason is not None:
        pytest.skip(reason)
    assert run_ranks(in_triton, 2) == [[], []]


def on_gpus(rank: int) -> list[Any]:
    group, failed = distributed.group.WORLD, []
    for options in (dict(vocab=9001, rows=70), dict(vocab=40000, rows=300, bias=True, return_stats=True)):
        call = {
            name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in drawn(**options, dtype=BF16).items()
        }
        expected = results({**call, "vocab_segments": 8})
        for cuts in cut_sets(len(call["lm_head_weight"]), group.size()):
            failed += [(options, cuts, bad)] if (bad := differing(call, group, cuts, expected)) else []
    mine = shard(call, group, cuts)
    eager, graph = linear_logp(**mine).logp, torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = linear_logp(**mine).logp
    graph.replay()
    return failed if torch.equal(captured, eager) else [*failed, "graph"]


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
def test_any_cut_on_gpus(world: int) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    assert run_ranks(on_gpus, world, backend="nccl", timeout=120.0) == [[]] * world
