"""Calls of experts over ranks, and what does not have the bits of one process with the tokens of all ranks."""

from __future__ import annotations

from typing import Any

import torch

from rl_kernels.core.testing import Draw, bits_of
from rl_kernels.moe import experts

ROWS, PARTS = ("hidden", "ids", "weights", "shared"), ("gate_up", "down", "gate_up_bias", "down_bias")
LEAVES = ("hidden", "weights", "shared", *PARTS)
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
