"""linear_logp over ranks in several processes over gloo: one process's bits, and one error for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from rl_kernels.core.testing import IGNORED, Draw, bits_of
from rl_kernels.core.testing.ranks import run_ranks
from rl_kernels.linear_logp import (
    Chunk,
    LogpStats,
    linear_logp,
    linear_logp_from_known,
    linear_logp_known,
    linear_logp_loss,
    vocab_shards,
)
from rl_kernels.linear_logp.spec.raw import below_targets

ROWS, SIZE = 9, 16
OPERANDS = ("hidden", "lm_head_weight", "bias")
CALLS: tuple[dict[str, Any], ...] = (
    dict(vocab=9001),
    dict(vocab=9001, bias=True, per_token=True, ignore_index=7, return_stats=True, softcap=5.0),
    dict(vocab=1500, bias=True, temperature=0.7, return_stats=True, dtype=torch.bfloat16, logit_scale=0.5),
    dict(vocab=16384, return_stats=True, dtype=torch.float64, ignore_index=IGNORED, ids=torch.int32),
    dict(vocab=5000, validate=False, bad=True, leading=(3, 3)),
    dict(vocab=700, rows=0, return_stats=True),
    dict(vocab=700, rows=1, leading=(), bias=True),
    dict(vocab=3000, rows=40, bias=True, join_tokens=16),
    dict(vocab=9001, bias=True, per_token=True, ignore_index=7, return_stats=True, least=True),
)


def drawn(vocab: int, **options: Any) -> dict[str, Any]:
    """Return the keyword arguments of a call for the whole vocabulary."""
    dtype, rows, kind = (options.pop(*one) for one in (("dtype", torch.float32), ("rows", ROWS), ("ids", torch.int64)))
    draw = Draw(dtype, seed=vocab)
    ids = draw.ids(vocab, rows).to(kind)
    if rows > 3:
        ids[:4] = torch.tensor([0, vocab - 1, min(2048, vocab - 1), min(2047, vocab - 1)])
        ids[4] = options.get("ignore_index", ids[4])
        ids[5] = vocab if options.pop("bad", False) else ids[5]
    call = {"hidden": draw.normal(rows, SIZE), "lm_head_weight": draw.normal(vocab, SIZE, scale=SIZE**-0.5)}
    if options.pop("bias", False):
        call["bias"] = draw.normal(vocab)
    if options.pop("per_token", False):
        options["temperature"] = draw.uniform(0.5, 2.0, rows, dtype=torch.float32)
    leading = options.pop("leading", (rows,))
    call["hidden"] = call["hidden"].view(*leading, SIZE)
    has_least, call = options.pop("least", False), {**call, "target_ids": ids.view(leading), **options}
    return {**call, "min_logit": below_targets(**call)} if has_least else call


def part_of(call: dict[str, Any], group: Any) -> slice:
    return slice(*vocab_shards(len(call["lm_head_weight"]), group.size())[group.rank()])


def shard(call: dict[str, Any], group: Any) -> dict[str, Any]:
    part = part_of(call, group)
    mine = {name: call[name][part] for name in ("lm_head_weight", "bias") if name in call}
    return {**call, **mine, "process_group": group, "vocab_size": len(call["lm_head_weight"])}


def results(call: dict[str, Any], function: Callable[..., Any] = linear_logp) -> dict[str, torch.Tensor]:
    leaves = {name: call[name].detach().clone().requires_grad_() for name in OPERANDS if name in call}
    with torch.no_grad():
        plain = linear_logp(**call)
    result = function(**{**call, **leaves})
    named = result._asdict() if isinstance(result, LogpStats) else {"logp": result}
    first = plain.logp if isinstance(plain, LogpStats) else plain
    assert torch.equal(bits_of(first), bits_of(named["logp"].detach()))
    upstream = [Draw(value.dtype, seed=3).normal(*value.shape) for value in named.values()]
    torch.autograd.backward(list(named.values()), upstream)
    grads = {f"gradient of {name}": leaf.grad for name, leaf in leaves.items()}
    return {name: value.detach() for name, value in {**named, **grads}.items()}


def same(result: torch.Tensor, expected: torch.Tensor) -> bool:
    one, other = (bits_of(value.masked_fill(value.isnan(), torch.nan)) for value in (result, expected))
    return result.dtype == expected.dtype and torch.equal(one, other)


def differing(call: dict[str, Any], group: Any, function: Callable[..., Any] = linear_logp, **more: Any) -> list[str]:
    """Return the names of the results that do not have one process's bits."""
    expected = results({**call, "vocab_segments": 8})
    result = results({**shard(call, group), **more}, function)
    for name in ("lm_head_weight", "bias"):
        if name in call:
            expected[f"gradient of {name}"] = expected[f"gradient of {name}"][part_of(call, group)]
    return [name for name, value in expected.items() if not same(result[name], value)]


