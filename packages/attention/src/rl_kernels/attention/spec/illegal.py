"""Calls of det_attention that must raise: the case of the good call, the mistake, and a pattern of the message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rl_kernels.core.testing import IllegalCall, Inputs, edited, given
from rl_kernels.core.testing.spec import Change

DENSE, PACKED, CACHE, PAGES = "", "packed", "decode", "pages"
RANGE, ASCENDING = r"expected values in \[0", "expected numbers that ascend"


def _with(name: str, edit: Callable[[Inputs], Any]) -> Change:
    return lambda call: {**call, name: edit(call)}


def _for_each_sequence(**numbers: int) -> Change:
    """Set one number per sequence, the same for all sequences."""

    def change(call: Inputs) -> Inputs:
        q = call["q"]
        return {**call, **{name: q.new_full((len(q),), value, dtype=torch.int64) for name, value in numbers.items()}}

    return change


def _edit_keys(edit: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda call: {**call, **{name: edit(call[name]) for name in ("k", "v")}}


def _integers(shape: Callable[[torch.Tensor], tuple[int, ...]]) -> Callable[[Inputs], torch.Tensor]:
    return lambda call: call["q"].new_zeros(shape(call["q"]), dtype=torch.int64)


def _other_dtype(x: torch.Tensor) -> torch.Tensor:
    return x.half() if x.dtype != torch.float16 else x.float()


def _three_heads(call: Inputs) -> Inputs:
    return {**call, **dict.fromkeys("kv", torch.cat((call["q"][:, :1],) * 2, 2).expand(-1, 3, -1, -1))}


def _descending(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x[:1], x[-1:] + 1, x[2:])) if len(x) > 2 else x + 1


def _beyond_the_table(call: Inputs) -> torch.Tensor:
    return torch.full_like(call["seqused_k"], call["block_table"].shape[1] * call["k"].shape[1] + 1)


WRONG_TYPES: tuple[tuple[str, str, Change, str], ...] = (
    (DENSE, "q not a tensor", given(q=[1.0]), "q: expected a tensor"),
    (DENSE, "q of FP64", edited("q", torch.Tensor.double), "q: expected dtype"),
    (DENSE, "k of integers", edited("k", torch.Tensor.int), "k: expected dtype"),
    *((DENSE, f"{name} of another dtype", edited(name, _other_dtype), f"{name}: expected dtype") for name in "kv"),
    (DENSE, "scale text", given(scale="1"), "scale: expected a number"),
    (DENSE, "causal a number", given(causal=1), "causal: expected a bool"),
    (DENSE, "return_lse a number", given(return_lse=1), "return_lse: expected a bool"),
    (DENSE, "window a number", given(window=5), r"window: expected \(left, right\)"),
    (DENSE, "window of floats", given(window=(5.0, 0)), "window: expected an integer"),
    (DENSE, "sinks of integers", _with("sinks", _integers(lambda q: (4,))), "sinks: expected dtype"),
    (DENSE, "backend not a name", given(backend=3), "backend: expected a name"),
    (DENSE, "a group's name", given(process_group="cp"), "process_group: expected a ProcessGroup"),
    (DENSE, "start of floats", _with("k_start", lambda c: c["q"][:, 0, 0, 0].float()), "k_start: expected dtype"),
    (PACKED, "cumulative of floats", edited("cu_seqlens_q", torch.Tensor.float), "cu_seqlens_q: expected dtype"),
    (PACKED, "longest a float", given(max_seqlen_k=3.0), "max_seqlen_k: expected an integer"),
)
WRONG_VALUES: tuple[tuple[str, str, Change, str], ...] = (
    (DENSE, "q of three dims", edited("q", lambda x: x[0]), "q: expected 4 dims"),
    (DENSE, "k of three dims", edited("k", lambda x: x[0]), "k: expected 4 dims"),
    (DENSE, "k elsewhere", edited("k", lambda x: x.to("meta")), "k: expected device"),
    (DENSE, "head size odd", edited("q", lambda x: x[..., :-1]), "q: expected a head size"),
    (DENSE, "head size of v odd", edited("v", lambda x: x[..., :-1]), "v: expected a head size"),
    (DENSE, "another head size", edited("k", lambda x: torch.cat((x, x), -1)), "k: expected head size"),
    (DENSE, "v of another length", edited("v", lambda x: x[:, 1:]), "v: expected shape"),
    (DENSE, "heads that do not divide", _three_heads, "k: expected a number of heads"),
    (DENSE, "no heads", _edit_keys(lambda x: x[:, :, :0]), "k: expected a number of heads"),
    (DENSE, "another batch", _edit_keys(lambda x: torch.cat((x, x))), r"k: expected \d+ sequences"),
    (DENSE, "scale of 0", given(scale=0.0), "scale: expected a number > 0"),
    (DENSE, "scale NaN", given(scale=float("nan")), "scale: expected a finite number"),
    (DENSE, "softcap negative", given(softcap=-1.0), "softcap: expected a number >= 0"),
    (DENSE, "softcap infinite", given(softcap=float("inf")), "softcap: expected a finite number"),
    (DENSE, "window negative", given(window=(-2, 0)), "window: expected an integer >= 0"),
    (DENSE, "window of 70 bits", given(window=(2**70, 0)), "window: expected an integer <="),
    (DENSE, "sinks of another shape", _with("sinks", lambda c: c["q"][0, 0, :-1, 0]), "sinks: expected shape"),
    (DENSE, "unknown backend", given(backend="no-such"), "backend: det_attention has no backend"),
    (DENSE, "longest without packing", given(max_seqlen_q=3), "max_seqlen_q: expected None without"),
    (DENSE, "packed keys alone", _with("cu_seqlens_k", _integers(lambda q: (2,))), "k: expected 3 dims"),
    (
        *(DENSE, "pages without lengths"),
        *(_with("block_table", _integers(lambda q: (len(q), 1))), "seqused_k: expected the number"),
    ),
    (
        DENSE,
        "another number of starts",
        _with("k_start", _integers(lambda q: (len(q) + 1,))),
        "k_start: expected shape",
    ),
    (DENSE, "start negative without a window", _for_each_sequence(k_start=-1), f"k_start: {RANGE}"),
    (
        *(DENSE, "start negative with a window that is open on the left"),
        *(lambda c: {**_for_each_sequence(k_start=-1)(c), "window": (None, 0)}, f"k_start: {RANGE}"),
    ),
    (DENSE, "start beyond the end", _for_each_sequence(k_start=10**6), f"k_start: {RANGE}"),
    (DENSE, "more keys than there are", _for_each_sequence(seqused_k=10**6), f"seqused_k: {RANGE}"),
    (DENSE, "keys that nothing ignores", _for_each_sequence(seqused_k=-100), rf"seqused_k: {RANGE}.*\]$"),
    (DENSE, "more queries than there are", _for_each_sequence(seqused_q=10**6), f"seqused_q: {RANGE}"),
    (
        *(DENSE, "start beyond the keys in use"),
        *(_for_each_sequence(k_start=1, seqused_k=0), "k_start: expected values of at most seqused_k"),
    ),
    (
        *(PACKED, "packed with a start"),
        *(_with("k_start", lambda c: c["cu_seqlens_q"][:-1]), "k_start: expected None with cu_seqlens_k"),
    ),
    (PACKED, "cumulative from 1", edited("cu_seqlens_q", lambda x: x + 1), f"cu_seqlens_q: {ASCENDING}"),
    (
        *(PACKED, "cumulative to too little"),
        *(edited("cu_seqlens_k", lambda x: x.clamp(max=int(x[-1]) - 1)), f"cu_seqlens_k: {ASCENDING}"),
    ),
    (PACKED, "cumulative that descends", edited("cu_seqlens_k", _descending), f"cu_seqlens_k: {ASCENDING}"),
    (PACKED, "cumulative of nothing", edited("cu_seqlens_q", lambda x: x[:0]), "cu_seqlens_q: expected at least 1"),
    (
        *(PACKED, "another number of sequences"),
        *(edited("cu_seqlens_k", lambda x: torch.cat((x, x[-1:]))), "cu_seqlens_k: expected shape"),
    ),
    (PACKED, "longest too short", given(max_seqlen_q=0), "max_seqlen_q: expected at least"),
    (PAGES, "page size odd", _edit_keys(lambda x: x[:, :-1]), "k: expected a page size"),
    (PAGES, "page of nothing", _edit_keys(lambda x: x[:, :0]), "k: expected a page size"),
    (PAGES, "page that does not exist", edited("block_table", lambda x: x + 10**6), f"block_table: {RANGE}"),
    (PAGES, "another number of tables", edited("block_table", lambda x: x[:-1]), "block_table: expected"),
    (PAGES, "more keys than pages", edited("seqused_k", lambda x: x + 10**6), f"seqused_k: {RANGE}"),
    (PAGES, "more keys than a table has room for", _with("seqused_k", _beyond_the_table), f"seqused_k: {RANGE}"),
    (
        PAGES,
        "pages with a start",
        _with("k_start", lambda c: c["seqused_k"]),
        "k_start: expected None with block_table",
    ),
    (
        *(CACHE, "gradient of a cache"),
        *(edited("k", lambda x: x.clone().requires_grad_()), "k: expected a tensor that does not require grad"),
    ),
)
ILLEGAL = tuple(
    IllegalCall(name, change, error, match, case)
    for error, rows in ((TypeError, WRONG_TYPES), (ValueError, WRONG_VALUES))
    for case, name, change, match in rows
)