def accumulated(call: dict[str, Any], steps: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return main_grad after micro-batches of 16 tokens, and the gradients of hidden."""
    weight = call["lm_head_weight"].clone().requires_grad_()
    weight.main_grad = torch.ones(weight.shape)
    grads = []
    for step in range(steps):
        rows = slice(16 * step, 16 * step + 16)
        hidden = call["hidden"][rows].clone().requires_grad_()
        part = {**call, "hidden": hidden, "target_ids": call["target_ids"][rows], "lm_head_weight": weight}
        linear_logp(**part).square().sum().backward()
        grads.append(hidden.grad)
    assert weight.grad is None
    return weight.main_grad, grads


def bits(group: Any, mesh: Any) -> list[Any]:
    failed: list[Any] = []
    for options in CALLS:
        call = drawn(**options)
        if bad := differing(call, group):
            failed.append((options, bad))
    with patch("rl_kernels.linear_logp.autograd.ROWS", 4):
        memory = "fast" if group.rank() else "lean"
        failed += differing(drawn(**CALLS[1]), group, process_group=mesh, vocab_segments=8, memory=memory)
    call = drawn(5000, rows=48)
    mine, part = shard(call, group), part_of(call, group)
    whole, expected = accumulated({**call, "vocab_segments": 8}, 3)
    result, grads = accumulated(mine, 3)
    failed += [] if torch.equal(result, whole[part]) else ["main_grad"]
    failed += ["main_grad, hidden" for one, other in zip(grads, expected, strict=True) if not torch.equal(one, other)]
    # A frozen weight; and hidden states that need no gradient, for which nothing is exchanged.
    for name in ("hidden", "lm_head_weight"):
        leaf = mine[name].clone().requires_grad_()
        alone = torch.autograd.grad(linear_logp(**{**mine, name: leaf}).sum(), leaf)[0]
        leaf = call[name].clone().requires_grad_()
        whole = torch.autograd.grad(linear_logp(**{**call, name: leaf}, vocab_segments=8).sum(), leaf)[0]
        failed += [] if torch.equal(alone, whole[part] if name == "lm_head_weight" else whole) else [f"{name} alone"]
    return [*failed, *known_in_a_group(call, mine), *loss_in_a_group(call, mine, part)]


def loss_in_a_group(call: dict[str, Any], mine: dict[str, Any], part: slice) -> list[str]:
    """A loss by chunks has one process's bits; ranks exchange the gradient of hidden chunk by chunk."""
    result = []
    for arguments in (mine, {**call, "vocab_segments": 8}):
        leaves = {name: arguments[name].clone().requires_grad_() for name in ("hidden", "lm_head_weight")}
        options = {"cu_seqlens": [0, 9, 30, 48], "chunk_tokens": 30}

        def losses(logp: torch.Tensor, chunk: Chunk) -> torch.Tensor:
            parts = logp.square().split(chunk.cu_seqlens.diff().tolist())
            return torch.stack([each.cumsum(0)[-1] for each in parts])

        loss = linear_logp_loss(**{**arguments, **leaves}, loss=losses, **options)
        loss.backward()
        result.append([loss.detach(), leaves["hidden"].grad, leaves["lm_head_weight"].grad])
    result[1][2] = result[1][2][part]
    return [f"loss {number}" for number, pair in enumerate(zip(*result, strict=True)) if not torch.equal(*pair)]


def known_in_a_group(call: dict[str, Any], mine: dict[str, Any]) -> list[str]:
    """Statistics that are known give one process's bits; all ranks form the same rows again."""
    with torch.no_grad():
        known, alone = linear_logp_known(**mine), linear_logp_known(**call)
    failed = [] if all(map(torch.equal, known[:2], alone[:2])) else ["known"]
    leaf, other = (call["hidden"].clone().requires_grad_() for _ in range(2))
    result = torch.autograd.grad(linear_logp_from_known(**{**mine, "hidden": leaf}, known=known).sum(), leaf)[0]
    expected = torch.autograd.grad(linear_logp(**{**call, "hidden": other}, vocab_segments=8).sum(), other)[0]
    return failed if torch.equal(result, expected) else [*failed, "gradient of known"]


def errors(group: Any) -> dict[str, str]:
    """Return the text of each error, which must be the same on all ranks."""
    world = group.size()
    call, texts, last = shard(drawn(9001, bias=True), group), {}, group.rank() == world - 1
    weight = call["lm_head_weight"]

    def attempt(name: str, function: Callable[..., Any] = linear_logp, **changes: Any) -> None:
        try:
            function(**{**call, **changes})
        except Exception as error:
            texts[name] = f"{type(error).__name__}: {error}"

    attempt("ids", target_ids=call["target_ids"] + (10**6 if last else 0))
    attempt("shape", hidden=call["hidden"][: ROWS - last], target_ids=call["target_ids"][: ROWS - last])
    attempt("values", hidden=call["hidden"] + float(last))
    attempt("temperature", temperature=1.0 + last)
    attempt("temperatures", temperature=torch.full((ROWS,), 1.0 + last))
    attempt("statistics", return_stats=last)
    attempt("thresholds", min_logit=torch.full((ROWS,), -50.0 - last))
    attempt("targets", min_logit=torch.full((ROWS,), 50.0))
    attempt("chains", join_tokens=16 + 16 * last)
    attempt("hidden", hidden=[1.0] if last else call["hidden"])
    attempt("size", vocab_size=None)
    attempt("sizes", vocab_size=9001 + 8192 * last)
    attempt("segments", vocab_segments=1)
    attempt("gradient", hidden=call["hidden"].clone().requires_grad_(last))
    weight = weight.clone().requires_grad_()
    weight.main_grad = torch.zeros(weight.shape, dtype=torch.float64 if last else torch.float32)
    attempt("main_grad", lm_head_weight=weight)
    hidden = call["hidden"].clone().requires_grad_()
    result = torch.autograd.grad(linear_logp(**{**call, "hidden": hidden}).square().sum(), hidden, create_graph=True)
    known = linear_logp_known(**call)
    attempt("known", linear_logp_from_known, known=known._replace(logp=known.logp + float(last)))
    attempt("bits", linear_logp_from_known, known=known._replace(norm=known.norm + 1))
    attempt("double", lambda **_: result[0].sum().backward())
    # The group is still in step.
    linear_logp(**call)
    return texts


def alone(group: Any) -> list[str]:
    """A group of one rank gives the gradient of hidden that larger groups give, unless it is asked for one chain."""
    call = drawn(9001)
    result = [results({**call, **more}) for more in ({"process_group": group}, {"vocab_segments": 8})]
    plain = [results({**call, **more}) for more in ({"process_group": group, "vocab_segments": 1}, {})]
    return [name for one, other in (result, plain) for name in one if not torch.equal(one[name], other[name])]


def ranks(rank: int, world: int) -> tuple[list[Any], list[dict[str, str]]]:
    """Return what failed in all ranks, in one of two pairs of them and in this rank alone, and the errors' texts."""
    mesh, whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), distributed.group.WORLD
    pair, single = mesh["tp"].get_group(), [distributed.new_group([one]) for one in range(world)][rank]
    failed = [*bits(whole, whole), *bits(pair, mesh["tp"]), *(alone(single) if rank == 0 else [])]
    if rank < 2:
        failed += differing(drawn(**CALLS[1]), pair, torch.compile(linear_logp, fullgraph=True, backend="aot_eager"))
    return failed, [errors(whole), errors(pair)]


def test_ranks_have_the_bits_of_one_process() -> None:
    result = run_ranks(ranks, 4, 4)
    assert [failed for failed, _ in result] == [[]] * 4
    whole, pairs = zip(*(texts for _, texts in result), strict=True)
    for texts in (whole, pairs[:2], pairs[2:]):
        check(texts[0], len(texts))
        assert all(other == texts[0] for other in texts)


def thresholds_apart(rank: int) -> list[str]:
    """Return what calls say whose thresholds differ by rank, after one of their kind; then of logits that are NaN."""
    call = shard(drawn(9001), distributed.group.WORLD) | {"target_ids": torch.full((ROWS,), 9000)}
    everywhere, here = torch.full((ROWS,), -50.0), torch.full((ROWS,), 1e30 if rank else -torch.inf)
    known = linear_logp_known(**call, min_logit=everywhere)
    linear_logp_from_known(**call, min_logit=everywhere, known=known, check_rows=0)
    known = linear_logp_known(**call, min_logit=here, validate=False)
    column = torch.full_like(call["lm_head_weight"][:1], 1.0 if rank else torch.nan)
    of_nan = {"min_logit": -everywhere, "lm_head_weight": torch.cat((column, call["lm_head_weight"][1:]))}
    texts = []
    for function, options in (
        (linear_logp, {"min_logit": here}),
        (linear_logp_known, {"min_logit": here}),
        (linear_logp_from_known, {"min_logit": here, "known": known, "check_rows": 0}),
        (linear_logp, of_nan),
    ):
        try:
            result = function(**{**call, **options})
        except ValueError as error:
            texts.append(str(error)[:53])
        else:
            texts.append(str(float((result if isinstance(result, torch.Tensor) else result.logp)[0])))
    return texts


def test_no_rank_waits_for_another_that_has_other_thresholds() -> None:
    below = "target_ids: expected tokens whose logit is at least m"
    assert run_ranks(thresholds_apart, 2, timeout=60.0) == [["-inf"] * 3 + ["nan"], [below] * 3 + ["nan"]]


def check(texts: dict[str, str], world: int) -> None:
    """Check the text of each error."""
    where = f"(on rank {world - 1} of process_group)"
    differ = "expected the same on every rank of process_group"
    assert texts["ids"].startswith("ValueError: target_ids: expected values in [0, 9001)")
    assert texts["ids"].endswith(where)
    assert texts["shape"].startswith(f"ValueError: hidden: {differ}, got (9, 16) float32, ")
    assert texts["values"].startswith(f"ValueError: hidden (hash of its values): {differ}")
    assert texts["temperature"].startswith(f"ValueError: temperature: {differ}")
    assert texts["temperatures"].startswith(f"ValueError: temperature (hash of its values): {differ}")
    assert texts["thresholds"].startswith(f"ValueError: min_logit (hash of its values): {differ}")
    assert texts["targets"].startswith(
        "ValueError: target_ids: expected tokens whose logit is at least min_logit, 9 of 9"
    )
    assert texts["statistics"].startswith(f"ValueError: return_stats: {differ}")
    assert texts["chains"].startswith(f"ValueError: join_tokens: {differ}, got 16, ")
    assert texts["hidden"] == f"TypeError: hidden: expected a tensor, got list {where}"
    assert texts["size"].startswith("ValueError: vocab_size: expected the number of columns of the whole vocabulary")
    # With other sizes the last of two ranks has other columns; the last of four has none either way.
    expected = "lm_head_weight: expected" if world == 2 else f"vocab_size: {differ}"
    assert texts["sizes"].startswith(f"ValueError: {expected}")
    assert texts["segments"].startswith("ValueError: vocab_segments: expected 8 with a process_group of")
    assert texts["gradient"].startswith(f"ValueError: gradient of hidden: {differ}, got is not computed, ")
    assert texts["main_grad"].startswith("TypeError: lm_head_weight.main_grad: expected dtype float32")
    assert "double backward is not supported" in texts["double"]
    assert texts["known"].startswith(f"ValueError: known.logp (hash of its values): {differ}")
    assert texts["bits"].startswith("BitsDiffer: known.norm: expected the bits that these inputs give, row ")
    assert len(texts) == 18
